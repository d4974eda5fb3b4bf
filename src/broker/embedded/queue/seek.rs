//! Moving a queue to another point of its retained messages, and snapshots.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Effects, Queue};
use crate::broker::embedded::{
    bits::{BLOCK, Bits, block_of, offset_of},
    topic_log::{Block, TopicLog},
};

/// A copy of a queue's unacknowledged messages. It holds those, and every message its topic gets afterwards.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SnapshotState {
    /// Incarnation of the topic.
    pub topic: u64,
    /// The topic's next sequence when the snapshot was taken.
    end: u64,
    /// First block held as a whole.
    from_block: u64,
    unacked: BTreeMap<u64, Bits>,
}

impl SnapshotState {
    /// Lets go of everything the snapshot holds.
    pub fn release(self, topic: &mut TopicLog) {
        for block in self.unacked.into_keys().filter(|b| *b < self.from_block) {
            topic.release(block);
        }
        topic.snapshot_release(self.from_block);
    }

    /// What of a block the snapshot counts as unacknowledged.
    pub fn wanted(&self, index: u64) -> Bits {
        let before = self.unacked.get(&index).copied().unwrap_or_default();
        let tail = block_of(self.end);
        let after = match index.cmp(&tail) {
            std::cmp::Ordering::Less => Bits::default(),
            std::cmp::Ordering::Equal => Bits::first(BLOCK as usize).without(&Bits::first(offset_of(self.end))),
            std::cmp::Ordering::Greater => Bits::first(BLOCK as usize),
        };
        before.or(&after)
    }
}

impl Queue {
    pub fn snapshot(&self, incarnation: u64, topic: &mut TopicLog) -> SnapshotState {
        let mut unacked = BTreeMap::new();
        for (at, block) in self.blocks.iter().enumerate() {
            if let Some(block) = block.as_ref().filter(|b| b.unacked > 0) {
                unacked.insert(self.first_block + at as u64, block.member.without(&block.acked));
            }
        }
        let end = topic.next_sequence();
        let from_block = topic.snapshot_from();
        for block in unacked.keys().filter(|b| **b < from_block) {
            topic.hold(*block);
        }
        SnapshotState { topic: incarnation, end, from_block, unacked }
    }

    /// Messages published before `time_ms` become acknowledged, retained ones from then on unacknowledged.
    pub fn seek_time(&mut self, topic: &mut TopicLog, time_ms: u64, now_ms: u64, fx: &mut Effects) {
        let (retain, retention) = (self.config.retain_acked, self.config.retention_ms);
        let topic_retention = topic.retention_ms;
        self.reposition(topic, fx, |_, block, member, acked, potential| {
            let mut wanted = Bits::default();
            for (at, entry) in block.entries.iter().enumerate().filter(|(_, e)| e.published_ms >= time_ms) {
                let unacked = member.get(at) && !acked.get(at);
                let kept = retain && member.get(at) && entry.published_ms + retention > now_ms;
                let in_topic = topic_retention.is_some_and(|r| entry.published_ms + r > now_ms);
                if unacked || kept || (in_topic && potential.get(at)) {
                    wanted.set(at);
                }
            }
            wanted
        });
        self.floor_ms = if time_ms > now_ms { time_ms } else { 0 };
    }

    /// The queue becomes what the snapshot holds.
    pub fn seek_snapshot(&mut self, topic: &mut TopicLog, snapshot: &SnapshotState, fx: &mut Effects) {
        self.reposition(topic, fx, |index, _, _, _, potential| snapshot.wanted(index).and(potential));
        self.floor_ms = 0;
    }

    /// Ends all deliveries and sets anew which messages are unacknowledged. `wanted` gets the block's index, its entries,
    /// the queue's member and acked bits and the messages that could belong to the queue: its members, and where nothing is
    /// known of a message (from before the queue, or already forgotten) any. The filter is applied to those on delivery.
    fn reposition(&mut self, topic: &mut TopicLog, fx: &mut Effects, wanted: impl Fn(u64, &Block, &Bits, &Bits, &Bits) -> Bits) {
        self.drop_deliveries(fx);
        self.barrier = self.next_lease;
        self.unacked = 0;
        self.unacked_bytes = 0;
        let first = topic.first_block();
        for index in first..topic.end_block() {
            let Some(entries) = topic.block(index).cloned() else { continue };
            let all = entries.there();
            let known = index.checked_sub(self.first_block).and_then(|at| self.blocks.get(at as usize)?.as_deref());
            let (member, acked) = known.map_or_else(Default::default, |b| (b.member, b.acked));
            let potential = match known {
                Some(_) => member.or(&Bits::first(self.start.saturating_sub(index * BLOCK).min(BLOCK) as usize)).and(&all),
                None => all,
            };
            let wanted = wanted(index, &entries, &member, &acked, &potential).and(&all);
            if known.is_none() && wanted.is_empty() {
                continue;
            }
            let unacked = wanted.count();
            self.unacked += unacked as u64;
            self.unacked_bytes += wanted.iter().map(|at| u64::from(entries.entries[at].location.length)).sum::<u64>();
            let block = self.ensure_block(index, topic);
            block.member = member.or(&wanted);
            block.acked = block.member.without(&wanted);
            block.unacked = unacked as u32;
        }
        self.cursor = first * BLOCK;
        self.expire_from = self.cursor;
        for index in first..topic.end_block() {
            self.release_if_done(index, topic);
        }
        fx.available = true;
    }
}
