//! Everything the embedded broker knows, as one state machine: records, topics' indexes, queues and snapshots.
//!
//! [`State`] is changed by live calls (through `embedded.rs`, under its lock) and by [`State::replay`] with the records of
//! the log. Both go through the same functions of [`Queue`] and [`TopicLog`].

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{
    bits::Bits,
    log::Location,
    op::Op,
    queue::{Effects, Queue, SnapshotState, StoredQueue},
    topic_log::{Entry, TopicLog},
};
use crate::broker::{
    BrokerError, Change, Effect, Expect, Kind, LeaseToken, QueueConfig, QueueRef, Record, SeekTarget, Session, TopicRef,
};

/// Messages one woken session is expected to take, so that a burst wakes few sessions and a trickle one at a time.
const MESSAGES_PER_WAKE: u64 = 100;
/// Lease numbers that are skipped after a restart, so that numbers whose records were lost with the power are not given out
/// again: more than any broker hands out between two syncs.
const LEASE_GAP: u64 = 1 << 20;

/// A queue and what belongs to this process only.
pub struct QueueSlot {
    pub queue: Queue,
    /// Sessions that found nothing, in the order in which they asked.
    hungry: VecDeque<Arc<Session>>,
    due_at_ms: u64,
}

type StoredRecord = (u64, Arc<[u8]>);

/// The whole state.
#[derive(Default)]
pub struct State {
    pub now_ms: u64,
    pub next_message_id: u64,
    version: u64,
    /// Version and body by kind and name.
    records: BTreeMap<(Kind, String), StoredRecord>,
    pub topics: HashMap<u64, TopicLog>,
    pub queues: HashMap<u64, QueueSlot>,
    pub snapshots: HashMap<u64, SnapshotState>,
    /// Attached sessions.
    sessions: HashMap<u64, Arc<Session>>,
    due: BTreeSet<(u64, u64)>,
    /// Appends that are not durable yet: log position, topic, one past the last sequence.
    pending: VecDeque<(u64, u64, u64)>,
    /// When the clock was last looked at, by a clock that nobody sets.
    pub looked_at: Option<Instant>,
}

/// The state as a checkpoint stores it.
#[derive(Serialize, Deserialize)]
pub struct StoredState {
    now_ms: u64,
    next_message_id: u64,
    version: u64,
    records: Vec<(Kind, String, u64, Arc<[u8]>)>,
    topics: Vec<(u64, TopicLog)>,
    queues: Vec<(QueueConfig, StoredQueue)>,
    snapshots: Vec<(u64, SnapshotState)>,
}

impl State {
    /// The time never goes back, except by [`set_back`](Self::set_back).
    pub fn tick(&mut self, clock_ms: u64) -> u64 {
        self.now_ms = self.now_ms.max(clock_ms);
        self.now_ms
    }

    /// The clock was set back, to `now_ms`: so is whatever waits for a time.
    pub fn set_back(&mut self, now_ms: u64, by_ms: u64) {
        self.now_ms = now_ms;
        self.due.clear();
        let queues: Vec<u64> = self.queues.keys().copied().collect();
        for queue in queues {
            if let Some(slot) = self.queues.get_mut(&queue) {
                slot.queue.set_back(by_ms);
                slot.due_at_ms = u64::MAX;
            }
            self.reschedule(queue);
        }
    }

    // ---- records

    pub fn record(&self, kind: Kind, name: &str) -> Option<Record> {
        let (version, body) = self.records.get(&(kind, name.to_owned()))?;
        Some(Record { name: name.to_owned(), version: *version, body: bytes::Bytes::from_owner(body.clone()) })
    }

    pub fn records(&self, kind: Kind, prefix: &str, after: &str, limit: usize) -> Vec<Record> {
        let from = if after > prefix { after } else { prefix };
        self.records
            .range((kind, from.to_owned())..)
            .take_while(|((k, name), _)| *k == kind && name.starts_with(prefix))
            .filter(|((_, name), _)| after.is_empty() || name.as_str() > after)
            .take(limit)
            .map(|((_, name), (version, body))| Record {
                name: name.clone(),
                version: *version,
                body: bytes::Bytes::from_owner(body.clone()),
            })
            .collect()
    }

    /// Whether a change can be carried out. Answers the version it will have.
    pub fn check(&self, change: &Change) -> Result<u64, BrokerError> {
        let current = self.records.get(&(change.kind, change.name.clone())).map(|(version, _)| *version);
        match (change.expect, current) {
            (Expect::Absent, None) => {}
            (Expect::Version(expected), Some(version)) if expected == version => {}
            (_, version) => return Err(BrokerError::Conflict(version.unwrap_or(0))),
        }
        let topic_open = |topic: &TopicRef| self.topics.get(&topic.incarnation).is_some_and(|t| !t.closed);
        let queue_known = |queue: &QueueRef| self.queues.contains_key(&queue.incarnation);
        let possible = match &change.effect {
            Effect::None | Effect::OpenTopic(_) => true,
            Effect::CloseTopic(topic) => topic_open(topic),
            Effect::OpenQueue(config) => queue_known(&config.queue) || topic_open(&config.topic),
            Effect::DetachQueue(queue) | Effect::CloseQueue(queue) => queue_known(queue),
            Effect::TakeSnapshot { queue, .. } => queue_known(queue),
            Effect::DropSnapshot { snapshot, .. } => self.snapshots.contains_key(snapshot),
        };
        if possible { Ok(self.version + 1) } else { Err(BrokerError::Gone) }
    }

    pub fn change(&mut self, kind: Kind, name: &str, version: u64, body: Option<Arc<[u8]>>, effect: &Effect, fx: &mut Effects) {
        self.version = self.version.max(version);
        match body {
            Some(body) => self.records.insert((kind, name.to_owned()), (version, body)),
            None => self.records.remove(&(kind, name.to_owned())),
        };
        match effect {
            Effect::None => {}
            Effect::OpenTopic(config) => {
                let id = config.topic.incarnation;
                let log = self.topics.entry(id).or_insert_with(|| TopicLog::new(config.topic.channel.clone(), None));
                log.set_retention(config.retention_ms);
            }
            Effect::CloseTopic(topic) => self.close_topic(topic.incarnation),
            Effect::OpenQueue(config) => self.open_queue(name, config, fx),
            Effect::DetachQueue(queue) => self.detach_queue(queue.incarnation, fx),
            Effect::CloseQueue(queue) => self.close_queue(queue.incarnation, fx),
            Effect::TakeSnapshot { snapshot, queue } => {
                if let Some(slot) = self.queues.get(&queue.incarnation) {
                    let topic = slot.queue.config.topic.incarnation;
                    if let Some(log) = self.topics.get_mut(&topic) {
                        self.snapshots.insert(*snapshot, slot.queue.snapshot(topic, log));
                    }
                }
            }
            Effect::DropSnapshot { snapshot, .. } => {
                if let Some(state) = self.snapshots.remove(snapshot) {
                    let topic = state.topic;
                    if let Some(log) = self.topics.get_mut(&topic) {
                        state.release(log);
                    }
                    self.forget_topic(topic);
                }
            }
        }
    }

    fn close_topic(&mut self, topic: u64) {
        if let Some(log) = self.topics.get_mut(&topic) {
            log.closed = true;
            log.attached.clear();
            log.route_version += 1;
            log.set_retention(None);
        }
        self.forget_topic(topic);
    }

    /// Drops the index of a deleted topic that nothing refers to.
    fn forget_topic(&mut self, topic: u64) {
        if self.topics.get(&topic).is_some_and(|log| log.closed && log.references == 0) {
            self.topics.remove(&topic);
        }
    }

    fn open_queue(&mut self, name: &str, config: &QueueConfig, fx: &mut Effects) {
        let id = config.queue.incarnation;
        let Some(log) = self.topics.get_mut(&config.topic.incarnation) else { return };
        let now_ms = self.now_ms;
        match self.queues.get_mut(&id) {
            Some(slot) => {
                slot.queue.configure(config.clone(), log, fx);
                slot.queue.active_ms = now_ms;
            }
            None => {
                let mut queue = Queue::new(config.clone(), log);
                queue.active_ms = now_ms;
                log.attached.insert(name.to_owned(), id);
                log.route_version += 1;
                self.queues.insert(id, QueueSlot { queue, hungry: VecDeque::new(), due_at_ms: u64::MAX });
            }
        }
    }

    fn detach_queue(&mut self, queue: u64, fx: &mut Effects) {
        let Some(slot) = self.queues.get_mut(&queue) else { return };
        slot.queue.detached = true;
        if let Some(log) = self.topics.get_mut(&slot.queue.config.topic.incarnation) {
            slot.queue.clear(log, fx);
            log.attached.retain(|_, id| *id != queue);
            log.route_version += 1;
        }
        for session in slot.hungry.drain(..) {
            session.wake();
        }
    }

    fn close_queue(&mut self, queue: u64, fx: &mut Effects) {
        self.detach_queue(queue, fx);
        let Some(slot) = self.queues.remove(&queue) else { return };
        self.due.remove(&(slot.due_at_ms, queue));
        let topic = slot.queue.config.topic.incarnation;
        if let Some(log) = self.topics.get_mut(&topic) {
            log.references = log.references.saturating_sub(1);
        }
        self.forget_topic(topic);
    }

    // ---- messages

    /// Takes in messages that lie at `locations`.
    pub fn append(&mut self, topic: u64, keys: &[u64], filtered: &[(u64, Vec<u32>)], now_ms: u64, locations: &[Location]) -> u64 {
        let Some(log) = self.topics.get_mut(&topic) else { return 0 };
        let first = log.next_sequence();
        // The index is in the order of time, whatever the clock does.
        let published_ms = now_ms.max(log.last_published_ms());
        for (at, location) in locations.iter().enumerate() {
            let entry = Entry { published_ms, location: *location };
            log.push(entry, keys.get(at).copied().unwrap_or(0));
        }
        let attached: Vec<u64> = log.attached.values().copied().collect();
        for queue in attached {
            let skip = filtered.iter().find(|(id, _)| *id == queue).map_or(&[][..], |(_, skip)| skip);
            if let Some(slot) = self.queues.get_mut(&queue) {
                slot.queue.append(log, first, locations.len() as u64, skip, published_ms);
            }
        }
        log.next_sequence()
    }

    /// Which messages of a block anybody may still ask for.
    pub fn needed(&self, topic: u64, index: u64) -> Bits {
        let Some(log) = self.topics.get(&topic) else { return Bits::default() };
        let Some(block) = log.block(index) else { return Bits::default() };
        if log.retention_ms.is_some() {
            return block.there();
        }
        let mut needed = Bits::default();
        let mut add = |slot: &QueueSlot| needed = needed.or(&slot.queue.needed(index));
        if log.closed {
            // Its queues are no longer listed.
            self.queues.values().filter(|s| s.queue.config.topic.incarnation == topic).for_each(&mut add);
        } else {
            log.attached.values().filter_map(|id| self.queues.get(id)).for_each(&mut add);
        }
        for snapshot in self.snapshots.values().filter(|s| s.topic == topic) {
            needed = needed.or(&snapshot.wanted(index));
        }
        needed.and(&block.there())
    }

    /// The same of the messages in some segments; nothing when the block is gone.
    pub fn needed_in(&self, topic: u64, index: u64, segments: &BTreeSet<u32>) -> Option<Bits> {
        let block = self.topics.get(&topic)?.block(index)?;
        let mut needed = self.needed(topic, index);
        for (at, entry) in block.entries.iter().enumerate() {
            if !segments.contains(&entry.location.segment) {
                needed.clear(at);
            }
        }
        Some(needed)
    }

    /// Notes that messages were written again at `places`.
    pub fn gather(&mut self, topic: u64, segments: &[u32], blocks: &[(u64, Bits)], places: &[Location]) {
        let Some(log) = self.topics.get_mut(&topic) else { return };
        let mut places = places.iter().copied();
        for (index, moved) in blocks {
            log.relocate(*index, segments, moved, &mut places);
        }
    }

    /// The append at `position` waits for durability before it may be delivered.
    pub fn await_durable(&mut self, position: u64, topic: u64, end: u64) {
        self.pending.push_back((position, topic, end));
    }

    /// Everything up to `position` is durable: lets it be delivered.
    pub fn durable(&mut self, position: u64) {
        while let Some((_, topic, end)) = self.pending.front().copied().filter(|(at, _, _)| *at <= position) {
            self.pending.pop_front();
            let Some(log) = self.topics.get_mut(&topic) else { continue };
            log.visible_end = log.visible_end.max(end);
            let attached: Vec<u64> = log.attached.values().copied().collect();
            for queue in attached {
                self.offer(queue);
                self.reschedule(queue);
            }
        }
    }

    /// As [`at`](Self::at), and counts as use of the queue.
    pub fn used(&mut self, queue: u64, now_ms: u64, fx: &mut Effects) -> Result<(&mut Queue, &mut TopicLog), BrokerError> {
        let (queue, log) = self.at(queue, now_ms, fx)?;
        queue.active_ms = now_ms;
        Ok((queue, log))
    }

    /// The queue and its topic's index, after what is due by `now_ms` was carried out.
    pub fn at(&mut self, queue: u64, now_ms: u64, fx: &mut Effects) -> Result<(&mut Queue, &mut TopicLog), BrokerError> {
        let slot = self.queues.get_mut(&queue).ok_or(BrokerError::Gone)?;
        let log = self.topics.get_mut(&slot.queue.config.topic.incarnation).ok_or(BrokerError::Gone)?;
        slot.queue.advance(log, now_ms, fx);
        Ok((&mut slot.queue, log))
    }

    // ---- sessions and time

    pub fn attach(&mut self, queue: u64, session: &Arc<Session>) {
        self.sessions.insert(session.id, session.clone());
        if let Some(slot) = self.queues.get_mut(&queue) {
            slot.queue.session(session.id, true);
        }
        session.wake();
    }

    pub fn detach(&mut self, queue: u64, session: &Arc<Session>) {
        self.sessions.remove(&session.id);
        if let Some(slot) = self.queues.get_mut(&queue) {
            slot.queue.session(session.id, false);
            slot.queue.active_ms = self.now_ms;
            slot.hungry.retain(|s| s.id != session.id);
        }
        // It may have been woken for something it will not fetch now.
        self.offer(queue);
    }

    /// The session gives up its turn until it leases again.
    pub fn rest(&mut self, queue: u64, session: &Arc<Session>) {
        if let Some(slot) = self.queues.get_mut(&queue) {
            slot.hungry.retain(|s| s.id != session.id);
        }
        self.offer(queue);
    }

    /// The session got less than it wanted: it waits its turn.
    pub fn hungry(&mut self, queue: u64, session: &Arc<Session>) {
        if let Some(slot) = self.queues.get_mut(&queue)
            && self.sessions.contains_key(&session.id)
            && !slot.hungry.iter().any(|s| s.id == session.id)
        {
            slot.hungry.push_back(session.clone());
        }
    }

    /// Sessions that wait for something to lease.
    pub fn hungry_count(&self, queue: u64) -> usize {
        self.queues.get(&queue).map_or(0, |slot| slot.hungry.len())
    }

    /// Wakes as many waiting sessions as there is work for.
    pub fn offer(&mut self, queue: u64) {
        let Some(slot) = self.queues.get_mut(&queue).filter(|s| !s.hungry.is_empty()) else { return };
        let Some(log) = self.topics.get(&slot.queue.config.topic.incarnation) else { return };
        let wakes = slot.queue.available(log).div_ceil(MESSAGES_PER_WAKE);
        for _ in 0..wakes {
            let Some(session) = slot.hungry.pop_front() else { return };
            session.wake();
        }
    }

    /// Passes on what a queue operation did to others. Answers whether there are dead letters.
    pub fn settle_effects(&mut self, queue: u64, fx: Effects) -> bool {
        for (session, messages, bytes) in fx.credits {
            if let Some(session) = self.sessions.get(&session) {
                session.credit(messages, bytes);
            }
        }
        for session in fx.wake {
            if let Some(session) = self.sessions.get(&session) {
                session.wake();
            }
        }
        if fx.available {
            self.offer(queue);
        }
        self.reschedule(queue);
        fx.dead
    }

    fn reschedule(&mut self, queue: u64) {
        let Some(slot) = self.queues.get_mut(&queue) else { return };
        let Some(log) = self.topics.get(&slot.queue.config.topic.incarnation) else { return };
        // A later time than the one noted is left alone: a spurious look is cheaper than moving the note at every call.
        if let Some(at) = slot.queue.next_due_ms(log).filter(|at| *at < slot.due_at_ms) {
            self.due.remove(&(slot.due_at_ms, queue));
            slot.due_at_ms = at;
            self.due.insert((at, queue));
        }
    }

    /// When something is due next.
    pub fn next_due_ms(&self) -> Option<u64> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Carries out what is due everywhere. Answers the queues with dead letters.
    pub fn advance(&mut self, now_ms: u64) -> Vec<QueueRef> {
        let mut dead = Vec::new();
        while let Some((at, queue)) = self.due.first().copied().filter(|(at, _)| *at <= now_ms) {
            self.due.remove(&(at, queue));
            if let Some(slot) = self.queues.get_mut(&queue) {
                slot.due_at_ms = u64::MAX;
            }
            let mut fx = Effects::default();
            let Ok((state, _)) = self.at(queue, now_ms, &mut fx) else { continue };
            let name = state.config.queue.clone();
            if self.settle_effects(queue, fx) {
                dead.push(name);
            }
        }
        dead
    }

    /// Gives back what idle topics and queues no longer need.
    pub fn reclaim(&mut self, now_ms: u64) {
        for slot in self.queues.values_mut() {
            if let Some(log) = self.topics.get_mut(&slot.queue.config.topic.incarnation) {
                slot.queue.reclaim(log);
            }
        }
        for log in self.topics.values_mut() {
            log.advance(now_ms);
            log.reclaim(now_ms);
        }
    }

    // ---- recovery

    /// Repeats one record of the log. `bodies` are the places of an append's messages.
    pub fn replay(&mut self, op: Op, bodies: &[Location]) {
        let mut fx = Effects::default();
        match op {
            Op::Append { now_ms, topic, first_id, first_sequence, keys, filtered } => {
                self.tick(now_ms);
                self.skip_to(topic, first_sequence, now_ms);
                self.next_message_id = self.next_message_id.max(first_id + bodies.len() as u64);
                let end = self.append(topic, &keys, &filtered, now_ms, bodies);
                if let Some(log) = self.topics.get_mut(&topic) {
                    log.visible_end = end;
                }
            }
            Op::Change { now_ms, kind, name, version, body, effect } => {
                self.tick(now_ms);
                self.change(kind, &name, version, body, &effect, &mut fx);
            }
            Op::Lease { now_ms, queue, lease, session, deadline_at_ms, sequences } => {
                self.replay_on(queue, now_ms, |q, log, _| {
                    let sequences: Vec<u64> = sequences.iter().collect();
                    q.lease_again(log, &sequences, lease, session, deadline_at_ms, now_ms);
                });
            }
            Op::Acknowledge { now_ms, queue, sequences, settled } => self.replay_on(queue, now_ms, |q, log, fx| {
                q.remove_all(log, sequences.iter(), fx);
                for (sequence, lease) in settled {
                    q.remember_settled(sequence, lease, now_ms);
                }
            }),
            Op::Extend { now_ms, queue, leases, deadline_at_ms } => self.replay_on(queue, now_ms, |q, _, _| {
                for (sequence, lease) in leases {
                    q.extend(token(sequence, lease), deadline_at_ms, 0);
                }
            }),
            Op::Nack { now_ms, queue, leases, bypass_backoff } => self.replay_on(queue, now_ms, |q, _, fx| {
                for (sequence, lease) in leases {
                    q.nack(token(sequence, lease), bypass_backoff, now_ms, fx);
                }
            }),
            Op::Release { now_ms, queue, leases } => self.replay_on(queue, now_ms, |q, _, fx| {
                for (sequence, lease) in leases {
                    q.release(token(sequence, lease), fx);
                }
            }),
            Op::Seek { now_ms, queue, target } => {
                self.tick(now_ms);
                let _ = self.seek(queue, target, now_ms, &mut fx);
            }
            Op::Gather { now_ms, topic, segments, blocks } => {
                self.tick(now_ms);
                self.gather(topic, &segments, &blocks, bodies);
            }
            Op::Revive { now_ms, queue, sequences } => self.replay_on(queue, now_ms, |q, log, fx| {
                q.revive_dead(log, sequences.iter(), fx);
            }),
            Op::Use { now_ms, queue } => self.replay_on(queue, now_ms, |_, _, _| {}),
            Op::SetBack { now_ms, by_ms } => self.set_back(now_ms, by_ms),
        }
    }

    /// A checkpoint that was begun and not finished may have closed the topic's last block early, see [`State::reclaim`].
    fn skip_to(&mut self, topic: u64, sequence: u64, now_ms: u64) {
        let Some(log) = self.topics.get(&topic).filter(|log| log.next_sequence() < sequence) else { return };
        for queue in log.attached.values().copied().collect::<Vec<_>>() {
            if let Ok((queue, log)) = self.at(queue, now_ms, &mut Effects::default()) {
                queue.reclaim(log);
            }
        }
        if let Some(log) = self.topics.get_mut(&topic) {
            log.advance(now_ms);
            log.reclaim(now_ms);
            log.skip_to(sequence);
        }
    }

    fn replay_on(&mut self, queue: u64, now_ms: u64, f: impl FnOnce(&mut Queue, &mut TopicLog, &mut Effects)) {
        self.tick(now_ms);
        let mut fx = Effects::default();
        if let Ok((queue, log)) = self.used(queue, now_ms, &mut fx) {
            f(queue, log, &mut fx);
        }
    }

    pub fn seek(&mut self, queue: u64, target: SeekTarget, now_ms: u64, fx: &mut Effects) -> Result<(), BrokerError> {
        let slot = self.queues.get_mut(&queue).ok_or(BrokerError::Gone)?;
        slot.queue.active_ms = now_ms;
        let topic = slot.queue.config.topic.incarnation;
        let log = self.topics.get_mut(&topic).ok_or(BrokerError::Gone)?;
        match target {
            SeekTarget::Time(time_ms) => slot.queue.seek_time(log, time_ms, now_ms, fx),
            SeekTarget::Snapshot(snapshot) => {
                let state = self.snapshots.get(&snapshot).filter(|s| s.topic == topic).ok_or(BrokerError::Gone)?;
                slot.queue.seek_snapshot(log, state, fx);
            }
        }
        Ok(())
    }

    /// Ends recovery: leases keep their deadlines, and lease numbers go on well beyond those in the log.
    pub fn recovered(&mut self) {
        let queues: Vec<u64> = self.queues.keys().copied().collect();
        for queue in queues {
            if let Some(slot) = self.queues.get_mut(&queue) {
                slot.queue.skip_leases(LEASE_GAP);
                slot.due_at_ms = u64::MAX;
            }
            self.reschedule(queue);
        }
        for log in self.topics.values_mut() {
            log.visible_end = log.next_sequence();
        }
    }

    /// What ran out before this time was counted by an earlier process, if by any.
    pub fn count_from(&mut self, now_ms: u64) {
        self.queues.values_mut().for_each(|slot| slot.queue.count_from(now_ms));
    }

    // ---- checkpoint

    /// A copy to be stored, cheap where the state is large: blocks of the index are shared.
    pub fn store(&self) -> StoredState {
        StoredState {
            now_ms: self.now_ms,
            next_message_id: self.next_message_id,
            version: self.version,
            records: self.records.iter().map(|((k, n), (v, b))| (*k, n.clone(), *v, b.clone())).collect(),
            topics: self.topics.iter().map(|(id, log)| (*id, log.clone())).collect(),
            queues: self.queues.values().map(|s| (s.queue.config.clone(), s.queue.clone().store())).collect(),
            snapshots: self.snapshots.iter().map(|(id, s)| (*id, s.clone())).collect(),
        }
    }

    pub fn load(stored: StoredState) -> Self {
        let queues = stored.queues.into_iter().map(|(config, queue)| {
            let id = config.queue.incarnation;
            (id, QueueSlot { queue: Queue::load(config, queue), hungry: VecDeque::new(), due_at_ms: u64::MAX })
        });
        Self {
            now_ms: stored.now_ms,
            next_message_id: stored.next_message_id,
            version: stored.version,
            records: stored.records.into_iter().map(|(k, n, v, b)| ((k, n), (v, b))).collect(),
            topics: stored.topics.into_iter().collect(),
            queues: queues.collect(),
            snapshots: stored.snapshots.into_iter().collect(),
            ..Self::default()
        }
    }
}

impl StoredState {
    /// Segments of the log that hold messages somebody still needs.
    pub fn used_segments(&self) -> BTreeSet<u32> {
        let blocks = self.topics.iter().flat_map(|(_, log)| log.live_blocks());
        let mut used = BTreeSet::new();
        let mut last = None;
        for entry in blocks.flat_map(|block| &block.entries).filter(|entry| entry.is_there()) {
            if last != Some(entry.location.segment) {
                last = Some(entry.location.segment);
                used.insert(entry.location.segment);
            }
        }
        used
    }
}

fn token(sequence: u64, lease: u64) -> LeaseToken {
    LeaseToken { transaction: 0, sequence, lease, attempt: 0 }
}
