//! The vocabulary every other layer speaks. Values are checked where they are made, so the rest can trust them.

pub mod access;
pub mod limits;
pub mod message;
pub mod meter;
pub mod names;
pub mod policy;
pub mod resource;
pub mod schema;
pub mod text;

pub use message::{EncodedMessage, MessageError};
pub use names::{Name, NameError, SchemaName, SnapshotName, SubscriptionName, TopicName};
pub use policy::{DeadLetterPolicy, ExpirationPolicy, RetryPolicy};
pub use resource::{
    Encoding, MessageTransform, OidcToken, PushConfig, PushWrapper, SchemaSettings, Snapshot, StoragePolicy, Subscription, Topic,
};
pub use schema::{Definition, Schema, SchemaRevision, SchemaType};
