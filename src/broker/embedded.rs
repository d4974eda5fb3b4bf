//! The embedded broker: a state machine in memory, made durable by a log on local disk.
//!
//! Every call takes the lock, lets the queue decide, appends the outcome to the log and leaves the lock; then it waits until
//! the log has written it (leases, extensions) or synced it (publishes, acknowledgements, resources). The log's committer
//! thread gathers whatever arrives meanwhile into one write, so waiting is shared. Payloads stay in the log; memory holds an
//! index entry a message and a few bits a queue. The log of appended fjall- or LMDB-like stores was measured at a third to a
//! seventh of the throughput of the plain segmented log used here.

mod bits;
mod checkpoint;
mod clock;
mod gather;
mod leases;
pub mod log;
mod op;
mod queue;
mod state;
mod timer;
mod topic_log;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::broadcast;

pub use self::{clock::Clock, log::Durability};
use self::{
    log::{AppendKind, Location, Log, LogError, LogOptions},
    op::{Op, Ranges},
    queue::{Budget, Effects, Picked, Seen},
    state::State,
    timer::Timer,
};
use super::{
    Append, Appended, Attached, Broker, BrokerError, Change, DeadLetter, DeadlineChange, Effect, Event, Kind, LeaseRequest,
    LeaseToken, Leased, Measure, MeasureValue, Outcome, Peek, PeekRequest, Peeked, QueueRef, QueueStats, Record, Route,
    SeekTarget, Session, TopicRef,
};
use crate::model::EncodedMessage;

/// Events a slow follower may fall behind by before it has to read everything again.
const EVENT_BUFFER: usize = 1024;

/// While the disk is behind, publishers wait rather than fail: this long at most, and this long between two attempts.
const BEHIND_PATIENCE: Duration = Duration::from_secs(10);
const BEHIND_PAUSE: Duration = Duration::from_millis(2);

/// A clock that is behind by less than this was not set back, and is waited for.
const SET_BACK_MS: u64 = 100;

/// Looks at messages that may move or go before they are read.
const PEEK_TRIES: usize = 3;

/// The embedded broker.
pub struct Embedded {
    shared: Arc<Shared>,
    workers: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    log: Arc<Log>,
    clock: Clock,
    events: broadcast::Sender<Event>,
    timer: Timer,
    next_message_id: AtomicU64,
    closed: AtomicBool,
    /// The end was asked for, so that a last checkpoint is worth its time.
    orderly: AtomicBool,
}

impl From<LogError> for BrokerError {
    fn from(error: LogError) -> Self {
        match error {
            LogError::Full(text) => Self::Full(text),
            LogError::Damaged(text) => Self::Damaged(text),
            other => Self::Unavailable(other.to_string()),
        }
    }
}

impl Embedded {
    /// Opens or creates the broker in a directory.
    ///
    /// # Errors
    /// [`BrokerError::Damaged`] when what is stored there is damaged or of a newer format, naming the file;
    /// [`BrokerError::Unavailable`] when the directory can't be used, for example because another process has it.
    pub fn open(directory: &Path, durability: Durability) -> Result<Arc<Self>, BrokerError> {
        Self::start(LogOptions::on_disk(directory, durability), Clock::System)
    }

    /// A broker that keeps everything in memory and forgets it at the end.
    pub fn memory() -> Arc<Self> {
        Self::memory_with_clock(Clock::System)
    }

    /// The same with a clock of the caller's.
    pub fn memory_with_clock(clock: Clock) -> Arc<Self> {
        match Self::start(LogOptions::in_memory(), clock) {
            Ok(broker) => broker,
            Err(error) => unreachable!("a log in memory has nothing to fail on: {error}"),
        }
    }

    /// Opens the broker with every option in hand.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn start(options: LogOptions, clock: Clock) -> Result<Arc<Self>, BrokerError> {
        let directory = options.directory.clone();
        let (mut state, from) = match &directory {
            Some(directory) => checkpoint::read(directory)?,
            None => (State::default(), None),
        };
        let log = Log::open(options, from, |header, bodies| {
            let op: Op = postcard::from_bytes(header).map_err(|e| LogError::Damaged(format!("unreadable record: {e}")))?;
            state.replay(op, bodies);
            Ok(())
        })?;
        state.recovered();
        let now_ms = state.now_ms.max(clock.now_ms());
        // Ids go on from the last one; the first of all starts from the clock, so that a new store never repeats ids of an
        // earlier one. 16 digits, as Google's are.
        let next_message_id = state.next_message_id.max(if state.next_message_id == 0 { now_ms * 1000 } else { 0 });
        let (events, _) = broadcast::channel(EVENT_BUFFER);
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            log,
            clock,
            events,
            timer: Timer::default(),
            next_message_id: AtomicU64::new(next_message_id),
            closed: AtomicBool::new(false),
            orderly: AtomicBool::new(false),
        });
        shared.log.on_durable(Box::new({
            let shared = Arc::downgrade(&shared);
            move |position| {
                if let Some(shared) = shared.upgrade() {
                    let mut state = shared.state.lock();
                    state.durable(position);
                    shared.timer.arm(state.next_due_ms());
                }
            }
        }));
        {
            let mut state = shared.state.lock();
            let now_ms = shared.tick(&mut state);
            state.count_from(now_ms);
        }
        let workers = Mutex::new(vec![timer::spawn(&shared), checkpoint::spawn(&shared, directory)]);
        Ok(Arc::new(Self { shared, workers }))
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in self.workers.lock().drain(..) {
            // A worker that panicked has said so.
            let _ = worker.join();
        }
    }
}

/// What became of an append.
enum Placed {
    /// The log position that makes the messages last.
    At(u64),
    /// Nobody would ever read them.
    Nowhere,
    /// Not placed: others of the topic were published at this time already.
    Before(u64),
}

impl Shared {
    fn stop(&self) {
        self.closed.store(true, Ordering::Release);
        self.timer.stop();
    }

    fn open(&self) -> Result<(), BrokerError> {
        if self.closed.load(Ordering::Acquire) { Err(BrokerError::Unavailable("closed".into())) } else { Ok(()) }
    }

    /// The time by the clock. What waits for a time does not wait longer because the clock was set back: it is set back too.
    fn tick(&self, state: &mut State) -> u64 {
        let (clock_ms, now) = (self.clock.now_ms(), Instant::now());
        let passed =
            state.looked_at.replace(now).filter(|_| self.clock.is_steady()).map_or(Duration::ZERO, |before| now - before);
        let by_ms = (state.now_ms + passed.as_millis() as u64).saturating_sub(clock_ms);
        if by_ms > SET_BACK_MS {
            let op = Op::SetBack { now_ms: clock_ms, by_ms };
            match self.log.admit(AppendKind::Control).map_err(BrokerError::from).and_then(|()| self.record(&op, false)) {
                Ok(_) => {
                    tracing::warn!(by_ms, "the clock was set back");
                    state.set_back(clock_ms, by_ms);
                    self.timer.arm(state.next_due_ms());
                }
                // There is a next time; until then the time stands still.
                Err(error) => tracing::debug!(%error, "the clock was set back, and the log can't take it"),
            }
        }
        state.tick(clock_ms)
    }

    /// Runs one operation on a queue: `decide` changes the queue and answers its result and the records to log. Answers the
    /// result and the log position that makes it last.
    fn on_queue<T>(
        &self,
        queue: &QueueRef,
        decide: impl FnOnce(&mut queue::Queue, &mut topic_log::TopicLog, u64, &mut Effects) -> (T, Vec<(Op, bool)>),
    ) -> Result<(T, u64), BrokerError> {
        self.open()?;
        let mut state = self.state.lock();
        self.log.admit(AppendKind::Control)?;
        let now_ms = self.tick(&mut state);
        let mut fx = Effects::default();
        let (target, log) = state.used(queue.incarnation, now_ms, &mut fx)?;
        let (result, mut ops) = decide(target, log, now_ms, &mut fx);
        if target.is_use_to_log(now_ms) && ops.is_empty() {
            ops.push((Op::Use { now_ms, queue: queue.incarnation }, false));
        }
        let mut position = self.log.position();
        for (op, sync) in ops {
            position = self.record(&op, sync).inspect_err(|error| self.fail(error))?;
        }
        self.finish(&mut state, queue, fx);
        Ok((result, position))
    }

    /// The state went ahead of the log, which had admitted the record before: nothing more may be confirmed on top of it.
    fn fail(&self, error: &BrokerError) {
        tracing::error!(%error, "the log refused a record it had room for; restart to recover from the log");
        self.stop();
    }

    fn finish(&self, state: &mut State, queue: &QueueRef, fx: Effects) {
        if state.settle_effects(queue.incarnation, fx) {
            let _ = self.events.send(Event::DeadLetters(queue.clone()));
        }
        self.timer.arm(state.next_due_ms());
    }

    /// Appends messages, which say that they were published at `publish_time_ms`, and hands them to the topic's queues.
    fn place(
        &self,
        route_version: u64,
        op: &mut Op,
        publish_time_ms: u64,
        body: &[u8],
        lengths: &[u32],
    ) -> Result<Placed, BrokerError> {
        let Op::Append { now_ms, topic, first_sequence, .. } = op else { unreachable!("only appends are placed") };
        let topic = *topic;
        let mut state = self.state.lock();
        let time_ms = self.tick(&mut state);
        let log = state.topics.get(&topic).filter(|t| !t.closed).ok_or(BrokerError::Gone)?;
        if log.route_version != route_version {
            return Err(BrokerError::Stale);
        }
        if !log.is_wanted() {
            return Ok(Placed::Nowhere);
        }
        if publish_time_ms < log.earliest_publish_ms() {
            return Ok(Placed::Before(log.earliest_publish_ms()));
        }
        *first_sequence = log.next_sequence();
        *now_ms = time_ms;
        let placed = self.log.append(AppendKind::Data, true, &encode(op)?, body, lengths)?;
        let Op::Append { keys, filtered, .. } = op else { unreachable!("see above") };
        let end = state.append(topic, keys, filtered, time_ms, &placed.bodies);
        if let Some(log) = state.topics.get_mut(&topic) {
            log.sealed(publish_time_ms);
        }
        state.await_durable(placed.position, topic, end);
        Ok(Placed::At(placed.position))
    }

    /// Appends a record without bodies.
    fn record(&self, op: &Op, sync: bool) -> Result<u64, BrokerError> {
        let header = encode(op)?;
        Ok(self.log.append(AppendKind::Control, sync, &header, &[], &[])?.position)
    }

    /// Gives messages back uncounted, without waiting.
    fn release(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<u64, BrokerError> {
        let ((), position) = self.on_queue(queue, |q, _, now_ms, fx| {
            let leases: Vec<_> = tokens.iter().filter(|t| q.release(**t, fx)).map(|t| (t.sequence, t.lease)).collect();
            let op = Op::Release { now_ms, queue: queue.incarnation, leases };
            ((), vec![(op, false)])
        })?;
        Ok(position)
    }
}

/// The stored encodings of messages, one after the other, and their lengths.
fn sealed(messages: &[EncodedMessage], first_id: u64, publish_time_ms: u64) -> (Vec<u8>, Vec<u32>) {
    let mut body = Vec::with_capacity(messages.iter().map(|m| m.wire().len() + EncodedMessage::SEAL_BYTES).sum());
    let mut lengths = Vec::with_capacity(messages.len());
    for (message, id) in messages.iter().zip(first_id..) {
        let before = body.len();
        message.seal(id, publish_time_ms, &mut body);
        lengths.push((body.len() - before) as u32);
    }
    (body, lengths)
}

fn encode(op: &Op) -> Result<Vec<u8>, BrokerError> {
    postcard::to_allocvec(op).map_err(|e| BrokerError::Unavailable(format!("record not encodable: {e}")))
}

/// Gives leased messages back if the call that leased them is dropped before it has answered.
struct Undelivered<'a> {
    shared: &'a Shared,
    queue: &'a QueueRef,
    tokens: Vec<LeaseToken>,
}

impl Drop for Undelivered<'_> {
    fn drop(&mut self) {
        if !self.tokens.is_empty() {
            // The store may just have failed; then the leases simply run out.
            let _ = self.shared.release(self.queue, &self.tokens);
        }
    }
}

#[async_trait]
impl Broker for Embedded {
    async fn get(&self, kind: Kind, name: &str) -> Result<Option<Record>, BrokerError> {
        self.shared.open()?;
        Ok(self.shared.state.lock().record(kind, name))
    }

    async fn list(&self, kind: Kind, prefix: &str, after: &str, limit: usize) -> Result<Vec<Record>, BrokerError> {
        self.shared.open()?;
        Ok(self.shared.state.lock().records(kind, prefix, after, limit))
    }

    async fn change(&self, change: Change) -> Result<u64, BrokerError> {
        let shared = &self.shared;
        shared.open()?;
        let (version, position) = {
            let mut state = shared.state.lock();
            shared.log.admit(AppendKind::Control)?;
            let version = state.check(&change)?;
            let now_ms = shared.tick(&mut state);
            let body: Option<Arc<[u8]>> = change.body.as_deref().map(Arc::from);
            let (kind, name, effect) = (change.kind, change.name.clone(), change.effect.clone());
            let op = Op::Change { now_ms, kind, name, version, body: body.clone(), effect };
            let position = shared.record(&op, true)?;
            let mut fx = Effects::default();
            state.change(change.kind, &change.name, version, body, &change.effect, &mut fx);
            match &change.effect {
                Effect::OpenQueue(config) => shared.finish(&mut state, &config.queue, fx),
                Effect::DetachQueue(queue) | Effect::CloseQueue(queue) => shared.finish(&mut state, queue, fx),
                _ => {}
            }
            (version, position)
        };
        shared.log.durable(position).await?;
        let _ = shared.events.send(Event::RecordChanged { kind: change.kind, name: change.name });
        Ok(version)
    }

    fn events(&self) -> broadcast::Receiver<Event> {
        self.shared.events.subscribe()
    }

    fn now_ms(&self) -> u64 {
        self.shared.clock.now_ms()
    }

    async fn ready(&self) -> Result<(), BrokerError> {
        self.shared.open()?;
        Ok(self.shared.log.admit(AppendKind::Control)?)
    }

    async fn route(&self, topic: &TopicRef) -> Result<Route, BrokerError> {
        let state = self.shared.state.lock();
        let log = state.topics.get(&topic.incarnation).filter(|t| !t.closed).ok_or(BrokerError::Gone)?;
        let attached = |(name, incarnation): (&String, &u64)| Attached { name: name.clone(), incarnation: *incarnation };
        let subscriptions = log.attached.iter().map(attached).collect();
        Ok(Route { version: log.route_version, subscriptions })
    }

    async fn append(&self, append: Append) -> Result<Appended, BrokerError> {
        let shared = &self.shared;
        shared.open()?;
        let count = append.messages.len() as u64;
        let first_id = shared.next_message_id.fetch_add(count, Ordering::Relaxed);
        let mut publish_time_ms = shared.clock.now_ms();
        let (mut body, mut lengths) = sealed(&append.messages, first_id, publish_time_ms);
        let mut keys: Vec<u64> = append.messages.iter().map(|m| m.ordering_key_hash()).collect();
        if keys.iter().all(|k| *k == 0) {
            keys.clear();
        }
        let filtered: Vec<_> =
            append.targets.into_iter().filter(|t| !t.filtered.is_empty()).map(|t| (t.queue.incarnation, t.filtered)).collect();
        let appended = |publish_time_ms| Appended { message_ids: (first_id..first_id + count).collect(), publish_time_ms };
        let topic = append.topic.incarnation;
        let mut op = Op::Append { now_ms: publish_time_ms, topic, first_id, first_sequence: 0, keys, filtered };
        let until = Instant::now() + BEHIND_PATIENCE;
        let position = loop {
            match shared.place(append.route_version, &mut op, publish_time_ms, &body, &lengths) {
                Ok(Placed::At(position)) => break position,
                Ok(Placed::Nowhere) => return Ok(appended(publish_time_ms)),
                Ok(Placed::Before(time_ms)) => {
                    publish_time_ms = time_ms;
                    (body, lengths) = sealed(&append.messages, first_id, publish_time_ms);
                }
                Err(BrokerError::Unavailable(_)) if shared.log.is_behind() && Instant::now() < until => {
                    tokio::time::sleep(BEHIND_PAUSE).await;
                    shared.open()?;
                }
                Err(error) => return Err(error),
            }
        };
        shared.log.durable(position).await?;
        Ok(appended(publish_time_ms))
    }

    fn attach(&self, queue: &QueueRef, session: &Arc<Session>) {
        self.shared.state.lock().attach(queue.incarnation, session);
    }

    fn detach(&self, queue: &QueueRef, session: &Arc<Session>) {
        self.shared.state.lock().detach(queue.incarnation, session);
    }

    async fn touch(&self, queue: &QueueRef) -> Result<(), BrokerError> {
        self.shared.on_queue(queue, |_, _, _, _| ((), Vec::new())).map(drop)
    }

    fn rest(&self, queue: &QueueRef, session: &Arc<Session>) {
        self.shared.state.lock().rest(queue.incarnation, session);
    }

    async fn lease(&self, request: LeaseRequest) -> Result<Vec<Leased>, BrokerError> {
        let shared = &self.shared;
        let queue = &request.queue;
        let (picked, deadline_at_ms, position) = shared.pick(&request)?;
        if picked.is_empty() {
            return Ok(Vec::new());
        }
        let mut guard = Undelivered { shared, queue, tokens: picked.iter().map(|p| p.token).collect() };
        shared.log.written(position).await?;
        let locations: Vec<Location> = picked.iter().map(|p| p.location).collect();
        let messages = shared.log.read(&locations).await?;
        guard.tokens.clear();
        let leased = |(p, message): (Picked, Bytes)| Leased {
            token: p.token,
            deadline_at_ms,
            delivery_attempt: p.delivery_attempt,
            message,
        };
        Ok(picked.into_iter().zip(messages).map(leased).collect())
    }

    async fn acknowledge(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<Vec<Outcome>, BrokerError> {
        let (outcomes, position) = self.shared.on_queue(queue, |q, log, now_ms, fx| {
            let (mut removed, mut settled) = (Vec::new(), Vec::new());
            let outcomes = tokens.iter().map(|token| {
                let done = q.acknowledge(log, *token, now_ms, fx);
                if done.removed {
                    removed.push(token.sequence);
                }
                if done.remember {
                    settled.push((token.sequence, token.lease));
                }
                done.outcome
            });
            let outcomes: Vec<Outcome> = outcomes.collect();
            let op = Op::Acknowledge { now_ms, queue: queue.incarnation, sequences: Ranges::new(removed), settled };
            (outcomes, vec![(op, true)])
        })?;
        self.shared.log.durable(position).await?;
        Ok(outcomes)
    }

    async fn modify_deadlines(&self, queue: &QueueRef, changes: &[DeadlineChange]) -> Result<Vec<Outcome>, BrokerError> {
        let (outcomes, position) = self.shared.on_queue(queue, |q, _, now_ms, fx| {
            let mut ops: Vec<Op> = Vec::new();
            let id = queue.incarnation;
            let outcomes = changes.iter().map(|change| {
                let lease = (change.token.sequence, change.token.lease);
                let done = if change.deadline_ms == 0 {
                    let done = q.nack(change.token, change.bypass_backoff, now_ms, fx);
                    match ops.last_mut() {
                        Some(Op::Nack { leases, bypass_backoff, .. }) if *bypass_backoff == change.bypass_backoff => {
                            leases.push(lease)
                        }
                        _ if done => {
                            let bypass_backoff = change.bypass_backoff;
                            ops.push(Op::Nack { now_ms, queue: id, leases: vec![lease], bypass_backoff });
                        }
                        _ => {}
                    }
                    done
                } else {
                    let extended = q.extend(change.token, now_ms + change.deadline_ms, change.max_life_ms);
                    if let Some(at_ms) = extended {
                        match ops.last_mut() {
                            Some(Op::Extend { leases, deadline_at_ms, .. }) if *deadline_at_ms == at_ms => leases.push(lease),
                            _ => ops.push(Op::Extend { now_ms, queue: id, leases: vec![lease], deadline_at_ms: at_ms }),
                        }
                    }
                    extended.is_some()
                };
                if done { Outcome::Done } else { q.stale() }
            });
            let outcomes: Vec<Outcome> = outcomes.collect();
            (outcomes, ops.into_iter().map(|op| (op, false)).collect())
        })?;
        self.shared.log.written(position).await?;
        Ok(outcomes)
    }

    async fn release(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<(), BrokerError> {
        let position = self.shared.release(queue, tokens)?;
        Ok(self.shared.log.written(position).await?)
    }

    async fn seek(&self, queue: &QueueRef, target: SeekTarget) -> Result<(), BrokerError> {
        let shared = &self.shared;
        shared.open()?;
        let position = {
            let mut state = shared.state.lock();
            shared.log.admit(AppendKind::Control)?;
            let now_ms = shared.tick(&mut state);
            let mut fx = Effects::default();
            state.at(queue.incarnation, now_ms, &mut fx)?;
            state.seek(queue.incarnation, target, now_ms, &mut fx)?;
            let op = Op::Seek { now_ms, queue: queue.incarnation, target };
            let position = shared.record(&op, true).inspect_err(|error| shared.fail(error))?;
            shared.finish(&mut state, queue, fx);
            position
        };
        Ok(shared.log.durable(position).await?)
    }

    async fn take_dead_letters(&self, queue: &QueueRef, max: usize, hold: Duration) -> Result<Vec<DeadLetter>, BrokerError> {
        let hold_ms = hold.as_millis() as u64;
        let (taken, _) =
            self.shared.on_queue(queue, |q, log, now_ms, _| (q.take_dead(log, max, now_ms + hold_ms, now_ms), Vec::new()))?;
        let locations: Vec<Location> = taken.iter().map(|(_, _, location)| *location).collect();
        let messages = self.shared.log.read(&locations).await?;
        let dead = taken.into_iter().zip(messages).map(|((token, attempts, _), message)| DeadLetter { token, attempts, message });
        Ok(dead.collect())
    }

    async fn settle_dead_letters(&self, queue: &QueueRef, tokens: &[LeaseToken], forwarded: bool) -> Result<(), BrokerError> {
        let ((), position) = self.shared.on_queue(queue, |q, log, now_ms, fx| {
            let held = q.held_dead(tokens);
            let id = queue.incarnation;
            let sequences = Ranges::new(held.clone());
            let op = if forwarded {
                q.remove_all(log, held, fx);
                Op::Acknowledge { now_ms, queue: id, sequences, settled: Vec::new() }
            } else {
                q.revive_dead(log, held, fx);
                Op::Revive { now_ms, queue: id, sequences }
            };
            ((), vec![(op, forwarded)])
        })?;
        Ok(self.shared.log.durable(position).await?)
    }

    async fn stats(&self, queue: &QueueRef) -> Result<QueueStats, BrokerError> {
        let shared = &self.shared;
        shared.open()?;
        let mut state = shared.state.lock();
        let now_ms = shared.tick(&mut state);
        let mut fx = Effects::default();
        let (target, log) = state.at(queue.incarnation, now_ms, &mut fx)?;
        let mut stats = target.stats(log);
        if target.has_sessions() {
            stats.last_active_ms = now_ms;
        }
        shared.finish(&mut state, queue, fx);
        Ok(stats)
    }

    async fn peek(&self, request: PeekRequest) -> Result<Peek, BrokerError> {
        let shared = &self.shared;
        let mut tries = PEEK_TRIES;
        loop {
            let (seen, next) = shared.look(&request)?;
            let locations: Vec<Location> = seen.iter().map(|seen| seen.location).collect();
            tries -= 1;
            match shared.log.read(&locations).await {
                Ok(messages) => {
                    let peeked = |(seen, message): (Seen, Bytes)| Peeked {
                        sequence: seen.sequence,
                        standing: seen.standing,
                        failures: seen.failures,
                        message,
                    };
                    return Ok(Peek { messages: seen.into_iter().zip(messages).map(peeked).collect(), next });
                }
                // Nobody holds the messages: one may have been acknowledged, and its segment gone, or have moved.
                Err(LogError::Damaged(_)) if tries > 0 => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn measures(&self) -> Vec<Measure> {
        measures(&self.shared.log)
    }

    async fn close(&self) {
        self.shared.orderly.store(true, Ordering::Release);
        self.shared.stop();
        let workers = std::mem::take(&mut *self.workers.lock());
        // Joining waits for the last checkpoint, so it must not hold up a runtime thread.
        let _ = tokio::task::spawn_blocking(move || workers.into_iter().for_each(|w| drop(w.join()))).await;
        self.shared.log.close().await;
    }
}

fn measures(log: &Log) -> Vec<Measure> {
    let usage = log.usage();
    let gauge = |name, about, value: f64| Measure { name, about, value: MeasureValue::Gauge(value) };
    let mut measures = vec![
        gauge("log_bytes", "Space the log takes, prepared segments included", usage.bytes as f64),
        gauge("log_segments", "Segments of the log that hold records", usage.segments as f64),
        gauge("log_pending_bytes", "Bytes appended to the log and not yet written", usage.pending_bytes as f64),
        gauge("short_of_space", "1 while there is no room for another segment", f64::from(u8::from(log.short_of_space()))),
    ];
    let about = "Bytes appended to the log since its beginning";
    measures.push(Measure { name: "log_appended_bytes_total", about, value: MeasureValue::Counter(log.position()) });
    measures.extend(log.free_bytes().map(|bytes| gauge("free_bytes", "Space the file system has left", bytes as f64)));
    measures.extend(log.syncs().map(|view| Measure {
        name: "sync_duration_seconds",
        about: "Time of a sync of the log",
        value: MeasureValue::Histogram(view),
    }));
    measures
}

impl Shared {
    /// Finds messages and changes nothing beyond what is due anyway.
    fn look(&self, request: &PeekRequest) -> Result<(Vec<Seen>, Option<u64>), BrokerError> {
        self.open()?;
        let mut state = self.state.lock();
        let now_ms = self.tick(&mut state);
        let mut fx = Effects::default();
        let (queue, log) = state.at(request.queue.incarnation, now_ms, &mut fx)?;
        let seen = queue.peek(log, request.from, request.max_messages, request.max_bytes);
        self.finish(&mut state, &request.queue, fx);
        Ok(seen)
    }

    /// Leases in memory and in the log's buffer; the caller waits for the log.
    fn pick(&self, request: &LeaseRequest) -> Result<(Vec<Picked>, u64, u64), BrokerError> {
        self.open()?;
        let mut state = self.state.lock();
        self.log.admit(AppendKind::Control)?;
        let now_ms = self.tick(&mut state);
        let (id, session) = (request.queue.incarnation, &request.session);
        let mut fx = Effects::default();
        let waiting = state.hungry_count(id);
        let (queue, log) = state.used(id, now_ms, &mut fx)?;
        // Others wait too: leave them their share.
        let share = if waiting == 0 { usize::MAX } else { queue.available(log).div_ceil(waiting as u64 + 1).max(1) as usize };
        let budget = Budget {
            session: session.id,
            max_messages: request.max_messages.min(share),
            max_bytes: request.max_bytes,
            max_inflight: request.max_inflight,
            deadline_ms: request.deadline_ms,
        };
        let picked = queue.lease(log, budget, now_ms, &mut fx);
        let log_use = queue.is_use_to_log(now_ms);
        let deadline_at_ms = now_ms + request.deadline_ms;
        let mut position = 0;
        if let Some(first) = picked.first() {
            let op = Op::Lease {
                now_ms,
                queue: id,
                lease: first.token.lease,
                session: session.id,
                deadline_at_ms,
                sequences: Ranges::new(picked.iter().map(|p| p.token.sequence).collect()),
            };
            position = self.record(&op, false).inspect_err(|error| self.fail(error))?;
            session.charge(picked.len(), picked.iter().map(|p| u64::from(p.location.length)).sum());
            state.offer(id);
        } else {
            if log_use {
                self.record(&Op::Use { now_ms, queue: id }, false).inspect_err(|error| self.fail(error))?;
            }
            state.hungry(id, session);
        }
        self.finish(&mut state, &request.queue, fx);
        Ok((picked, deadline_at_ms, position))
    }
}

#[cfg(test)]
mod tests;
