//! A queue in a checkpoint.

use super::{Dead, Keys, Lease, Leases, Queue, QueueBlock, Retry};
use crate::broker::QueueConfig;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

impl Queue {
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
            active_ms: self.active_ms,
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
            active_ms: stored.active_ms,
            use_logged_ms: 0,
            settled: stored.settled.iter().map(|(_, s, l)| (*s, *l)).collect(),
            settled_order: stored.settled.iter().map(|(at, s, _)| (*at, *s)).collect(),
            expired_leases: 0,
            counts_from_ms: 0,
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
    active_ms: u64,
    settled: Vec<(u64, u64, u64)>,
}
