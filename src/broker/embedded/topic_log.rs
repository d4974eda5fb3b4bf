//! The index of a topic's stored messages: where each one lies, shared by all queues and snapshots of the topic.
//!
//! A message is stored once however many queues take it. The index is cut into blocks of [`BLOCK`] sequences; a block goes
//! when nobody holds it any more: no queue with messages in it, no snapshot, no topic retention.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    bits::{BLOCK, Bits, block_of, offset_of},
    log::Location,
};

/// One stored message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub published_ms: u64,
    pub location: Location,
}

/// The messages of up to [`BLOCK`] consecutive sequences.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Block {
    pub entries: Vec<Entry>,
    /// Ordering key hashes, one an entry; empty while no message of the block has a key.
    pub keys: Vec<u64>,
}

impl Entry {
    /// False once the message was left behind in a segment that had to go, because nobody needed it.
    pub fn is_there(&self) -> bool {
        self.location.segment != NOWHERE
    }
}

/// No segment has this number.
const NOWHERE: u32 = u32::MAX;

impl Block {
    /// The messages that can still be read.
    pub fn there(&self) -> Bits {
        let mut there = Bits::first(self.entries.len());
        for (at, _) in self.entries.iter().enumerate().filter(|(_, e)| !e.is_there()) {
            there.clear(at);
        }
        there
    }

    fn push(&mut self, entry: Entry, key: u64) {
        if key != 0 && self.keys.is_empty() {
            self.keys.resize(self.entries.len(), 0);
        }
        if key != 0 || !self.keys.is_empty() {
            self.keys.push(key);
        }
        self.entries.push(entry);
    }

    /// Publish time of the newest message.
    pub fn last_published_ms(&self) -> u64 {
        self.entries.last().map_or(0, |e| e.published_ms)
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Slot {
    block: Arc<Block>,
    /// Queues, snapshots and the topic's own retention that still need the block.
    holders: u32,
}

/// A topic's index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TopicLog {
    /// `project/id`.
    pub channel: Arc<str>,
    pub retention_ms: Option<u64>,
    /// The topic was deleted; the log serves the queues that are left.
    pub closed: bool,
    /// Attached queues: full subscription name to incarnation.
    pub attached: BTreeMap<String, u64>,
    pub route_version: u64,
    /// Queues, detached ones included, and snapshots that refer to this log.
    pub references: u32,
    /// Snapshots alive; each holds every block opened after it was taken.
    pub snapshots: u32,
    /// Sequences below are durable and may be delivered.
    pub visible_end: u64,
    slots: VecDeque<Option<Slot>>,
    first_block: u64,
    next_sequence: u64,
    /// First block the topic's own retention still holds.
    retained_from: u64,
    /// Publish time of the newest message as its subscribers see it; 0 when this process has seen none.
    #[serde(skip)]
    sealed_ms: u64,
}

impl TopicLog {
    pub fn new(channel: Arc<str>, retention_ms: Option<u64>) -> Self {
        Self {
            channel,
            retention_ms,
            closed: false,
            attached: BTreeMap::new(),
            route_version: 1,
            references: 0,
            snapshots: 0,
            visible_end: 0,
            slots: VecDeque::new(),
            first_block: 0,
            next_sequence: 0,
            retained_from: 0,
            sealed_ms: 0,
        }
    }

    /// Publish time of the newest message that is there.
    pub fn last_published_ms(&self) -> u64 {
        self.slots.back().and_then(Option::as_ref).map_or(0, |slot| slot.block.last_published_ms())
    }

    /// No message that comes now may say that it was published before this time.
    pub fn earliest_publish_ms(&self) -> u64 {
        if self.sealed_ms == 0 { self.last_published_ms() } else { self.sealed_ms }
    }

    /// The newest message says that it was published then.
    pub fn sealed(&mut self, publish_time_ms: u64) {
        self.sealed_ms = publish_time_ms;
    }

    /// The sequence the next message gets.
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// The oldest block that may still be there.
    pub fn first_block(&self) -> u64 {
        self.first_block
    }

    /// One past the newest block.
    pub fn end_block(&self) -> u64 {
        self.first_block + self.slots.len() as u64
    }

    /// Whether anyone would ever read a message appended now.
    pub fn is_wanted(&self) -> bool {
        !self.attached.is_empty() || self.base_holders() > 0
    }

    fn base_holders(&self) -> u32 {
        self.snapshots + u32::from(self.retention_ms.is_some())
    }

    /// Adds one message and answers its sequence.
    pub fn push(&mut self, entry: Entry, key: u64) -> u64 {
        let sequence = self.next_sequence;
        if offset_of(sequence) == 0 || self.slots.is_empty() {
            self.open_block(block_of(sequence));
        }
        if let Some(Some(slot)) = self.slots.back_mut() {
            Arc::make_mut(&mut slot.block).push(entry, key);
        }
        self.next_sequence += 1;
        sequence
    }

    fn open_block(&mut self, index: u64) {
        if self.slots.is_empty() {
            self.first_block = index;
            self.retained_from = self.retained_from.max(index);
        }
        while self.end_block() < index {
            self.slots.push_back(None);
        }
        let previous = self.end_block();
        let holders = self.base_holders();
        self.slots.push_back(Some(Slot { block: Arc::default(), holders }));
        if previous > self.first_block {
            self.free_if_unheld(previous - 1);
        }
    }

    fn slot(&self, block: u64) -> Option<&Slot> {
        let at = block.checked_sub(self.first_block)?;
        self.slots.get(at as usize)?.as_ref()
    }

    pub fn block(&self, block: u64) -> Option<&Arc<Block>> {
        self.slot(block).map(|s| &s.block)
    }

    pub fn entry(&self, sequence: u64) -> Option<&Entry> {
        self.block(block_of(sequence))?.entries.get(offset_of(sequence))
    }

    /// The ordering key hash of a message, 0 without one.
    pub fn key(&self, sequence: u64) -> u64 {
        self.block(block_of(sequence)).and_then(|b| b.keys.get(offset_of(sequence))).copied().unwrap_or(0)
    }

    /// Messages the index still has, for the list of used segments.
    pub fn live_blocks(&self) -> impl Iterator<Item = &Arc<Block>> {
        self.slots.iter().flatten().map(|s| &s.block)
    }

    /// Notes the new places of the `moved` messages of a block, and that its others in `segments` are gone.
    pub fn relocate(&mut self, index: u64, segments: &[u32], moved: &Bits, places: &mut impl Iterator<Item = Location>) {
        let at = index.wrapping_sub(self.first_block) as usize;
        let Some(Some(slot)) = self.slots.get_mut(at) else {
            places.take(moved.count()).for_each(drop);
            return;
        };
        for (at, entry) in Arc::make_mut(&mut slot.block).entries.iter_mut().enumerate() {
            if moved.get(at) {
                entry.location = places.next().unwrap_or(entry.location);
            } else if segments.contains(&entry.location.segment) {
                entry.location.segment = NOWHERE;
            }
        }
    }

    /// Lets the next message begin at `sequence`, the first of a block, as [`reclaim`](Self::reclaim) did in an earlier run.
    pub fn skip_to(&mut self, sequence: u64) {
        if sequence > self.next_sequence {
            self.next_sequence = sequence;
            self.visible_end = self.visible_end.max(sequence);
            if self.slots.is_empty() {
                self.first_block = block_of(sequence);
            }
        }
    }

    /// Somebody new needs the block.
    pub fn hold(&mut self, block: u64) {
        let at = block.wrapping_sub(self.first_block) as usize;
        if let Some(Some(slot)) = self.slots.get_mut(at) {
            slot.holders += 1;
        }
    }

    /// Somebody no longer needs the block.
    pub fn release(&mut self, block: u64) {
        let at = block.wrapping_sub(self.first_block) as usize;
        if let Some(Some(slot)) = self.slots.get_mut(at) {
            slot.holders = slot.holders.saturating_sub(1);
            self.free_if_unheld(block);
        }
    }

    fn free_if_unheld(&mut self, block: u64) {
        if block + 1 == self.end_block() {
            return; // still filling: see `reclaim`
        }
        let at = block.wrapping_sub(self.first_block) as usize;
        if let Some(slot) = self.slots.get_mut(at)
            && slot.as_ref().is_some_and(|s| s.holders == 0)
        {
            *slot = None;
        }
        self.pop_front();
    }

    fn pop_front(&mut self) {
        while matches!(self.slots.front(), Some(None)) {
            self.slots.pop_front();
            self.first_block += 1;
        }
    }

    /// Starts a snapshot: it holds the block being filled and every later one. Answers the first of them.
    pub fn snapshot_from(&mut self) -> u64 {
        let tail = block_of(self.next_sequence);
        self.snapshots += 1;
        self.references += 1;
        self.hold(tail);
        tail
    }

    /// Ends a snapshot's hold on `from` and everything after.
    pub fn snapshot_release(&mut self, from: u64) {
        self.snapshots = self.snapshots.saturating_sub(1);
        self.references = self.references.saturating_sub(1);
        for block in from.max(self.first_block)..self.end_block() {
            self.release(block);
        }
    }

    /// Changes the topic's own retention.
    pub fn set_retention(&mut self, retention_ms: Option<u64>) {
        match (self.retention_ms.is_some(), retention_ms.is_some()) {
            (false, true) => {
                self.retained_from = self.first_block;
                for block in self.first_block..self.end_block() {
                    self.hold(block);
                }
            }
            (true, false) => {
                let from = self.retained_from.max(self.first_block);
                self.retention_ms = None;
                for block in from..self.end_block() {
                    self.release(block);
                }
            }
            _ => {}
        }
        self.retention_ms = retention_ms;
    }

    /// Lets go of blocks beyond the topic's retention. Answers when there is more to let go.
    pub fn advance(&mut self, now_ms: u64) -> Option<u64> {
        let retention = self.retention_ms?;
        self.retained_from = self.retained_from.max(self.first_block);
        while self.retained_from < self.end_block() {
            let last = self.block(self.retained_from).map_or(0, |b| b.last_published_ms());
            let tail = self.retained_from + 1 == self.end_block();
            if last + retention > now_ms || tail {
                return Some((last + retention).max(now_ms + 1)).filter(|_| !tail);
            }
            self.retained_from += 1;
            self.release(self.retained_from - 1);
        }
        None
    }

    /// Frees the block being filled once nobody needs what is in it, so that an idle topic keeps nothing. The next message
    /// then opens the following block.
    pub fn reclaim(&mut self, now_ms: u64) {
        let Some(Some(tail)) = self.slots.back() else { return };
        let own = u32::from(self.retention_ms.is_some_and(|r| tail.block.last_published_ms() + r <= now_ms));
        if tail.block.entries.is_empty() || self.snapshots > 0 || self.visible_end < self.next_sequence || tail.holders > own {
            return;
        }
        let index = self.end_block() - 1;
        self.next_sequence = (index + 1) * BLOCK;
        self.visible_end = self.next_sequence;
        if let Some(slot) = self.slots.back_mut() {
            *slot = None;
        }
        self.retained_from = self.retained_from.max(index + 1);
        self.pop_front();
        if self.slots.is_empty() {
            self.first_block = index + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(published_ms: u64) -> Entry {
        Entry { published_ms, location: Location { segment: 0, offset: 0, length: 10 } }
    }

    #[test]
    fn a_block_goes_when_its_last_holder_does() {
        let mut log = TopicLog::new("p/t".into(), None);
        for n in 0..BLOCK {
            log.push(entry(n), 0);
        }
        log.hold(0);
        log.push(entry(5000), 7);
        assert!(log.entry(3).is_some());
        log.release(0);
        assert!(log.entry(3).is_none());
        assert_eq!(log.first_block(), 1);
        assert_eq!(log.key(BLOCK), 7);
    }

    #[test]
    fn retention_holds_messages_for_their_time() {
        let mut log = TopicLog::new("p/t".into(), Some(1000));
        for n in 0..BLOCK + 1 {
            log.push(entry(n), 0);
        }
        log.visible_end = log.next_sequence();
        assert_eq!(log.advance(2022), Some(2023));
        assert!(log.entry(0).is_some());
        log.advance(2023);
        assert!(log.entry(0).is_none());
        assert!(log.entry(BLOCK).is_some());
        log.reclaim(2023);
        assert!(log.entry(BLOCK).is_some());
        log.reclaim(2024);
        assert!(log.entry(BLOCK).is_none());
        assert_eq!(log.next_sequence(), 2 * BLOCK);
    }

    #[test]
    fn a_snapshot_holds_what_comes_after_it() {
        let mut log = TopicLog::new("p/t".into(), None);
        log.push(entry(0), 0);
        let from = log.snapshot_from();
        for n in 0..2 * BLOCK {
            log.push(entry(n), 0);
        }
        assert!(log.entry(0).is_some() && log.entry(BLOCK).is_some());
        log.snapshot_release(from);
        assert!(log.entry(0).is_none() && log.entry(BLOCK).is_none());
    }
}
