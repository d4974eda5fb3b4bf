//! Why a use case failed. `Display` is the public text: it names the field, the value and the range, and leaks nothing of
//! the store. What only the operator may know is in [`Error::internal`].

use std::fmt;

use crate::{
    broker::BrokerError,
    model::{MessageError, Name, NameError, limits::MAX_SCHEMA_REVISIONS, names::Collection},
};

/// Why one ack id of an exactly-once subscription was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckFailure {
    /// The lease is over or the id was never valid; a repeat can't succeed.
    Permanent,
    /// The broker could not tell; a repeat may succeed.
    Transient,
}

impl AckFailure {
    /// The value that clients look for in the error's metadata; they match on the prefixes `PERMANENT_FAILURE_` and
    /// `TRANSIENT_FAILURE_`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Permanent => "PERMANENT_FAILURE_INVALID_ACK_ID",
            Self::Transient => "TRANSIENT_FAILURE_INVALID_ACK_ID",
        }
    }
}

/// How data fails its schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaViolation {
    /// What clients look for in the error's details, for example `INVALID_JSON_AVRO_MESSAGE`.
    pub reason: &'static str,
    /// Which revision was tried last and what is wrong.
    pub revision_info: String,
}

/// Why a use case failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A field holds something that is not legal. Holds the field's name, perhaps followed by what is wrong with it.
    #[error("You have passed an invalid argument to the service (argument={0}).")]
    Argument(String),
    #[error("The value for {field} is too small. You passed {passed} in the request, but the minimum value is {minimum}.")]
    TooSmall { field: &'static str, passed: String, minimum: String },
    #[error("The value for {field} is too large. You passed {passed} in the request, but the maximum value is {maximum}.")]
    TooLarge { field: &'static str, passed: String, maximum: String },
    #[error(
        "The value for {field} is out of bounds. You passed {passed} in the request, but the value must be between {low} and {high}."
    )]
    OutOfBounds { field: &'static str, passed: String, low: String, high: String },
    /// A request larger than the front end takes.
    #[error("Request payload size exceeds the limit: {0} bytes.")]
    PayloadTooLarge(usize),
    /// A legal field this server does not honour.
    #[error("The field {0} is not supported by this server.")]
    Unsupported(&'static str),
    #[error("The update_mask in the Update{0}Request must be set, and must contain a non-empty paths list.")]
    EmptyMask(&'static str),
    #[error(
        "Invalid update_mask provided in the Update{resource}Request: '{path}' is not a known {resource} field. Note that field paths must be of the form 'push_config' rather than 'pushConfig'."
    )]
    UnknownPath { resource: &'static str, path: String },
    #[error("Invalid update_mask provided in the Update{resource}Request: the '{path}' field in the {resource} is not mutable.")]
    ImmutablePath { resource: &'static str, path: String },
    /// Holds the resource's short id.
    #[error("Resource not found (resource={0}).")]
    NotFound(String),
    /// Holds the resource's short id.
    #[error("Resource already exists in the project (resource={0}).")]
    Exists(String),
    #[error("The subscription is detached from its topic and can't be used for this operation (resource={0}).")]
    Detached(String),
    /// Pulling from a push subscription.
    #[error("This method is not supported for this subscription type.")]
    NotPullable,
    #[error("The operation could not be completed because the requested source subscription's backlog is too old.")]
    BacklogTooOld,
    #[error(
        "The subscription's topic {subscription} is different from that of the snapshot {snapshot}; they must match in order for Seek to work. Note that a topic that was deleted and created again under the same name is a different topic."
    )]
    SnapshotOfOtherTopic { subscription: String, snapshot: String },
    #[error("No target was specified in the SeekRequest. Must specify either a time or a snapshot")]
    NoSeekTarget,
    #[error("You have not specified an ack ID in the request.")]
    NoAckIds,
    /// Holds the ack id as it was given.
    #[error("You have passed an invalid ack ID to the service (ack_id={0}).")]
    AckId(String),
    /// Holds the ack id as it was given: a genuine one of another subscription, or of an earlier one of the same name.
    #[error("The subscription does not belong to the given ack ID (ack_id={0}).")]
    ForeignAckId(String),
    #[error("Invalid ack deadline given (ack_deadline={passed}). The ack deadline must be between {low} and 600 seconds.")]
    AckDeadline { passed: i32, low: u32 },
    /// Some ids of an exactly-once subscription failed; the others of the same request were carried out.
    #[error(
        "Some acknowledgement ids in the request were invalid. This could be because the acknowledgement ids have expired or the acknowledgement ids were malformed."
    )]
    AckIds(Vec<(String, AckFailure)>),
    /// An access policy's etag is no longer the current one.
    #[error("There were concurrent policy changes. Please retry the whole read-modify-write with exponential backoff.")]
    PolicyChanged,
    /// A message transform failed on a message that was to be published. Holds the public text.
    #[error("Invalid data in message: {0}.")]
    Transform(String),
    /// Something is illegal in the request. Holds the public text.
    #[error("{0}")]
    Text(String),
    #[error("Invalid schema encoding provided.")]
    SchemaEncoding,
    /// A schema's definition is not legal, or may not follow the one before it. Holds the public text.
    #[error("{0}")]
    Schema(String),
    /// Data does not follow its schema.
    #[error("Invalid data in message: Message failed schema validation.")]
    SchemaViolation(Box<SchemaViolation>),
    /// Publishing to a topic whose schema was deleted.
    #[error("Schema associated with topic deleted.")]
    SchemaDeleted,
    #[error("The schema already has {MAX_SCHEMA_REVISIONS} revisions, which is the maximum. Please delete one first.")]
    TooManyRevisions,
    #[error("Cannot delete last revision. Please use DeleteSchema.")]
    LastRevision,
    /// Concurrent changes of the same resource kept winning.
    #[error("The resource was changed at the same time by another request. Please try again.")]
    Contended,
    /// The server ends a stream: its time is over, or the server stops.
    #[error("The service was unable to fulfill your request. Please try again.")]
    Closing,
    /// The broker can't be reached. Holds the internal text.
    #[error("The service is currently unavailable. Please try again.")]
    Unavailable(String),
    /// The broker has no room. Holds the internal text.
    #[error("The service has no room for more messages. Please try again later.")]
    Full(String),
    /// A fault of the server or its data. Holds the internal text.
    #[error("An internal error occurred.")]
    Internal(String),
}

impl Error {
    /// The resource of this name does not exist.
    pub fn not_found<K: Collection>(name: &Name<K>) -> Self {
        Self::NotFound(name.id().to_owned())
    }

    /// There is already a resource of this name.
    pub fn exists<K: Collection>(name: &Name<K>) -> Self {
        Self::Exists(name.id().to_owned())
    }

    /// `field` holds something illegal; `why` says what.
    pub fn argument(field: &str, why: impl fmt::Display) -> Self {
        Self::Argument(format!("{field}: {why}"))
    }

    /// What happened inside, for the log only.
    pub fn internal(&self) -> Option<&str> {
        match self {
            Self::Unavailable(text) | Self::Full(text) | Self::Internal(text) => Some(text),
            _ => None,
        }
    }
}

/// The conflicts that a use case expects, it handles itself; one that comes through means that others kept winning.
impl From<BrokerError> for Error {
    fn from(error: BrokerError) -> Self {
        match error {
            BrokerError::Unavailable(text) => Self::Unavailable(text),
            BrokerError::Full(text) => Self::Full(text),
            BrokerError::Damaged(text) => Self::Internal(text),
            BrokerError::Gone | BrokerError::Conflict(_) | BrokerError::Stale => Self::Contended,
        }
    }
}
