//! The use cases of Pub/Sub, in the model's terms and the same on every engine.

/// Settings the use cases obey.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ack deadline of a subscription that names none, 10 to 600.
    pub default_ack_deadline_seconds: u32,
    /// Ceiling of a stream's outstanding messages when the client asks for no limit.
    pub max_outstanding_messages: u64,
    /// Leased messages of one subscription over all streams and nodes.
    pub max_inflight_per_subscription: u64,
    /// A stream is closed with UNAVAILABLE after this long, give or take a tenth.
    pub stream_close_seconds: u64,
    /// Bytes of one message.
    pub max_message_bytes: usize,
    /// Total life of one lease; 0 sets no bound.
    pub max_ack_extension_seconds: u32,
    /// Shortest extension that is not refused, 0 to 10.
    pub min_ack_extension_seconds: u32,
    /// A nack is redelivered at once even under a retry policy.
    pub nack_bypasses_backoff: bool,
    /// Which nodes may settle a lease of an exactly-once subscription.
    pub exactly_once_scope: Scope,
    /// Names this node in ack ids.
    pub node_id: String,
}

/// Reach of exactly-once leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Any node settles any lease.
    Cluster,
    /// Only the node that delivered a message settles it.
    Node,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            default_ack_deadline_seconds: 10,
            max_outstanding_messages: 1000,
            max_inflight_per_subscription: 20_000,
            stream_close_seconds: 1800,
            max_message_bytes: 10_485_760,
            max_ack_extension_seconds: 0,
            min_ack_extension_seconds: 10,
            nack_bypasses_backoff: false,
            exactly_once_scope: Scope::Cluster,
            node_id: String::new(),
        }
    }
}
