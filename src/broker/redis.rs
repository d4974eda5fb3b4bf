//! The engine on Redis or Valkey 7 and newer: standalone, behind Sentinel, or a Cluster.
//!
//! What is stored where. All keys of a topic or a queue share the hash tag `{project/id}`, hence one slot, and carry the
//! incarnation, so that nothing of an earlier one of the same name ever shows up.
//!
//! | key | type | holds |
//! |---|---|---|
//! | `gcp.sub.{p/id}:inc` = Q | hash | format version `v`, settings `c`, counters and cursor `s` |
//! | `Q:cx` | stream | the index: one entry a chunk (one append), its id the chunk's first sequence |
//! | `Q:p:id` | string | a chunk's messages back to back after a table of offsets; written natively, never by a function |
//! | `Q:ch` | hash | chunks the cursor has passed and that are not done: counts and leases, each a set of messages |
//! | `Q:ls` | zset | those with leases, by the first deadline |
//! | `Q:rt` | hash | messages that failed or were given back: counts, where they wait |
//! | `Q:rd`, `Q:dl`, `Q:dd` | list, zset, zset | ready for redelivery; waiting for their backoff; dead letters |
//! | `Q:ky`, `Q:kl:key`, `Q:kf`, `Q:kw:session`, `Q:kb` | | ordering keys: owner, line, free and owned keys, blocked keys |
//! | `Q:gm`, `Q:mk` | hash | messages of chunks in the index that no seek brings back; that count as acknowledged since the last seek |
//! | `Q:sd`, `Q:so` | hash, zset | exactly-once: which lease acknowledged a redelivered message |
//! | `Q:wt` | zset | nodes with sessions that wait |
//! | `gcp.topic.{p/id}:inc` = T | hash | last id and publish time, route version; `T:rt` attached queues; `T:cx`, `T:p:id` its log; `T:sns`, `T:sn:id` snapshots |
//! | `gcp.catalog.{landline}` | hash | record versions; `:b:kind` bodies, `:n:kind` names, `:i` changes under way, `:q` queues, `:nodes` |
//!
//! The common path costs one entry a chunk: append adds one to the index, lease puts one range into `ch`, acknowledging the
//! range removes both. Only what fails, is given back or settled in parts costs more. Everything that is not in `ch` and lies
//! before the cursor is acknowledged.
//!
//! A lease is named by a number that only grows. A token settles a message while its number is in `ch` with the message's bit
//! set: exactly-once stands on that check, made in one function call. Other nodes learn what concerns them on one channel each
//! (`gcp.node:…`: ended leases, turns to lease, due times); a lost notice is made up for at the lease's deadline, after a
//! reconnection, when a node is found dead, and in a slow round over all queues (see `watch`).

mod address;
mod background;
mod chunk;
mod codec;
mod connection;
mod durability;
mod engine;
mod inspect;
mod lease;
mod library;
mod peek;
mod publish;
mod queue;
mod records;
mod replicas;
mod settle;
mod slots;
mod snapshot;
#[cfg(test)]
pub mod tests;
mod watch;

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::{broadcast, mpsc};

use self::{address::Address, connection::Shards, engine::Engine};
use super::{
    Append, Appended, Broker, BrokerError, Change, DeadLetter, DeadlineChange, Event, Kind, LeaseRequest, LeaseToken, Leased,
    Measure, Outcome, Peek, PeekRequest, QueueRef, QueueStats, Record, Route, SeekTarget, Session, TopicRef,
};

pub use durability::Durability;
pub use inspect::inspect;

/// Takes a broker URL apart without using it.
///
/// # Errors
/// What is wrong with it, without its password.
pub fn check_url(url: &str) -> Result<(), String> {
    Address::parse(url).map(drop)
}

/// Settings of the engine.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// What a confirmed write survives.
    pub durability: Durability,
    /// Milliseconds since the epoch that stand in for the servers' clock, so that tests can let days pass at once.
    pub set_clock: Option<Arc<AtomicU64>>,
}

/// The engine.
pub struct Redis {
    engine: Arc<Engine>,
}

impl Redis {
    /// Connects to the servers a URL names and gets them ready.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`] when the URL is wrong, nothing answers, or the servers can't give the durability asked
    /// for; [`BrokerError::Damaged`] when they hold data of a newer version.
    pub async fn open(url: &str, options: Options) -> Result<Arc<dyn Broker>, BrokerError> {
        Ok(Self::start(url, options).await?)
    }

    async fn start(url: &str, options: Options) -> Result<Arc<Self>, BrokerError> {
        let (told, happened) = mpsc::unbounded_channel();
        let shards = Shards::open(Address::parse(url).map_err(BrokerError::Unavailable)?, options.durability, told).await?;
        let engine = Engine::new(shards, options.durability, options.set_clock);
        engine.learn_time().await?;
        engine.check_format().await?;
        background::start(&engine, happened);
        Ok(Arc::new(Self { engine }))
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.engine.shards.close();
    }
}

#[async_trait]
impl Broker for Redis {
    async fn get(&self, kind: Kind, name: &str) -> Result<Option<Record>, BrokerError> {
        self.engine.get(kind, name).await
    }

    async fn list(&self, kind: Kind, prefix: &str, after: &str, limit: usize) -> Result<Vec<Record>, BrokerError> {
        self.engine.list(kind, prefix, after, limit).await
    }

    async fn change(&self, change: Change) -> Result<u64, BrokerError> {
        // In a task of its own: a caller who goes away leaves no change half done.
        let engine = self.engine.clone();
        let changed = tokio::spawn(async move { engine.change(change).await }).await;
        changed.map_err(|_| BrokerError::Unavailable("the change was broken off".into()))?
    }

    fn events(&self) -> broadcast::Receiver<Event> {
        self.engine.events.subscribe()
    }

    fn now_ms(&self) -> u64 {
        self.engine.now_ms()
    }

    async fn ready(&self) -> Result<(), BrokerError> {
        self.engine.learn_time().await
    }

    async fn route(&self, topic: &TopicRef) -> Result<Route, BrokerError> {
        self.engine.route(topic).await
    }

    async fn append(&self, append: Append) -> Result<Appended, BrokerError> {
        self.engine.append(append).await
    }

    fn attach(&self, queue: &QueueRef, session: &Arc<Session>) {
        let queue = self.engine.queue(queue);
        queue.used(self.engine.now_ms());
        queue.attach(session);
        session.wake();
    }

    fn detach(&self, queue: &QueueRef, session: &Arc<Session>) {
        let queue = self.engine.queue(queue);
        queue.used(self.engine.now_ms());
        if queue.detach(session) && !queue.wake(1) {
            self.engine.pass_on(queue);
        }
    }

    fn rest(&self, queue: &QueueRef, session: &Arc<Session>) {
        let queue = self.engine.queue(queue);
        if queue.rest(session) && !queue.wake(1) {
            self.engine.pass_on(queue);
        }
    }

    async fn touch(&self, queue: &QueueRef) -> Result<(), BrokerError> {
        self.engine.touch(queue).await
    }

    async fn lease(&self, request: LeaseRequest) -> Result<Vec<Leased>, BrokerError> {
        self.engine.lease(request).await
    }

    async fn acknowledge(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<Vec<Outcome>, BrokerError> {
        self.engine.acknowledge(queue, tokens).await
    }

    async fn modify_deadlines(&self, queue: &QueueRef, changes: &[DeadlineChange]) -> Result<Vec<Outcome>, BrokerError> {
        self.engine.modify_deadlines(queue, changes).await
    }

    async fn release(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<(), BrokerError> {
        self.engine.release(queue, tokens).await
    }

    async fn seek(&self, queue: &QueueRef, target: SeekTarget) -> Result<(), BrokerError> {
        self.engine.seek(queue, target).await
    }

    async fn take_dead_letters(&self, queue: &QueueRef, max: usize, hold: Duration) -> Result<Vec<DeadLetter>, BrokerError> {
        self.engine.take_dead_letters(queue, max, hold.as_millis() as u64).await
    }

    async fn settle_dead_letters(&self, queue: &QueueRef, tokens: &[LeaseToken], forwarded: bool) -> Result<(), BrokerError> {
        self.engine.settle_dead_letters(queue, tokens, forwarded).await
    }

    async fn stats(&self, queue: &QueueRef) -> Result<QueueStats, BrokerError> {
        self.engine.stats(queue).await
    }

    async fn peek(&self, request: PeekRequest) -> Result<Peek, BrokerError> {
        self.engine.peek(request).await
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn measures(&self) -> Vec<Measure> {
        self.engine.shards.measures()
    }

    async fn close(&self) {
        self.engine.shards.close();
    }
}
