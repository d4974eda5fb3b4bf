//! Topics, subscriptions and snapshots as they are stored. Durations keep the precision of the request.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DeadLetterPolicy, ExpirationPolicy, RetryPolicy, SchemaName, SnapshotName, SubscriptionName, TopicName};

/// Labels, sorted by key.
pub type Labels = BTreeMap<String, String>;

/// A topic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Topic {
    pub name: TopicName,
    /// Tells a topic from an earlier one of the same name; random, never 0.
    pub incarnation: u64,
    #[serde(default)]
    pub labels: Labels,
    #[serde(default)]
    pub message_storage_policy: Option<StoragePolicy>,
    /// Stored and echoed, not applied: messages are encrypted by the operator's own disk or Redis.
    #[serde(default)]
    pub kms_key_name: String,
    #[serde(default)]
    pub schema_settings: Option<SchemaSettings>,
    /// How long the topic keeps messages for seeking, milliseconds; none keeps nothing beyond the subscriptions' need.
    #[serde(default)]
    pub message_retention_ms: Option<u64>,
    #[serde(default)]
    pub message_transforms: Vec<MessageTransform>,
}

/// Where messages may be stored; echoed, the operator chooses the place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoragePolicy {
    pub allowed_persistence_regions: Vec<String>,
    pub enforce_in_transit: bool,
}

/// Encoding of messages on a topic with a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Encoding {
    Json,
    Binary,
}

/// The schema that messages of a topic must follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchemaSettings {
    pub schema: SchemaName,
    /// Incarnation of the schema; the settings are broken when the schema's differs or the schema is gone.
    pub schema_incarnation: u64,
    pub encoding: Encoding,
    #[serde(default)]
    pub first_revision_id: String,
    #[serde(default)]
    pub last_revision_id: String,
    /// Sequence numbers of those revisions, which hold when a revision itself is deleted; none sets no bound.
    #[serde(default)]
    pub first_sequence: Option<u64>,
    #[serde(default)]
    pub last_sequence: Option<u64>,
}

/// A user-defined JavaScript function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageTransform {
    pub function_name: String,
    pub code: String,
    #[serde(default)]
    pub disabled: bool,
    /// The old opposite of `disabled`: echoed, without effect.
    #[serde(default)]
    pub enabled: bool,
}

impl MessageTransform {
    /// Whether both do the same.
    pub fn same_code(&self, other: &Self) -> bool {
        self.function_name == other.function_name && self.code == other.code
    }
}

/// A subscription.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Subscription {
    pub name: SubscriptionName,
    /// Tells a subscription from an earlier one of the same name; random, never 0.
    pub incarnation: u64,
    pub topic: TopicName,
    /// Incarnation of the topic; the subscription is orphaned when the topic's differs or the topic is gone.
    pub topic_incarnation: u64,
    #[serde(default)]
    pub push_config: PushConfig,
    /// 10 to 600.
    pub ack_deadline_seconds: u32,
    #[serde(default)]
    pub retain_acked_messages: bool,
    pub message_retention_ms: u64,
    #[serde(default)]
    pub labels: Labels,
    #[serde(default)]
    pub enable_message_ordering: bool,
    pub expiration_policy: ExpirationPolicy,
    #[serde(default)]
    pub filter: String,
    #[serde(default)]
    pub dead_letter_policy: Option<DeadLetterPolicy>,
    #[serde(default)]
    pub retry_policy: Option<RetryPolicy>,
    #[serde(default)]
    pub detached: bool,
    #[serde(default)]
    pub enable_exactly_once_delivery: bool,
    #[serde(default)]
    pub message_transforms: Vec<MessageTransform>,
}

#[cfg(test)]
impl Subscription {
    /// One with every default.
    pub fn plain(name: SubscriptionName, incarnation: u64, topic: TopicName, topic_incarnation: u64) -> Self {
        Self {
            name,
            incarnation,
            topic,
            topic_incarnation,
            push_config: PushConfig::default(),
            ack_deadline_seconds: 10,
            retain_acked_messages: false,
            message_retention_ms: 7 * 86_400_000,
            labels: Labels::new(),
            enable_message_ordering: false,
            expiration_policy: ExpirationPolicy::Never,
            filter: String::new(),
            dead_letter_policy: None,
            retry_policy: None,
            detached: false,
            enable_exactly_once_delivery: false,
            message_transforms: Vec::new(),
        }
    }
}

/// How messages are pushed; an empty endpoint means pull.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushConfig {
    pub endpoint: String,
    #[serde(default)]
    pub attributes: BTreeMap<String, String>,
    #[serde(default)]
    pub oidc_token: Option<OidcToken>,
    #[serde(default)]
    pub wrapper: Option<PushWrapper>,
}

/// The identity a push request proves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OidcToken {
    pub service_account_email: String,
    pub audience: String,
}

/// The body of a push request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PushWrapper {
    Pubsub,
    None { write_metadata: bool },
}

/// A snapshot of a subscription's unacknowledged messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub name: SnapshotName,
    /// Random, never 0; names the engine's copy of the acknowledgement state.
    pub incarnation: u64,
    pub topic: TopicName,
    pub topic_incarnation: u64,
    /// When the snapshot is deleted, milliseconds since the epoch.
    pub expire_time_ms: u64,
    #[serde(default)]
    pub labels: Labels,
}
