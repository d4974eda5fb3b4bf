//! The broker port: what the connector needs from a store of resources and message queues.
//!
//! Two engines stand behind it. The port knows neither gRPC, HTTP nor JSON. Calls are batch-shaped, times are
//! milliseconds since the epoch by the broker's own clock, and every answer that confirms something holds after a crash
//! within the configured durability.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, broadcast};

use crate::model::{EncodedMessage, RetryPolicy, meter::HistogramView};

pub mod embedded;
pub mod redis;
#[cfg(test)]
pub mod rig;

// ---------------------------------------------------------------------------------------------------------------- errors

/// Why the broker did not do what was asked. The text is for the log; the connector chooses what callers see.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BrokerError {
    /// The store can't be reached or is still recovering. Nothing is known to have changed; a repeat is safe.
    #[error("broker unavailable: {0}")]
    Unavailable(String),
    /// There is no room for more messages (disk full, Redis out of memory). Nothing changed.
    #[error("broker full: {0}")]
    Full(String),
    /// The topic, queue or snapshot of this name and incarnation does not exist.
    #[error("no such topic, queue or snapshot")]
    Gone,
    /// The record exists already, or its version is not the expected one.
    #[error("record conflict: current version {0}")]
    Conflict(u64),
    /// The caller's view of the topic, its subscriptions or the queue's subscription is out of date: read the records again
    /// and repeat.
    #[error("stale view of a record")]
    Stale,
    /// Stored data is damaged or of an unknown format.
    #[error("stored data damaged: {0}")]
    Damaged(String),
}

// --------------------------------------------------------------------------------------------------------------- records

/// Kinds of stored resource records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    Topic,
    Subscription,
    Snapshot,
    Schema,
    /// An access policy, named by the full name of its resource.
    Policy,
    /// Anything the server keeps for itself, such as signing keys.
    System,
}

/// A stored resource record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Full resource name.
    pub name: String,
    /// Grows by at least one with every write of this name, also across delete and re-creation.
    pub version: u64,
    pub body: Bytes,
}

/// The version a record must have for a change to be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// There is no such record.
    Absent,
    /// There is one, of this version.
    Version(u64),
}

/// One atomic change of one record together with its effect on the queues.
#[derive(Debug, Clone)]
pub struct Change {
    pub kind: Kind,
    /// Full resource name.
    pub name: String,
    pub expect: Expect,
    /// The new body; `None` deletes the record.
    pub body: Option<Bytes>,
    pub effect: Effect,
}

/// What a record's change means for the queues.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Effect {
    None,
    /// Creates the topic's message log or changes its retention.
    OpenTopic(TopicConfig),
    /// Forgets the topic's log; queues keep what they have.
    CloseTopic(TopicRef),
    /// Creates the queue, attached to its topic from now on, or changes its configuration.
    OpenQueue(QueueConfig),
    /// Drops the queue's backlog and stops further appends; the queue stays known.
    DetachQueue(QueueRef),
    /// Forgets the queue.
    CloseQueue(QueueRef),
    /// Copies the queue's acknowledgement state under the snapshot's incarnation.
    TakeSnapshot {
        snapshot: u64,
        queue: QueueRef,
    },
    /// Forgets the copy.
    DropSnapshot {
        snapshot: u64,
        topic: TopicRef,
    },
}

/// A topic as the broker knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TopicRef {
    /// `project/id`, the part of the channel name between the braces.
    pub channel: Arc<str>,
    pub incarnation: u64,
}

/// A queue as the broker knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QueueRef {
    /// `project/id`, the part of the channel name between the braces.
    pub channel: Arc<str>,
    pub incarnation: u64,
}

/// Settings of a topic's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicConfig {
    pub topic: TopicRef,
    /// How long messages stay for seeking whatever the queues do; `None` keeps none.
    pub retention_ms: Option<u64>,
}

/// Settings of a queue that the engine itself acts on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueConfig {
    pub queue: QueueRef,
    pub topic: TopicRef,
    pub ordered: bool,
    pub exactly_once: bool,
    pub retry: Option<RetryPolicy>,
    /// Delivery attempts before a message becomes a dead letter; `None` without a dead-letter policy.
    pub max_delivery_attempts: Option<u32>,
    pub retention_ms: u64,
    pub retain_acked: bool,
}

/// Something happened that other parts want to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A record was written or deleted, perhaps by another node.
    RecordChanged { kind: Kind, name: String },
    /// Messages of this queue wait to be forwarded to the dead-letter topic.
    DeadLetters(QueueRef),
    /// Anything may have changed: drop what is remembered and read again.
    Reset,
}

// ------------------------------------------------------------------------------------------------------------ publishing

/// Messages for one topic and the queues that take them.
#[derive(Debug, Clone)]
pub struct Append {
    pub topic: TopicRef,
    pub messages: Vec<EncodedMessage>,
    /// The queues attached to the topic as the caller knows them.
    pub targets: Vec<Target>,
    /// Version of the [`Route`] the caller used; the engine answers [`BrokerError::Stale`] when it is out of date.
    pub route_version: u64,
}

/// One queue of an append.
#[derive(Debug, Clone)]
pub struct Target {
    pub queue: QueueRef,
    /// Indexes of the messages that the queue's filter keeps out, ascending. They never become backlog.
    pub filtered: Vec<u32>,
}

/// The queues attached to a topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Route {
    /// Grows whenever a queue is attached or taken away, and, where [nodes share](Broker::is_shared) the store, once another
    /// record of the topic was written and before that change is answered.
    pub version: u64,
    /// The subscriptions, sorted by name.
    pub subscriptions: Vec<Attached>,
}

/// A subscription whose queue is attached to a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// Full name.
    pub name: String,
    /// Incarnation of its queue.
    pub incarnation: u64,
}

/// What an append assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appended {
    /// One id a message, in order; the wire form is the decimal number.
    pub message_ids: Vec<u64>,
    /// The publish time all of them share.
    pub publish_time_ms: u64,
}

// --------------------------------------------------------------------------------------------------------------- leasing

/// One consumer: a StreamingPull stream, a Pull call or a push worker. The engine counts what the consumer holds and
/// signals when there may be more to lease.
#[derive(Debug)]
pub struct Session {
    /// Unique on this node and, mixed with the node id, in the cluster.
    pub id: u64,
    outstanding_messages: AtomicI64,
    outstanding_bytes: AtomicI64,
    wake: Notify,
}

impl Session {
    pub fn new(id: u64) -> Arc<Self> {
        Arc::new(Self { id, outstanding_messages: AtomicI64::new(0), outstanding_bytes: AtomicI64::new(0), wake: Notify::new() })
    }

    /// Messages leased to this session and not yet settled, returned or expired.
    pub fn outstanding_messages(&self) -> u64 {
        self.outstanding_messages.load(Ordering::Acquire).max(0) as u64
    }

    /// Encoded bytes of those messages.
    pub fn outstanding_bytes(&self) -> u64 {
        self.outstanding_bytes.load(Ordering::Acquire).max(0) as u64
    }

    /// For engines: counts leased messages in.
    pub fn charge(&self, messages: usize, bytes: u64) {
        self.outstanding_messages.fetch_add(messages as i64, Ordering::AcqRel);
        self.outstanding_bytes.fetch_add(bytes as i64, Ordering::AcqRel);
    }

    /// For engines: counts settled, returned or expired messages out and wakes the session, whose budget has grown.
    pub fn credit(&self, messages: usize, bytes: u64) {
        self.outstanding_messages.fetch_sub(messages as i64, Ordering::AcqRel);
        self.outstanding_bytes.fetch_sub(bytes as i64, Ordering::AcqRel);
        self.wake.notify_one();
    }

    /// For engines: there may be something to lease.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// Resolves after a [`wake`](Self::wake) or [`credit`](Self::credit) that has not been waited for yet.
    pub async fn woken(&self) {
        self.wake.notified().await;
    }
}

/// A request for messages.
#[derive(Debug, Clone)]
pub struct LeaseRequest {
    pub queue: QueueRef,
    pub session: Arc<Session>,
    /// At most this many messages, at least 1.
    pub max_messages: usize,
    /// Stop once this many encoded bytes are reached; the first message is given whatever its size.
    pub max_bytes: u64,
    /// Length of the lease, milliseconds.
    pub deadline_ms: u64,
    /// Leased messages the queue may have at any time, over all sessions and nodes.
    pub max_inflight: u64,
    /// Version of the subscription's record that the caller acts on; 0 for any. Where [nodes share](Broker::is_shared) the
    /// store, the engine answers [`BrokerError::Stale`] when it knows of a later one.
    pub record_version: u64,
}

/// Identifies one delivery of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseToken {
    /// The engine's transaction: the chunk or batch the message was leased from.
    pub transaction: u64,
    /// The message's sequence in its queue.
    pub sequence: u64,
    /// The lease; a later lease of the same message has a larger one.
    pub lease: u64,
    /// Which delivery of the message this is, from 1.
    pub attempt: u32,
}

/// A leased message.
#[derive(Debug, Clone)]
pub struct Leased {
    pub token: LeaseToken,
    /// When the lease ends.
    pub deadline_at_ms: u64,
    /// What the client is told: 1 plus the deliveries that failed under a dead-letter policy; 0 without such a policy.
    pub delivery_attempt: u32,
    /// The stored encoding of the message, id and publish time included.
    pub message: Bytes,
}

/// What became of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done, or had been done before.
    Done,
    /// The lease is over (expired, returned, replaced by a newer one, purged) and the queue is exactly-once, or the
    /// message can't be found. Nothing changed.
    Invalid,
    /// The broker could not tell; the client should ask again.
    Retry,
}

/// A change of one lease's deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadlineChange {
    pub token: LeaseToken,
    /// The lease ends this long from now; 0 gives the message back as a failed delivery (nack).
    pub deadline_ms: u64,
    /// A nack skips the retry policy's backoff.
    pub bypass_backoff: bool,
    /// The lease ends at the latest this long after it was given; 0 sets no such bound.
    pub max_life_ms: u64,
}

/// Where a seek goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeekTarget {
    /// Messages published before this time count as acknowledged, the others as not. Milliseconds, rounded up.
    Time(u64),
    /// The state copied under this snapshot incarnation.
    Snapshot(u64),
}

/// A message that reached its last delivery attempt.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    pub token: LeaseToken,
    /// Deliveries that were tried.
    pub attempts: u32,
    pub message: Bytes,
}

/// A request to look at messages without touching them.
#[derive(Debug, Clone)]
pub struct PeekRequest {
    pub queue: QueueRef,
    /// Only messages from this place on; 0 begins with the oldest.
    pub from: u64,
    /// At most this many, at least 1.
    pub max_messages: usize,
    /// Stop once this many encoded bytes are reached; the first message is given whatever its size.
    pub max_bytes: u64,
}

/// Where an unacknowledged message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Anybody may get it.
    Waiting,
    /// It waits for its turn in its ordering key.
    InLine,
    /// Its backoff has not ended.
    Delayed { until_ms: u64 },
    /// A consumer has it, or had it until then and nobody was told yet.
    Leased { deadline_at_ms: u64 },
    /// It waits to be forwarded to the dead-letter topic.
    Dead,
}

/// A message as it lies in its queue.
#[derive(Debug, Clone)]
pub struct Peeked {
    /// Its place.
    pub sequence: u64,
    pub standing: Standing,
    /// Deliveries that failed.
    pub failures: u32,
    /// The stored encoding of the message, id and publish time included.
    pub message: Bytes,
}

/// Messages that were looked at, in the order of their places.
#[derive(Debug, Clone, Default)]
pub struct Peek {
    pub messages: Vec<Peeked>,
    /// Where to go on; none when there is nothing more.
    pub next: Option<u64>,
}

/// A queue's state for metrics and operators.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Messages neither acknowledged nor dropped, leased ones included.
    pub undelivered_messages: u64,
    /// Their encoded bytes.
    pub backlog_bytes: u64,
    /// Publish time of the oldest of them.
    pub oldest_unacked_ms: Option<u64>,
    /// Messages under lease.
    pub outstanding_messages: u64,
    /// Messages waiting for their backoff to end.
    pub delayed_messages: u64,
    /// Messages waiting to be forwarded to the dead-letter topic.
    pub dead_letters: u64,
    /// Acknowledged messages kept for seeking.
    pub retained_acked_messages: u64,
    /// Leases that ran out since this engine was opened; none where the engine does not count them. Of several nodes on one
    /// store, each counts those it noticed first.
    pub expired_leases: Option<u64>,
    /// When the queue was last used: a session was attached, something was leased, settled, sought or changed, or
    /// [`Broker::touch`] was called. Now, while a session is attached.
    pub last_active_ms: u64,
}

/// Something an engine tells of itself, for operators.
#[derive(Debug, Clone, PartialEq)]
pub struct Measure {
    /// The metric's name without the prefix `landline_broker_`. A counter's ends in `_total`, others in their unit.
    pub name: &'static str,
    /// One sentence without its full stop.
    pub about: &'static str,
    pub value: MeasureValue,
}

/// A measure's kind and value.
#[derive(Debug, Clone, PartialEq)]
pub enum MeasureValue {
    /// Only grows, from 0 at the start of the process.
    Counter(u64),
    Gauge(f64),
    Histogram(HistogramView),
}

/// A store of resources and queues. Every method may answer [`BrokerError::Unavailable`].
///
/// All futures may be dropped at any point: what was asked for then happens or not, and a lease that nobody received is
/// given back uncounted.
#[async_trait]
pub trait Broker: Send + Sync + 'static {
    /// Reads one record.
    async fn get(&self, kind: Kind, name: &str) -> Result<Option<Record>, BrokerError>;

    /// Reads up to `limit` records whose names start with `prefix` and sort after `after`, in byte order of their names.
    async fn list(&self, kind: Kind, prefix: &str, after: &str, limit: usize) -> Result<Vec<Record>, BrokerError>;

    /// Carries out one change and answers the record's new version.
    ///
    /// # Errors
    /// [`BrokerError::Conflict`] when the expectation does not hold; [`BrokerError::Gone`] when the effect names something
    /// that does not exist.
    async fn change(&self, change: Change) -> Result<u64, BrokerError>;

    /// Follows what happens. A receiver that falls behind must treat that as [`Event::Reset`].
    fn events(&self) -> broadcast::Receiver<Event>;

    /// The broker's clock.
    fn now_ms(&self) -> u64;

    /// Answers once the store has proved that it works.
    async fn ready(&self) -> Result<(), BrokerError>;

    /// Reads which subscriptions are attached to a topic.
    async fn route(&self, topic: &TopicRef) -> Result<Route, BrokerError>;

    /// Stores messages durably, all or none, and makes them available to the targets.
    async fn append(&self, append: Append) -> Result<Appended, BrokerError>;

    /// Tells the engine that a session waits on a queue. It is woken when a lease may give it something: fairly, in turn,
    /// and only as many sessions as there is work for.
    fn attach(&self, queue: &QueueRef, session: &Arc<Session>);

    /// The session is over: its outstanding messages keep their leases but count for nobody.
    fn detach(&self, queue: &QueueRef, session: &Arc<Session>);

    /// Counts as use of the queue, for the expiration of idle subscriptions.
    async fn touch(&self, queue: &QueueRef) -> Result<(), BrokerError>;

    /// The attached session will not lease for a while: until it does, it is not woken for messages, and a wake it was given
    /// goes to another. Engines that wake every session need not do anything.
    fn rest(&self, _queue: &QueueRef, _session: &Arc<Session>) {}

    /// Leases available messages; an empty answer means that there are none for this session, which is woken later if it
    /// is attached.
    async fn lease(&self, request: LeaseRequest) -> Result<Vec<Leased>, BrokerError>;

    /// Removes messages. One outcome a token, in order. On a queue that is not exactly-once a late token still removes its
    /// message, unless a seek came between.
    async fn acknowledge(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<Vec<Outcome>, BrokerError>;

    /// Moves deadlines. One outcome a change, in order. Extending or shortening a lease that is over does nothing.
    async fn modify_deadlines(&self, queue: &QueueRef, changes: &[DeadlineChange]) -> Result<Vec<Outcome>, BrokerError>;

    /// Gives back messages that never reached a consumer: available at once, and the delivery does not count.
    async fn release(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<(), BrokerError>;

    /// Moves a queue to another point of its retained messages. Every lease ends, and late tokens no longer settle anything.
    ///
    /// # Errors
    /// [`BrokerError::Gone`] for an unknown snapshot.
    async fn seek(&self, queue: &QueueRef, target: SeekTarget) -> Result<(), BrokerError>;

    /// Takes up to `max` dead letters; each comes again after `hold` unless it is settled.
    async fn take_dead_letters(&self, queue: &QueueRef, max: usize, hold: Duration) -> Result<Vec<DeadLetter>, BrokerError>;

    /// Settles dead letters: forwarded ones are removed, the others go back into the queue for another delivery.
    async fn settle_dead_letters(&self, queue: &QueueRef, tokens: &[LeaseToken], forwarded: bool) -> Result<(), BrokerError>;

    /// The queue's state now.
    async fn stats(&self, queue: &QueueRef) -> Result<QueueStats, BrokerError>;

    /// Looks at the unacknowledged messages of a queue, leased ones included, as they lie there now. No lease, count or time of
    /// the queue changes by it. Between two calls messages come, go and, by a seek, take other places.
    async fn peek(&self, request: PeekRequest) -> Result<Peek, BrokerError>;

    /// Whether other nodes may work on the same store.
    fn is_shared(&self) -> bool {
        false
    }

    /// The engine's own state on this node. Takes no time.
    fn measures(&self) -> Vec<Measure> {
        Vec::new()
    }

    /// Writes what is pending and stops background work. Calls after it answer [`BrokerError::Unavailable`].
    async fn close(&self);
}

/// Numbers sessions. What is stored of leases names the sessions that held them, also those of processes before this one: the
/// numbers start at a random place, so that none of those is taken for one of this process.
pub fn next_session_id() -> u64 {
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(rand::random_range(1..1 << 62)));
    NEXT.fetch_add(1, Ordering::Relaxed)
}
