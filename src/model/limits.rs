//! Bounds of the API. Each comes from the public quota and reference pages unless its comment says otherwise.

/// Messages in one Publish request.
pub const MAX_PUBLISH_MESSAGES: usize = 1000;
/// Encoded bytes of one Publish request.
pub const MAX_PUBLISH_BYTES: usize = 10_000_000;
/// Bytes of one request on the wire; the transport must let this much through to answer precisely.
pub const MAX_REQUEST_BYTES: usize = 10_485_760;
/// Attributes of one message.
pub const MAX_ATTRIBUTES: usize = 100;
/// Bytes of an attribute key.
pub const MAX_ATTRIBUTE_KEY_BYTES: usize = 256;
/// Bytes of an attribute value.
pub const MAX_ATTRIBUTE_VALUE_BYTES: usize = 1024;
/// Bytes of an ordering key.
pub const MAX_ORDERING_KEY_BYTES: usize = 1024;
/// Bytes of an Acknowledge, ModifyAckDeadline or StreamingPull request.
pub const MAX_ACK_REQUEST_BYTES: usize = 524_288;
/// Messages of one Pull response.
pub const MAX_PULL_MESSAGES: usize = 1000;
/// Message bytes of one Pull response, unless its first message is larger. With the ack ids of a thousand messages it stays
/// below 4 MiB, which is all that gRPC clients take unless they are told otherwise.
pub const MAX_PULL_BYTES: usize = 3_500_000;
/// Shortest ack deadline of a subscription or a stream.
pub const MIN_ACK_DEADLINE_SECONDS: u32 = 10;
/// Longest ack deadline anywhere.
pub const MAX_ACK_DEADLINE_SECONDS: u32 = 600;
/// Shortest message retention of a topic or a subscription: 10 minutes.
pub const MIN_RETENTION_SECONDS: i64 = 600;
/// Longest message retention of a topic or a subscription: 31 days.
pub const MAX_RETENTION_SECONDS: i64 = 31 * 86_400;
/// Message retention of a subscription that names none: 7 days.
pub const DEFAULT_RETENTION_SECONDS: i64 = 7 * 86_400;
/// Shortest time to live of an idle subscription: 1 day.
pub const MIN_EXPIRATION_SECONDS: i64 = 86_400;
/// Time to live of an idle subscription that names none: 31 days.
pub const DEFAULT_EXPIRATION_SECONDS: i64 = 31 * 86_400;
/// Bytes of a filter expression.
pub const MAX_FILTER_BYTES: usize = 256;
/// Labels of one resource.
pub const MAX_LABELS: usize = 64;
/// Characters of a label key or value.
pub const MAX_LABEL_CHARS: usize = 63;
/// Dead-letter policy: fewest delivery attempts.
pub const MIN_DELIVERY_ATTEMPTS: i32 = 5;
/// Dead-letter policy: most delivery attempts.
pub const MAX_DELIVERY_ATTEMPTS: i32 = 100;
/// Retry policy: longest backoff.
pub const MAX_BACKOFF_SECONDS: i64 = 600;
/// Retry policy: backoff of a policy that names no minimum.
pub const DEFAULT_MIN_BACKOFF_SECONDS: i64 = 10;
/// Resources of one list page, also the size of a page that names none.
pub const MAX_PAGE_SIZE: usize = 1000;
/// Life of a snapshot of a subscription without backlog: 7 days.
pub const MAX_SNAPSHOT_SECONDS: i64 = 7 * 86_400;
/// A snapshot that would live shorter than this is refused: 1 hour.
pub const MIN_SNAPSHOT_SECONDS: i64 = 3600;
/// Enabled message transforms of one topic or subscription.
pub const MAX_TRANSFORMS: usize = 5;
/// Bytes of one user-defined function.
pub const MAX_UDF_BYTES: usize = 20 * 1024;
/// Bytes of one schema definition: 300 KB.
pub const MAX_SCHEMA_BYTES: usize = 300 * 1024;
/// Revisions of one schema.
pub const MAX_SCHEMA_REVISIONS: usize = 20;
