//! One subscription's queue: a deterministic state machine over its topic's index. Time is an argument, nothing waits and
//! nothing is read or written here, so the same code serves live calls, recovery from the log and the property tests.
//!
//! A message of the queue is in exactly one place: acknowledged; fresh (not looked at yet, at or after `cursor`); leased;
//! ready or delayed for redelivery; parked in the line of its ordering key; or dead, waiting to be forwarded.

mod dead;
mod due;
mod leasing;
mod ordering;
mod peek;
mod seek;
mod settling;
mod stored;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{
    bits::{BLOCK, Bits, block_of, offset_of},
    leases::{Lease, Leases},
    log::Location,
    topic_log::TopicLog,
};
use crate::broker::{LeaseToken, Outcome, QueueConfig, QueueStats};
use leasing::Pick;
use ordering::Keys;
pub use peek::Seen;
pub use seek::SnapshotState;
pub use stored::StoredQueue;

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
    /// When the queue was last used.
    pub active_ms: u64,
    /// When a record of the log last told so; 0 when none of this process has.
    use_logged_ms: u64,
    settled: HashMap<u64, u64>,
    settled_order: VecDeque<(u64, u64)>,
    /// Leases that ran out since the store was opened.
    expired_leases: u64,
    counts_from_ms: u64,
    /// The last lease call began with a redelivered message, so the next begins with a fresh one.
    redelivered_last: bool,
}

/// Subscriptions live on for a day after their last use at least; an hour of it may be forgotten.
const USE_LOGGED_MS: u64 = 3_600_000;

impl Queue {
    /// Whether a record is due that tells of the queue's use; true once for each time it is.
    pub fn is_use_to_log(&mut self, now_ms: u64) -> bool {
        let due = now_ms.saturating_sub(self.use_logged_ms) >= USE_LOGGED_MS;
        if due {
            self.use_logged_ms = now_ms;
        }
        due
    }

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
            active_ms: 0,
            use_logged_ms: 0,
            settled: HashMap::new(),
            settled_order: VecDeque::new(),
            expired_leases: 0,
            counts_from_ms: 0,
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

    // ---- reading

    /// What of a block the queue may still deliver: its unacknowledged messages, and acknowledged ones it retains.
    pub fn needed(&self, index: u64) -> Bits {
        let block = index.checked_sub(self.first_block).and_then(|at| self.blocks.get(at as usize)?.as_deref());
        block.map_or_else(Bits::default, |b| if self.config.retain_acked { b.member } else { b.member.without(&b.acked) })
    }

    /// Roughly how many messages a session could get now.
    pub fn available(&self, topic: &TopicLog) -> u64 {
        let fresh = topic.visible_end.saturating_sub(self.cursor).min(self.unacked);
        fresh + self.ready.len() as u64 + self.keys.free() as u64
    }

    /// Leases that ran out before this time are not counted.
    pub fn count_from(&mut self, now_ms: u64) {
        (self.expired_leases, self.counts_from_ms) = (0, now_ms);
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
            expired_leases: Some(self.expired_leases),
            last_active_ms: self.active_ms,
            retained_acked_messages: if self.config.retain_acked { retained as u64 } else { 0 },
        }
    }
}
