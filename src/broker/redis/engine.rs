//! What every part of the engine shares: calls of queue functions, the clock, timers and events.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Weak,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use redis::{Cmd, Value};
use tokio::sync::{Notify, broadcast};

use super::{
    connection::{Failure, Mark, Request, Shards},
    durability::Durability,
    library::function,
    publish::Publisher,
    queue::QueueView,
};
use crate::broker::{BrokerError, Event, QueueRef, QueueStats};

/// A due time that never comes: the largest number the library can tell.
pub const NEVER: u64 = (1 << 53) - 1;
/// How long a call whose answer was lost is tried again before it fails: a restart or a failover of a local server is
/// shorter, and callers are told soon.
const RETRY_FOR: Duration = Duration::from_secs(1);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Events a slow follower may be behind before it must read everything again.
const EVENTS: usize = 4096;
/// Queues remembered before those not in use are forgotten.
const MAX_IDLE_QUEUES: usize = 100_000;

/// When each queue has something due.
#[derive(Default)]
pub struct Timers {
    by_time: BTreeSet<(u64, Arc<str>)>,
    by_queue: HashMap<Arc<str>, u64>,
}

impl Timers {
    /// Notes a time unless an earlier one is noted. Answers whether it is the first of all.
    pub fn arm(&mut self, queue: &Arc<str>, at_ms: u64) -> bool {
        if at_ms >= NEVER || self.by_queue.get(queue).is_some_and(|noted| *noted <= at_ms) {
            return false;
        }
        if let Some(noted) = self.by_queue.insert(queue.clone(), at_ms) {
            self.by_time.remove(&(noted, queue.clone()));
        }
        self.by_time.insert((at_ms, queue.clone()));
        self.by_time.first().is_some_and(|(_, first)| first == queue)
    }

    pub fn next(&self) -> Option<u64> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes the queues that are due.
    pub fn take_due(&mut self, now_ms: u64) -> Vec<Arc<str>> {
        let mut due = Vec::new();
        while let Some((at, queue)) = self.by_time.first().cloned().filter(|(at, _)| *at <= now_ms) {
            self.by_time.remove(&(at, queue.clone()));
            self.by_queue.remove(&queue);
            due.push(queue);
        }
        due
    }
}

/// The parts of the engine share this.
pub struct Engine {
    pub shards: Arc<Shards>,
    pub durability: Durability,
    /// This process among those of the service; random.
    pub node: [u8; 4],
    /// A test's own time in place of the servers'.
    pub set_clock: Option<Arc<AtomicU64>>,
    pub events: broadcast::Sender<Event>,
    pub timers: Mutex<Timers>,
    pub timer_changed: Notify,
    pub queues: Mutex<HashMap<Arc<str>, Arc<QueueView>>>,
    pub publishers: Mutex<HashMap<Arc<str>, Arc<Publisher>>>,
    /// Servers' clock less this machine's, milliseconds.
    offset_ms: AtomicI64,
    latest_ms: AtomicU64,
    next_payload: AtomicU64,
    next_publish: AtomicU64,
    /// How often the notice channel was opened.
    pub opened: AtomicU64,
    /// The latest ping that came back over it.
    pub heard: AtomicU64,
    /// The notice channel has to be opened again.
    pub deaf: Notify,
    this: Weak<Self>,
}

fn local_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}

/// The bytes of an answer.
///
/// # Errors
/// [`BrokerError::Damaged`] when it is something else.
pub fn bytes(value: &Value) -> Result<&[u8], BrokerError> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        other => Err(BrokerError::Damaged(format!("the function library answered {other:?}"))),
    }
}

/// The single answer of one call, an array.
///
/// # Errors
/// As [`bytes`].
pub fn array(mut values: Vec<Value>) -> Result<Vec<Value>, BrokerError> {
    match values.pop() {
        Some(Value::Array(list)) => Ok(list),
        other => Err(BrokerError::Damaged(format!("the function library answered {other:?}"))),
    }
}

impl Engine {
    pub fn new(shards: Arc<Shards>, durability: Durability, set_clock: Option<Arc<AtomicU64>>) -> Arc<Self> {
        // The first half of a payload id is this process's own, so that ids of two nodes differ.
        let prefix = u64::from(rand::random::<u32>()) << 32;
        Arc::new_cyclic(|this| Self {
            shards,
            durability,
            node: rand::random::<u32>().max(1).to_le_bytes(),
            set_clock,
            events: broadcast::channel(EVENTS).0,
            timers: Mutex::default(),
            timer_changed: Notify::new(),
            queues: Mutex::default(),
            publishers: Mutex::default(),
            offset_ms: AtomicI64::new(0),
            latest_ms: AtomicU64::new(0),
            next_payload: AtomicU64::new(prefix),
            next_publish: AtomicU64::new(local_ms() as u64 * 1000),
            opened: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            deaf: Notify::new(),
            this: this.clone(),
        })
    }

    pub fn node_hex(&self) -> String {
        self.node.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The session's name in the cluster.
    pub fn session_name(&self, id: u64) -> [u8; 8] {
        let mut name = [0; 8];
        name[..4].copy_from_slice(&self.node);
        name[4..].copy_from_slice(&(id as u32).to_le_bytes());
        name
    }

    pub fn payload_id(&self) -> u64 {
        self.next_payload.fetch_add(1, Ordering::Relaxed)
    }

    /// Grows over the life of the node, so that no two of its publishes are taken for one.
    pub fn publish_number(&self) -> u64 {
        self.next_publish.fetch_add(1, Ordering::Relaxed)
    }

    /// The first argument of most functions.
    pub fn header(&self, seen: u64) -> Vec<u8> {
        let mut header = Vec::with_capacity(20);
        let set_ms = self.set_clock.as_ref().map_or(0, |clock| clock.load(Ordering::Acquire));
        header.extend_from_slice(&set_ms.to_le_bytes());
        header.extend_from_slice(&self.node);
        header.extend_from_slice(&seen.to_le_bytes());
        header
    }

    // ---- clock

    pub fn now_ms(&self) -> u64 {
        if let Some(clock) = &self.set_clock {
            return clock.load(Ordering::Acquire);
        }
        let now = (local_ms() + self.offset_ms.load(Ordering::Acquire)).max(0) as u64;
        self.latest_ms.fetch_max(now, Ordering::AcqRel).max(now)
    }

    /// A server said what time it is.
    pub fn observe(&self, server_ms: u64) {
        self.offset_ms.store(server_ms as i64 - local_ms(), Ordering::Release);
        self.latest_ms.fetch_max(server_ms, Ordering::AcqRel);
    }

    /// Asks a server for the time, which also proves that it works.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`].
    pub async fn learn_time(&self) -> Result<(), BrokerError> {
        let slot = super::slots::slot_of(super::records::CATALOG);
        let values = self.shards.call(slot, &Request::One(redis::cmd("TIME"))).await?;
        let number = |value: &Value| std::str::from_utf8(bytes(value).ok()?).ok()?.parse::<u64>().ok();
        match array(values)?.as_slice() {
            [seconds, micros] => {
                let (Some(s), Some(us)) = (number(seconds), number(micros)) else {
                    return Err(BrokerError::Damaged("TIME was answered in an unknown form".into()));
                };
                self.observe(s * 1000 + us / 1000);
                Ok(())
            }
            other => Err(BrokerError::Damaged(format!("TIME was answered with {other:?}"))),
        }
    }

    pub fn arm(&self, queue: &Arc<str>, at_ms: u64) {
        if self.timers.lock().arm(queue, at_ms) {
            self.timer_changed.notify_one();
        }
    }

    // ---- queues

    pub fn queue(&self, queue: &QueueRef) -> Arc<QueueView> {
        let view = QueueView::new(queue.clone());
        let mut queues = self.queues.lock();
        if queues.len() > MAX_IDLE_QUEUES {
            queues.retain(|_, q| Arc::strong_count(q) > 1 || q.is_in_use());
        }
        queues.entry(view.key.clone()).or_insert_with(|| Arc::new(view)).clone()
    }

    pub fn known_queue(&self, key: &str) -> Option<Arc<QueueView>> {
        self.queues.lock().get(key).cloned()
    }

    /// Reads what every queue function answers first, and passes on what it says.
    ///
    /// # Errors
    /// [`BrokerError::Damaged`] when it can't be read.
    pub fn take_head(&self, queue: &QueueView, answer: &[Value]) -> Result<(), BrokerError> {
        let [head, ended, owners, ..] = answer else {
            return Err(BrokerError::Damaged("the function library answered too little".into()));
        };
        self.take_short_head(queue, bytes(head)?)?;
        queue.ended(bytes(ended)?)?;
        for session in bytes(owners)?.chunks_exact(8) {
            queue.wake_session(u32::from_le_bytes([session[4], session[5], session[6], session[7]]));
        }
        Ok(())
    }

    /// The same for an answer without notes for sessions.
    ///
    /// # Errors
    /// As [`take_head`](Self::take_head).
    pub fn take_short_head(&self, queue: &QueueView, head: &[u8]) -> Result<(), BrokerError> {
        let mut from = super::codec::Reader(head);
        let (now, due, operation, wakes, dead) = (from.u64()?, from.u64()?, from.u64()?, from.u32()?, from.u8()?);
        self.observe(now);
        queue.saw(operation);
        queue.count_expired(from.u32()?);
        self.arm(&queue.key, due);
        if wakes > 0
            && !queue.wake(wakes as usize)
            && let (Some(this), Some(queue)) = (self.this.upgrade(), self.known_queue(&queue.key))
        {
            // The sessions that waited here have gone: somebody else should have the turn.
            this.pass_on(queue);
        }
        if dead > 0 {
            let _ = self.events.send(Event::DeadLetters(queue.queue.clone()));
        }
        Ok(())
    }

    /// Calls a queue function that may be repeated. `build` adds the arguments after the header and is told whether the call
    /// may have been carried out before.
    ///
    /// # Errors
    /// What the port says.
    pub async fn on_queue(
        &self,
        queue: &QueueView,
        name: &str,
        build: impl Fn(&mut Cmd, bool),
    ) -> Result<Vec<Value>, BrokerError> {
        let mut repeated = false;
        let started = tokio::time::Instant::now();
        loop {
            let mut call = function(name, &[&queue.key]);
            call.arg(self.header(queue.seen()));
            build(&mut call, repeated);
            let failure = match self.shards.call(queue.slot, &Request::One(call)).await {
                Ok(values) => {
                    let answer = array(values)?;
                    self.take_head(queue, &answer)?;
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            match &failure {
                Failure::Lost(_) => repeated = true,
                Failure::Unsent(_) if repeated => {}
                _ => return Err(failure.into()),
            }
            if started.elapsed() >= RETRY_FOR || self.shards.stopped().is_cancelled() {
                return Err(failure.into());
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// A queue's state now.
    ///
    /// # Errors
    /// What the port says.
    pub async fn stats(&self, queue: &QueueRef) -> Result<QueueStats, BrokerError> {
        let queue = self.queue(queue);
        let answer = self.on_queue(&queue, "landline_stats", |_, _| {}).await?;
        let Some(Value::Array(numbers)) = answer.get(3) else {
            return Err(BrokerError::Damaged("stats were answered in an unknown form".into()));
        };
        let number = |at: usize| if let Some(Value::Int(n)) = numbers.get(at) { (*n).max(0) as u64 } else { 0 };
        Ok(QueueStats {
            undelivered_messages: number(0),
            backlog_bytes: number(1),
            oldest_unacked_ms: Some(number(2)).filter(|ms| *ms > 0),
            outstanding_messages: number(3),
            delayed_messages: number(4),
            dead_letters: number(5),
            retained_acked_messages: number(6),
            expired_leases: Some(queue.expired()),
            last_active_ms: if queue.has_sessions() { self.now_ms() } else { number(7).max(queue.used_ms()) },
        })
    }

    /// To be taken before something is written that must be durable.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`] when there is no connection.
    pub async fn mark(&self, slot: u16) -> Result<Option<Mark>, BrokerError> {
        let Durability::Replicas(_) = self.durability else { return Ok(None) };
        self.shards.mark(slot).await.map(Some)
    }

    /// Answers once what was written since the mark is as durable as was asked for.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`] when too few replicas have it in time.
    pub async fn barrier(&self, slot: u16, key: &str, mark: Option<Mark>) -> Result<(), BrokerError> {
        match (self.durability, mark) {
            (Durability::Replicas(count), Some(mark)) => self.shards.wait_for_replicas(slot, key, &mark, count).await,
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_only_moves_to_an_earlier_time() {
        let mut timers = Timers::default();
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        assert!(timers.arm(&a, 50));
        assert!(!timers.arm(&a, 60));
        assert!(timers.arm(&b, 40));
        assert!(timers.arm(&a, 30));
        assert_eq!(timers.take_due(45), [a, b]);
        assert_eq!(timers.next(), None);
    }
}
