//! The leases of one queue: a slab, with a list for every span of deadlines so that expiry touches only what is due.

use std::collections::BTreeMap;

/// Deadlines are grouped in spans of this many milliseconds; a lease is noticed to be over at most this much late.
const SPAN_MS: u64 = 50;
const NONE: u32 = u32::MAX;
/// A slab up to this size is kept when it runs empty: 256 KiB, what a busy queue fills again at once.
const KEEP: usize = 4096;

/// One outstanding delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Lease {
    pub sequence: u64,
    /// The lease call that gave it; a later delivery of the message has a larger number.
    pub lease: u64,
    pub session: u64,
    /// Ordering key hash, 0 without one or on a queue without ordering.
    pub key: u64,
    pub deadline_at_ms: u64,
    pub leased_at_ms: u64,
    /// Encoded bytes of the message.
    pub length: u32,
    /// Which delivery this is, from 1.
    pub attempt: u32,
}

#[derive(Debug, Clone)]
struct Node {
    lease: Lease,
    previous: u32,
    next: u32,
}

/// All leases of a queue.
#[derive(Debug, Clone, Default)]
pub struct Leases {
    nodes: Vec<Node>,
    free: Vec<u32>,
    spans: BTreeMap<u64, u32>,
    count: usize,
}

fn span_of(deadline_at_ms: u64) -> u64 {
    deadline_at_ms.div_ceil(SPAN_MS)
}

impl Leases {
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn get(&self, slot: u32) -> &Lease {
        &self.nodes[slot as usize].lease
    }

    pub fn insert(&mut self, lease: Lease) -> u32 {
        let node = Node { lease, previous: NONE, next: NONE };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.nodes[slot as usize] = node;
                slot
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        };
        self.count += 1;
        self.link(slot);
        slot
    }

    pub fn remove(&mut self, slot: u32) -> Lease {
        self.unlink(slot);
        let lease = self.nodes[slot as usize].lease;
        self.free.push(slot);
        self.count -= 1;
        if self.count == 0 && self.nodes.len() > KEEP {
            // Give the memory of a burst back.
            self.nodes = Vec::new();
            self.free = Vec::new();
        }
        lease
    }

    pub fn set_deadline(&mut self, slot: u32, deadline_at_ms: u64) {
        let old = self.nodes[slot as usize].lease.deadline_at_ms;
        if span_of(old) == span_of(deadline_at_ms) {
            self.nodes[slot as usize].lease.deadline_at_ms = deadline_at_ms;
            return;
        }
        self.unlink(slot);
        self.nodes[slot as usize].lease.deadline_at_ms = deadline_at_ms;
        self.link(slot);
    }

    /// Moves every lease to an earlier time.
    pub fn set_back(&mut self, by_ms: u64) {
        let mut slots = Vec::with_capacity(self.count);
        for head in self.spans.values() {
            let mut at = *head;
            while at != NONE {
                slots.push(at);
                at = self.nodes[at as usize].next;
            }
        }
        for slot in slots {
            let lease = &mut self.nodes[slot as usize].lease;
            lease.leased_at_ms = lease.leased_at_ms.saturating_sub(by_ms);
            let deadline_at_ms = lease.deadline_at_ms.saturating_sub(by_ms);
            self.set_deadline(slot, deadline_at_ms);
        }
    }

    /// The time at which the first leases are certainly over.
    pub fn next_due_ms(&self) -> Option<u64> {
        self.spans.keys().next().map(|span| span * SPAN_MS)
    }

    /// The leases of the earliest span if all of it is over at `now_ms`, ordered by deadline, then sequence.
    pub fn due(&self, now_ms: u64) -> Option<Vec<Lease>> {
        let (span, head) = self.spans.iter().next()?;
        if span * SPAN_MS > now_ms {
            return None;
        }
        let mut due = Vec::new();
        let mut at = *head;
        while at != NONE {
            due.push(*self.get(at));
            at = self.nodes[at as usize].next;
        }
        due.sort_by_key(|lease| (lease.deadline_at_ms, lease.sequence));
        Some(due)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.spans.values().flat_map(move |head| {
            let mut at = *head;
            std::iter::from_fn(move || {
                let node = self.nodes.get(at as usize)?;
                at = node.next;
                Some(&node.lease)
            })
        })
    }

    fn link(&mut self, slot: u32) {
        let span = span_of(self.get(slot).deadline_at_ms);
        let head = self.spans.insert(span, slot).unwrap_or(NONE);
        self.nodes[slot as usize].next = head;
        self.nodes[slot as usize].previous = NONE;
        if head != NONE {
            self.nodes[head as usize].previous = slot;
        }
    }

    fn unlink(&mut self, slot: u32) {
        let Node { lease, previous, next } = self.nodes[slot as usize].clone();
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        if previous != NONE {
            self.nodes[previous as usize].next = next;
        } else if next != NONE {
            self.spans.insert(span_of(lease.deadline_at_ms), next);
        } else {
            self.spans.remove(&span_of(lease.deadline_at_ms));
        }
    }
}
