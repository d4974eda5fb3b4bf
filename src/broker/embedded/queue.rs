//! One subscription's queue: a deterministic state machine over its topic's index. Time is an argument, nothing waits and
//! nothing is read or written here, so the same code serves live calls, recovery from the log and the property tests.
//!
//! A message of the queue is in exactly one place: acknowledged; fresh (not looked at yet, at or after `cursor`); leased;
//! ready or delayed for redelivery; parked in the line of its ordering key; or dead, waiting to be forwarded.

mod ordering;
mod seek;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{
    bits::{BLOCK, Bits, block_of, offset_of},
    leases::{Lease, Leases},
    log::Location,
    topic_log::TopicLog,
};
use crate::broker::{LeaseToken, Outcome, QueueConfig, QueueStats};
use ordering::Keys;
pub use seek::SnapshotState;

/// How long, and for how many messages, the lease that acknowledged a redelivered message is remembered, so that a repeated
/// exactly-once acknowledgement is told from a stale one. Clients repeat an acknowledgement for up to 10 minutes.
const SETTLED_MS: u64 = 600_000;
const MAX_SETTLED: usize = 100_000;

/// What a call did to others: budgets freed, sessions to wake.
#[derive(Debug, Default)]
pub struct Effects {
    /// (session, messages, bytes) no longer outstanding.
    pub credits: Vec<(u64, usize, u64)>,
    /// Sessions that have an ordering key's next messages to themselves.
    pub wake: Vec<u64>,
    /// There may be something for any session.
    pub available: bool,
    /// There are dead letters to forward.
    pub dead: bool,
}

impl Effects {
    fn credit(&mut self, session: u64, bytes: u64) {
        match self.credits.last_mut() {
            Some(last) if last.0 == session => {
                last.1 += 1;
                last.2 += bytes;
            }
            _ => self.credits.push((session, 1, bytes)),
        }
    }
}

/// The part of the state that belongs to one block of the topic's index.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct QueueBlock {
    /// Messages that are or were the queue's own: appended to it and not filtered out.
    member: Bits,
    acked: Bits,
    unacked: u32,
    leased: u32,
    /// Lease slot + 1 of each leased message; there only while the block has leases.
    #[serde(skip)]
    slots: Option<Box<[u32; BLOCK as usize]>>,
}

/// Where a message that was delivered before, or was given back, is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Place {
    Leased,
    /// Waiting its turn, at this position of `ready`.
    Ready(i64),
    /// Waiting for its backoff to end.
    Delayed(u64),
    /// In the line of its ordering key.
    Line,
    Dead,
}

/// What is remembered of a message beyond the bitmaps; only redelivered or returned messages have one.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Retry {
    /// Failed deliveries, for the backoff.
    failures: u32,
    /// Failed deliveries while there was a dead-letter policy.
    counted: u32,
    place: Place,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Dead {
    lease: u64,
    held_until_ms: u64,
}

/// A message picked for delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Picked {
    pub token: LeaseToken,
    pub delivery_attempt: u32,
    pub location: Location,
}

/// What an acknowledgement did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acknowledged {
    pub outcome: Outcome,
    /// The message was removed just now.
    pub removed: bool,
    /// Which lease removed it is to be remembered.
    pub remember: bool,
}

/// What [`Queue::lease`] needs to know.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    pub session: u64,
    pub max_messages: usize,
    pub max_bytes: u64,
    pub max_inflight: u64,
    pub deadline_ms: u64,
}

/// A queue.
#[derive(Debug, Clone)]
pub struct Queue {
    pub config: QueueConfig,
    pub detached: bool,
    blocks: VecDeque<Option<Box<QueueBlock>>>,
    first_block: u64,
    cursor: u64,
    /// The topic's next sequence when the queue was made: nothing is known of earlier messages.
    start: u64,
    /// Messages below were looked at for retention.
    expire_from: u64,
    leases: Leases,
    retries: HashMap<u64, Retry>,
    ready: BTreeMap<i64, u64>,
    ready_front: i64,
    ready_back: i64,
    delayed: BTreeSet<(u64, u64)>,
    dead: BTreeMap<u64, Dead>,
    /// When dead letters that were taken and not settled are offered again.
    dead_due_ms: Option<u64>,
    keys: Keys,
    next_lease: u64,
    /// Tokens with a smaller lease number are from before the last seek and settle nothing.
    barrier: u64,
    /// Messages published before this time are acknowledged on arrival (a seek into the future).
    floor_ms: u64,
    unacked: u64,
    unacked_bytes: u64,
    settled: HashMap<u64, u64>,
    settled_order: VecDeque<(u64, u64)>,
    /// The last lease call began with a redelivered message, so the next begins with a fresh one.
    redelivered_last: bool,
}

/// A queue as it is stored in a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredQueue {
    detached: bool,
    blocks: VecDeque<Option<Box<QueueBlock>>>,
    first_block: u64,
    cursor: u64,
    start: u64,
    expire_from: u64,
    leases: Vec<Lease>,
    retries: Vec<(u64, Retry)>,
    ready: Vec<u64>,
    delayed: BTreeSet<(u64, u64)>,
    dead: Vec<u64>,
    keys: Keys,
    next_lease: u64,
    barrier: u64,
    floor_ms: u64,
    unacked: u64,
    unacked_bytes: u64,
    settled: Vec<(u64, u64, u64)>,
}

impl Queue {
    /// A queue that takes the messages its topic gets from now on.
    pub fn new(config: QueueConfig, topic: &mut TopicLog) -> Self {
        topic.references += 1;
        let start = topic.next_sequence();
        Self {
            config,
            detached: false,
            blocks: VecDeque::new(),
            first_block: block_of(start),
            cursor: start,
            start,
            expire_from: start,
            leases: Leases::default(),
            retries: HashMap::new(),
            ready: BTreeMap::new(),
            ready_front: 0,
            ready_back: 0,
            delayed: BTreeSet::new(),
            dead: BTreeMap::new(),
            dead_due_ms: None,
            keys: Keys::default(),
            next_lease: 1,
            barrier: 0,
            floor_ms: 0,
            unacked: 0,
            unacked_bytes: 0,
            settled: HashMap::new(),
            settled_order: VecDeque::new(),
            redelivered_last: false,
        }
    }

    /// Applies changed settings.
    pub fn configure(&mut self, config: QueueConfig, topic: &mut TopicLog, fx: &mut Effects) {
        self.config = config;
        if self.config.max_delivery_attempts.is_none() {
            let dead: Vec<u64> = self.dead.keys().copied().collect();
            self.revive_dead(topic, dead, fx);
            // Attempts count only while there is a policy.
            self.retries.values_mut().for_each(|retry| retry.counted = 0);
        }
    }

    /// Leaves out lease numbers.
    pub fn skip_leases(&mut self, count: u64) {
        self.next_lease += count;
    }

    /// Drops everything the queue holds. It must not be used afterwards, except for settings.
    pub fn clear(&mut self, topic: &mut TopicLog, fx: &mut Effects) {
        self.drop_deliveries(fx);
        for (at, block) in std::mem::take(&mut self.blocks).into_iter().enumerate() {
            if block.is_some() {
                topic.release(self.first_block + at as u64);
            }
        }
        self.unacked = 0;
        self.unacked_bytes = 0;
        self.cursor = topic.next_sequence();
        self.expire_from = self.cursor;
        self.first_block = block_of(self.cursor);
        self.barrier = self.next_lease;
    }

    // ---- blocks

    fn block(&self, sequence: u64) -> Option<&QueueBlock> {
        let at = block_of(sequence).checked_sub(self.first_block)?;
        self.blocks.get(at as usize)?.as_deref()
    }

    fn block_mut(&mut self, sequence: u64) -> Option<&mut QueueBlock> {
        let at = block_of(sequence).checked_sub(self.first_block)?;
        self.blocks.get_mut(at as usize)?.as_deref_mut()
    }

    /// The block, made and held if it is not there.
    fn ensure_block(&mut self, index: u64, topic: &mut TopicLog) -> &mut QueueBlock {
        if self.blocks.is_empty() {
            self.first_block = index;
        }
        while index < self.first_block {
            self.blocks.push_front(None);
            self.first_block -= 1;
        }
        let at = (index - self.first_block) as usize;
        while self.blocks.len() <= at {
            self.blocks.push_back(None);
        }
        self.blocks[at].get_or_insert_with(|| {
            topic.hold(index);
            Box::default()
        })
    }

    fn is_unacked(&self, sequence: u64) -> bool {
        self.block(sequence).is_some_and(|b| {
            let at = offset_of(sequence);
            b.member.get(at) && !b.acked.get(at)
        })
    }

    fn slot(&self, sequence: u64) -> Option<u32> {
        self.block(sequence)?.slots.as_ref()?[offset_of(sequence)].checked_sub(1)
    }

    /// Lets go of a block that has nothing left to deliver or to keep.
    fn release_if_done(&mut self, index: u64, topic: &mut TopicLog) {
        let open = index + 1 == topic.end_block();
        if !open {
            self.release_done(index, topic);
        }
    }

    fn release_done(&mut self, index: u64, topic: &mut TopicLog) {
        let at = index.wrapping_sub(self.first_block) as usize;
        let Some(Some(block)) = self.blocks.get(at) else { return };
        let kept = self.config.retain_acked && self.expire_from < (index + 1) * BLOCK;
        if block.unacked > 0 || block.leased > 0 || kept {
            return;
        }
        self.blocks[at] = None;
        topic.release(index);
        while matches!(self.blocks.front(), Some(None)) {
            self.blocks.pop_front();
            self.first_block += 1;
        }
    }

    /// Lets go of finished blocks, the one being filled included.
    pub fn reclaim(&mut self, topic: &mut TopicLog) {
        for index in self.first_block..self.first_block + self.blocks.len() as u64 {
            self.release_done(index, topic);
        }
    }

    // ---- append

    /// Takes in `count` messages from `first` on, except for the `filtered` ones (indexes, ascending).
    pub fn append(&mut self, topic: &mut TopicLog, first: u64, count: u64, filtered: &[u32], published_ms: u64) {
        if self.detached {
            return;
        }
        let arrived_acked = published_ms < self.floor_ms;
        let mut filtered = filtered.iter().copied().peekable();
        let mut index = u64::MAX;
        for at in 0..count {
            if filtered.next_if_eq(&(at as u32)).is_some() {
                continue;
            }
            let sequence = first + at;
            if block_of(sequence) != index {
                index = block_of(sequence);
                self.ensure_block(index, topic);
            }
            let length = u64::from(topic.entry(sequence).map_or(0, |e| e.location.length));
            if let Some(block) = self.block_mut(sequence) {
                block.member.set(offset_of(sequence));
                if arrived_acked {
                    block.acked.set(offset_of(sequence));
                    continue;
                }
                block.unacked += 1;
            }
            self.unacked += 1;
            self.unacked_bytes += length;
        }
    }

    // ---- time

    /// Carries out what is due: expired leases, ended backoffs, retention.
    pub fn advance(&mut self, topic: &mut TopicLog, now_ms: u64, fx: &mut Effects) {
        while let Some(due) = self.leases.due(now_ms) {
            for lease in due {
                self.expire(lease, fx);
            }
        }
        while let Some((at, sequence)) = self.delayed.first().copied().filter(|(at, _)| *at <= now_ms) {
            self.delayed.remove(&(at, sequence));
            self.make_ready(sequence, false);
            fx.available = true;
        }
        self.advance_keys(now_ms, fx);
        self.expire_messages(topic, now_ms, fx);
        while let Some((at, sequence)) = self.settled_order.front().copied() {
            if at + SETTLED_MS > now_ms && self.settled_order.len() <= MAX_SETTLED {
                break;
            }
            self.settled_order.pop_front();
            self.settled.remove(&sequence);
        }
        if self.dead_due_ms.is_some_and(|at| at <= now_ms) {
            self.dead_due_ms = None;
            fx.dead |= !self.dead.is_empty();
        }
    }

    /// When [`advance`](Self::advance) has something to do next.
    pub fn next_due_ms(&self, topic: &TopicLog) -> Option<u64> {
        let retention = self.next_expiry(topic).map(|(_, at)| at);
        let delayed = self.delayed.first().map(|(at, _)| *at);
        [self.leases.next_due_ms(), delayed, self.keys.next_due_ms(), retention, self.dead_due_ms].into_iter().flatten().min()
    }

    fn expire(&mut self, lease: Lease, fx: &mut Effects) {
        // An earlier expiry of the same span may have taken this lease back already.
        if self.slot(lease.sequence).is_some_and(|slot| *self.leases.get(slot) == lease) {
            self.take_lease(lease.sequence, fx);
            self.fail(lease, lease.deadline_at_ms, false, fx);
        }
    }

    /// The first message that retention has not looked at yet, and when it is due.
    fn next_expiry(&self, topic: &TopicLog) -> Option<(u64, u64)> {
        let mut from = self.expire_from.max(topic.first_block() * BLOCK);
        while from < topic.next_sequence() {
            match topic.entry(from) {
                Some(entry) => return Some((from, entry.published_ms + self.config.retention_ms)),
                None => from = (block_of(from) + 1) * BLOCK,
            }
        }
        None
    }

    fn expire_messages(&mut self, topic: &mut TopicLog, now_ms: u64, fx: &mut Effects) {
        while let Some((sequence, at)) = self.next_expiry(topic) {
            let crossed = block_of(sequence) != block_of(self.expire_from);
            let left = block_of(self.expire_from);
            self.expire_from = sequence;
            if crossed {
                self.release_if_done(left, topic);
            }
            if at > now_ms {
                return;
            }
            if self.is_unacked(sequence) {
                self.remove(sequence, topic, fx);
            }
            self.expire_from = sequence + 1;
            if offset_of(self.expire_from) == 0 {
                self.release_if_done(block_of(sequence), topic);
            }
        }
    }

    // ---- lease

    /// Picks messages for a session and leases them. The answer is empty when there is nothing for this session.
    pub fn lease(&mut self, topic: &mut TopicLog, budget: Budget, now_ms: u64, fx: &mut Effects) -> Vec<Picked> {
        if self.detached {
            return Vec::new();
        }
        let room = budget.max_inflight.saturating_sub(self.leases.len() as u64);
        let mut pick = Pick {
            lease: self.next_lease,
            budget,
            now_ms,
            left: (budget.max_messages as u64).min(room) as usize,
            bytes: 0,
            picked: Vec::new(),
        };
        self.lease_keys(topic, &mut pick, fx);
        // Redelivered and fresh messages take turns, so that a message that fails again and again doesn't starve the rest.
        let fresh_waits = self.has_fresh(topic);
        let share = match (fresh_waits, self.redelivered_last) {
            (false, _) => pick.left,
            (true, false) => pick.left.div_ceil(2),
            (true, true) => pick.left / 2,
        };
        self.redelivered_last = fresh_waits && !self.redelivered_last && !self.ready.is_empty() && share > 0;
        self.lease_ready(topic, &mut pick, share);
        self.lease_fresh(topic, &mut pick, fx);
        let rest = pick.left;
        self.lease_ready(topic, &mut pick, rest);
        if !pick.picked.is_empty() {
            self.next_lease += 1;
        }
        pick.picked
    }

    fn has_fresh(&self, topic: &TopicLog) -> bool {
        self.next_fresh(topic).is_some()
    }

    /// The first fresh message that is visible.
    fn next_fresh(&self, topic: &TopicLog) -> Option<u64> {
        let mut from = self.cursor.max(self.first_block * BLOCK);
        while from < topic.visible_end {
            let index = block_of(from);
            let at = (index - self.first_block) as usize;
            if at >= self.blocks.len() {
                return None;
            }
            if let Some(block) = &self.blocks[at]
                && block.unacked > 0
                && let Some(offset) = block.member.without(&block.acked).next(offset_of(from))
            {
                let sequence = index * BLOCK + offset as u64;
                return Some(sequence).filter(|s| *s < topic.visible_end);
            }
            from = (index + 1) * BLOCK;
        }
        None
    }

    fn lease_ready(&mut self, topic: &TopicLog, pick: &mut Pick, mut share: usize) {
        while share > 0 && pick.wants() {
            let Some((_, sequence)) = self.ready.pop_first() else { return };
            self.give(sequence, 0, topic, pick);
            share -= 1;
        }
    }

    fn lease_fresh(&mut self, topic: &TopicLog, pick: &mut Pick, fx: &mut Effects) {
        while pick.wants() {
            let Some(sequence) = self.next_fresh(topic) else {
                // Everything visible was looked at: go on behind it.
                self.cursor = self.cursor.max(topic.visible_end);
                return;
            };
            self.cursor = sequence + 1;
            let key = self.key_of(sequence, topic);
            if key == 0 {
                self.give(sequence, 0, topic, pick);
            } else {
                self.give_or_park(sequence, key, topic, pick, fx);
            }
        }
    }

    /// Leases one message to the session of `pick`.
    fn give(&mut self, sequence: u64, key: u64, topic: &TopicLog, pick: &mut Pick) {
        let Some(entry) = topic.entry(sequence).copied() else { return };
        let retry = self.retries.get_mut(&sequence).map(|r| {
            r.place = Place::Leased;
            (r.failures, r.counted)
        });
        let (failures, counted) = retry.unwrap_or((0, 0));
        let lease = Lease {
            sequence,
            lease: pick.lease,
            session: pick.budget.session,
            key,
            deadline_at_ms: pick.now_ms + pick.budget.deadline_ms,
            leased_at_ms: pick.now_ms,
            length: entry.location.length,
            attempt: failures + 1,
        };
        self.put_lease(lease);
        pick.left -= 1;
        pick.bytes += u64::from(entry.location.length);
        let delivery_attempt = if self.config.max_delivery_attempts.is_some() { counted + 1 } else { 0 };
        let token = LeaseToken { transaction: 0, sequence, lease: pick.lease, attempt: failures + 1 };
        pick.picked.push(Picked { token, delivery_attempt, location: entry.location });
    }

    fn put_lease(&mut self, lease: Lease) {
        let slot = self.leases.insert(lease);
        if let Some(block) = self.block_mut(lease.sequence) {
            block.leased += 1;
            block.slots.get_or_insert_with(|| Box::new([0; BLOCK as usize]))[offset_of(lease.sequence)] = slot + 1;
        }
    }

    /// Leases exactly these messages, wherever they are now: recovery repeats what the log says.
    pub fn lease_again(
        &mut self,
        topic: &mut TopicLog,
        sequences: &[u64],
        lease: u64,
        session: u64,
        deadline_at_ms: u64,
        now_ms: u64,
    ) {
        self.next_lease = self.next_lease.max(lease + 1);
        let mut fx = Effects::default();
        for &sequence in sequences {
            if !self.is_unacked(sequence) {
                continue;
            }
            while self.cursor <= sequence {
                let Some(next) = self.next_fresh(topic) else { break };
                self.cursor = next + 1;
                self.set_aside(next, topic);
            }
            self.cursor = self.cursor.max(sequence + 1);
            self.withdraw(sequence, topic, &mut fx);
            let key = self.key_of(sequence, topic);
            self.keys.start(key, session, sequence);
            let length = topic.entry(sequence).map_or(0, |e| e.location.length);
            let attempt = match self.retries.get_mut(&sequence) {
                Some(retry) => {
                    retry.place = Place::Leased;
                    retry.failures + 1
                }
                None => 1,
            };
            self.put_lease(Lease { sequence, lease, session, key, deadline_at_ms, leased_at_ms: now_ms, length, attempt });
        }
    }

    // ---- settle

    /// Removes one message for good. `now_ms` is only remembered.
    pub fn acknowledge(&mut self, topic: &mut TopicLog, token: LeaseToken, now_ms: u64, fx: &mut Effects) -> Acknowledged {
        let strict = self.config.exactly_once;
        let nothing = |outcome| Acknowledged { outcome, removed: false, remember: false };
        if token.lease < self.barrier || self.detached {
            return nothing(self.stale());
        }
        let sequence = token.sequence;
        if !self.is_unacked(sequence) {
            return nothing(if strict && !self.settled_by(token) { Outcome::Invalid } else { Outcome::Done });
        }
        if strict && self.current(token).is_none() {
            return nothing(Outcome::Invalid);
        }
        let remember = strict && token.attempt > 1;
        if remember {
            self.remember_settled(sequence, token.lease, now_ms);
        }
        self.remove(sequence, topic, fx);
        Acknowledged { outcome: Outcome::Done, removed: true, remember }
    }

    /// Whether an acknowledged message was acknowledged by this very delivery. A message that was delivered once needs no
    /// record: its only token is the one that settled it.
    fn settled_by(&self, token: LeaseToken) -> bool {
        match self.settled.get(&token.sequence) {
            Some(lease) => *lease == token.lease,
            None => token.attempt == 1,
        }
    }

    /// Removes messages without asking for a token.
    pub fn remove_all(&mut self, topic: &mut TopicLog, sequences: impl IntoIterator<Item = u64>, fx: &mut Effects) {
        for sequence in sequences {
            if self.is_unacked(sequence) {
                self.remove(sequence, topic, fx);
            }
        }
    }

    /// Remembers which lease acknowledged a message, as [`acknowledge`](Self::acknowledge) does.
    pub fn remember_settled(&mut self, sequence: u64, lease: u64, now_ms: u64) {
        self.settled.insert(sequence, lease);
        self.settled_order.push_back((now_ms, sequence));
    }

    /// Moves a lease's deadline and answers where to, or nothing when the lease is over.
    pub fn extend(&mut self, token: LeaseToken, deadline_at_ms: u64, max_life_ms: u64) -> Option<u64> {
        let slot = self.current(token)?;
        let bound = if max_life_ms == 0 { u64::MAX } else { self.leases.get(slot).leased_at_ms + max_life_ms };
        let deadline_at_ms = deadline_at_ms.min(bound);
        self.leases.set_deadline(slot, deadline_at_ms);
        Some(deadline_at_ms)
    }

    /// Gives a message back as a failed delivery; false when the lease is over.
    pub fn nack(&mut self, token: LeaseToken, bypass_backoff: bool, now_ms: u64, fx: &mut Effects) -> bool {
        let Some(slot) = self.current(token) else { return false };
        let lease = *self.leases.get(slot);
        self.take_lease(token.sequence, fx);
        self.fail(lease, now_ms, bypass_backoff, fx);
        true
    }

    /// Gives a message back as if it had not been delivered; false when the lease is over.
    pub fn release(&mut self, token: LeaseToken, fx: &mut Effects) -> bool {
        let Some(slot) = self.current(token) else { return false };
        let lease = *self.leases.get(slot);
        self.take_lease(token.sequence, fx);
        if lease.key == 0 {
            self.put_back(lease.sequence, 0, true, fx);
        } else {
            // Before the time of any deadline: nothing of the key counts as failed.
            self.bring_back(lease, 0, 0, fx);
            fx.available = true;
        }
        true
    }

    /// Makes a message wait for its next delivery without delay.
    fn put_back(&mut self, sequence: u64, key: u64, first: bool, fx: &mut Effects) {
        if key != 0 {
            self.set_place(sequence, Place::Line);
            self.keys.give_back(key, sequence);
            self.key_changed(key, fx);
        } else {
            self.make_ready(sequence, first);
        }
        fx.available = true;
    }

    /// The ordering key hash that governs a message's delivery; 0 when none does.
    fn key_of(&self, sequence: u64, topic: &TopicLog) -> u64 {
        if self.config.ordered { topic.key(sequence) } else { 0 }
    }

    fn current(&self, token: LeaseToken) -> Option<u32> {
        let slot = self.slot(token.sequence)?;
        (self.leases.get(slot).lease == token.lease).then_some(slot)
    }

    /// The outcome of settling a lease that is over.
    pub fn stale(&self) -> Outcome {
        if self.config.exactly_once { Outcome::Invalid } else { Outcome::Done }
    }

    /// Takes a message out of its lease, leaving it nowhere.
    fn take_lease(&mut self, sequence: u64, fx: &mut Effects) -> Option<Lease> {
        let slot = self.slot(sequence)?;
        let lease = self.leases.remove(slot);
        if let Some(block) = self.block_mut(sequence) {
            block.leased -= 1;
            if block.leased == 0 {
                block.slots = None;
            } else if let Some(slots) = &mut block.slots {
                slots[offset_of(sequence)] = 0;
            }
        }
        fx.credit(lease.session, u64::from(lease.length));
        Some(lease)
    }

    /// One delivery failed at `at_ms`: redeliver after the backoff, or give up.
    fn fail(&mut self, lease: Lease, at_ms: u64, bypass_backoff: bool, fx: &mut Effects) {
        let sequence = lease.sequence;
        let policy = self.config.max_delivery_attempts;
        let retry = self.retries.entry(sequence).or_insert(Retry { failures: 0, counted: 0, place: Place::Leased });
        retry.failures += 1;
        retry.counted += u32::from(policy.is_some());
        let failures = retry.failures;
        if policy.is_some_and(|max| retry.counted >= max) {
            retry.place = Place::Dead;
            self.dead.insert(sequence, Dead::default());
            self.key_settled(lease.key, sequence, fx);
            fx.dead = true;
            return;
        }
        let wait = self.config.retry.filter(|_| !bypass_backoff).map_or(0, |policy| policy.backoff_ms(failures));
        if lease.key != 0 {
            self.bring_back(lease, at_ms, at_ms + wait, fx);
        } else if wait == 0 {
            self.make_ready(sequence, false);
            fx.available = true;
        } else {
            self.set_place(sequence, Place::Delayed(at_ms + wait));
            self.delayed.insert((at_ms + wait, sequence));
        }
    }

    fn set_place(&mut self, sequence: u64, place: Place) {
        self.retries.entry(sequence).or_insert(Retry { failures: 0, counted: 0, place }).place = place;
    }

    fn make_ready(&mut self, sequence: u64, first: bool) {
        let order = if first {
            self.ready_front -= 1;
            self.ready_front
        } else {
            self.ready_back += 1;
            self.ready_back
        };
        self.ready.insert(order, sequence);
        self.set_place(sequence, Place::Ready(order));
    }

    /// Takes a message out of the place it waits in or is leased from, so that it can go elsewhere.
    fn withdraw(&mut self, sequence: u64, topic: &TopicLog, fx: &mut Effects) {
        if let Some(lease) = self.take_lease(sequence, fx) {
            self.key_settled(lease.key, sequence, fx);
        }
        match self.retries.get(&sequence).map(|r| r.place) {
            Some(Place::Ready(order)) => {
                self.ready.remove(&order);
            }
            Some(Place::Delayed(at)) => {
                self.delayed.remove(&(at, sequence));
            }
            Some(Place::Dead) => {
                self.dead.remove(&sequence);
            }
            Some(Place::Leased) => {}
            Some(Place::Line) | None if self.config.ordered => {
                let key = topic.key(sequence);
                if key != 0 && self.keys.withdraw(key, sequence) {
                    self.key_changed(key, fx);
                }
            }
            Some(Place::Line) | None => {}
        }
    }

    /// Takes a message out for good, wherever it is.
    fn remove(&mut self, sequence: u64, topic: &mut TopicLog, fx: &mut Effects) {
        self.withdraw(sequence, topic, fx);
        if !self.retries.is_empty() {
            self.retries.remove(&sequence);
        }
        let length = u64::from(topic.entry(sequence).map_or(0, |e| e.location.length));
        let Some(block) = self.block_mut(sequence) else { return };
        block.acked.set(offset_of(sequence));
        block.unacked -= 1;
        let done = block.unacked == 0;
        self.unacked -= 1;
        self.unacked_bytes = self.unacked_bytes.saturating_sub(length);
        if done {
            self.release_if_done(block_of(sequence), topic);
        }
    }

    /// Ends every delivery and forgets what was remembered of single messages.
    fn drop_deliveries(&mut self, fx: &mut Effects) {
        for lease in self.leases.iter() {
            fx.credits.push((lease.session, 1, u64::from(lease.length)));
        }
        self.leases = Leases::default();
        for block in self.blocks.iter_mut().flatten() {
            block.leased = 0;
            block.slots = None;
        }
        self.retries.clear();
        self.ready.clear();
        self.delayed.clear();
        self.dead.clear();
        self.settled.clear();
        self.settled_order.clear();
        self.keys = Keys::default();
    }

    // ---- dead letters

    /// Takes dead letters that nobody holds.
    pub fn take_dead(
        &mut self,
        topic: &TopicLog,
        max: usize,
        held_until_ms: u64,
        now_ms: u64,
    ) -> Vec<(LeaseToken, u32, Location)> {
        let mut taken = Vec::new();
        for (sequence, dead) in self.dead.iter_mut().filter(|(_, d)| d.held_until_ms <= now_ms).take(max) {
            let Some(entry) = topic.entry(*sequence) else { continue };
            let (failures, counted) = self.retries.get(sequence).map_or((0, 0), |r| (r.failures, r.counted));
            *dead = Dead { lease: self.next_lease, held_until_ms };
            self.dead_due_ms = Some(self.dead_due_ms.unwrap_or(u64::MAX).min(held_until_ms));
            self.next_lease += 1;
            let token = LeaseToken { transaction: 0, sequence: *sequence, lease: dead.lease, attempt: failures };
            taken.push((token, counted, entry.location));
        }
        taken
    }

    /// Which of these dead letters are still the caller's.
    pub fn held_dead(&self, tokens: &[LeaseToken]) -> Vec<u64> {
        let held = |t: &&LeaseToken| self.dead.get(&t.sequence).is_some_and(|d| d.lease == t.lease);
        tokens.iter().filter(held).map(|t| t.sequence).collect()
    }

    /// Puts dead letters back for another delivery.
    pub fn revive_dead(&mut self, topic: &TopicLog, sequences: impl IntoIterator<Item = u64>, fx: &mut Effects) {
        for sequence in sequences {
            if self.dead.remove(&sequence).is_some() {
                self.put_back(sequence, self.key_of(sequence, topic), false, fx);
            }
        }
    }

    // ---- reading

    /// Roughly how many messages a session could get now.
    pub fn available(&self, topic: &TopicLog) -> u64 {
        let fresh = topic.visible_end.saturating_sub(self.cursor).min(self.unacked);
        fresh + self.ready.len() as u64 + self.keys.free() as u64
    }

    pub fn stats(&self, topic: &TopicLog) -> QueueStats {
        let oldest = self.blocks.iter().enumerate().find_map(|(at, block)| {
            let block = block.as_ref().filter(|b| b.unacked > 0)?;
            let offset = block.member.without(&block.acked).next(0)?;
            topic.entry((self.first_block + at as u64) * BLOCK + offset as u64)
        });
        let retained: usize = self.blocks.iter().flatten().map(|b| b.member.and(&b.acked).count()).sum();
        QueueStats {
            undelivered_messages: self.unacked,
            backlog_bytes: self.unacked_bytes,
            oldest_unacked_ms: oldest.map(|e| e.published_ms),
            outstanding_messages: self.leases.len() as u64,
            delayed_messages: self.delayed.len() as u64,
            dead_letters: self.dead.len() as u64,
            retained_acked_messages: if self.config.retain_acked { retained as u64 } else { 0 },
        }
    }

    // ---- checkpoint

    pub fn store(self) -> StoredQueue {
        let settled = self.settled_order.iter().filter_map(|(at, s)| Some((*at, *s, *self.settled.get(s)?))).collect();
        StoredQueue {
            detached: self.detached,
            first_block: self.first_block,
            cursor: self.cursor,
            start: self.start,
            expire_from: self.expire_from,
            leases: self.leases.iter().copied().collect(),
            retries: self.retries.into_iter().collect(),
            ready: self.ready.into_values().collect(),
            delayed: self.delayed,
            dead: self.dead.into_keys().collect(),
            keys: self.keys,
            next_lease: self.next_lease,
            barrier: self.barrier,
            floor_ms: self.floor_ms,
            unacked: self.unacked,
            unacked_bytes: self.unacked_bytes,
            settled,
            blocks: self.blocks,
        }
    }

    /// The queue of a checkpoint; the topic's index already counts its holds.
    pub fn load(config: QueueConfig, mut stored: StoredQueue) -> Self {
        for block in stored.blocks.iter_mut().flatten() {
            block.leased = 0;
        }
        let mut queue = Self {
            config,
            detached: stored.detached,
            blocks: stored.blocks,
            first_block: stored.first_block,
            cursor: stored.cursor,
            start: stored.start,
            expire_from: stored.expire_from,
            leases: Leases::default(),
            retries: stored.retries.into_iter().collect(),
            ready: BTreeMap::new(),
            ready_front: 0,
            ready_back: 0,
            delayed: stored.delayed,
            dead_due_ms: (!stored.dead.is_empty()).then_some(0),
            dead: stored.dead.into_iter().map(|s| (s, Dead::default())).collect(),
            keys: stored.keys,
            next_lease: stored.next_lease,
            barrier: stored.barrier,
            floor_ms: stored.floor_ms,
            unacked: stored.unacked,
            unacked_bytes: stored.unacked_bytes,
            settled: stored.settled.iter().map(|(_, s, l)| (*s, *l)).collect(),
            settled_order: stored.settled.iter().map(|(at, s, _)| (*at, *s)).collect(),
            redelivered_last: false,
        };
        for lease in stored.leases {
            queue.put_lease(lease);
        }
        for sequence in stored.ready {
            queue.make_ready(sequence, false);
        }
        queue
    }
}

/// A lease call under way.
struct Pick {
    lease: u64,
    budget: Budget,
    now_ms: u64,
    left: usize,
    bytes: u64,
    picked: Vec<Picked>,
}

impl Pick {
    fn wants(&self) -> bool {
        self.left > 0 && (self.picked.is_empty() || self.bytes < self.budget.max_bytes)
    }
}
