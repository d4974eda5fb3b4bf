//! Between the API's messages and the connector's terms. Nothing is decided here: what a caller sent becomes a draft, what
//! the connector answers becomes a message.

use prost_types::{Duration, FieldMask, Timestamp};
use tonic::Status;

use super::{proto::pubsub as pb, status::to_status};
use crate::{
    connector::{
        PageRequest,
        draft::{Span, TransformDraft, TransformKind},
    },
    model::{MessageTransform, Name, names::Collection},
};

#[cfg(feature = "schemas")]
mod schema;
mod snapshot;
mod subscription;
mod topic;

#[cfg(feature = "schemas")]
pub use schema::{definition_draft, detail, schema};
pub use snapshot::{seek_target, snapshot, snapshot_draft};
pub use subscription::{push_config, subscription, subscription_draft};
pub use topic::{encoding, topic, topic_draft};

/// Shown in place of a topic that was deleted.
const DELETED_TOPIC: &str = "_deleted-topic_";
/// Shown in place of a schema that was deleted.
const DELETED_SCHEMA: &str = "_deleted-schema_";

/// Parses a full resource name.
pub fn name<K: Collection>(text: &str) -> Result<Name<K>, Status> {
    Name::parse(text).map_err(|error| to_status(error.into()))
}

/// The fields of a list request that select the page.
pub fn page(size: i32, token: String) -> PageRequest {
    PageRequest { size, token }
}

/// The paths of an update mask; none when there is no mask.
pub fn paths(mask: Option<FieldMask>) -> Vec<String> {
    mask.map(|mask| mask.paths).unwrap_or_default()
}

fn span(duration: Duration) -> Span {
    Span { seconds: duration.seconds, nanos: duration.nanos }
}

fn duration(span: Span) -> Duration {
    Duration { seconds: span.seconds, nanos: span.nanos }
}

fn duration_ms(ms: u64) -> Duration {
    duration(Span::from_ms(ms))
}

fn time_span(time: Timestamp) -> Span {
    Span { seconds: time.seconds, nanos: time.nanos }
}

fn timestamp_ms(ms: u64) -> Timestamp {
    let Span { seconds, nanos } = Span::from_ms(ms);
    Timestamp { seconds, nanos }
}

// The deprecated field is kept to be given back.
#[allow(deprecated)]
pub fn transform_draft(transform: pb::MessageTransform) -> TransformDraft {
    use pb::message_transform::Transform;
    let kind = match transform.transform {
        Some(Transform::JavascriptUdf(udf)) => TransformKind::JavaScript { function_name: udf.function_name, code: udf.code },
        Some(Transform::Compression(_)) => TransformKind::Compression,
        Some(Transform::AiInference(_)) => TransformKind::AiInference,
        None => TransformKind::Unknown,
    };
    TransformDraft { kind, disabled: transform.disabled, enabled: transform.enabled }
}

fn transform(transform: MessageTransform) -> pb::MessageTransform {
    let MessageTransform { function_name, code, disabled, enabled } = transform;
    let udf = pb::JavaScriptUdf { function_name, code };
    let transform = Some(pb::message_transform::Transform::JavascriptUdf(udf));
    // The deprecated field is given back as it came.
    #[allow(deprecated)]
    pb::MessageTransform { disabled, enabled, transform }
}
