//! Looking at a queue's messages without touching them.

use super::{Place, Queue};
use crate::broker::{
    Standing,
    embedded::{
        bits::{BLOCK, block_of, offset_of},
        log::Location,
        topic_log::TopicLog,
    },
};

/// A message as it lies in its queue.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    pub sequence: u64,
    pub standing: Standing,
    /// Deliveries that failed.
    pub failures: u32,
    pub location: Location,
}

impl Queue {
    /// The first unacknowledged messages from a sequence on, up to a number and to a sum of bytes, and the sequence after
    /// the last that was looked at if there may be more.
    pub fn peek(&self, topic: &TopicLog, from: u64, max_messages: usize, max_bytes: u64) -> (Vec<Seen>, Option<u64>) {
        let (mut seen, mut bytes) = (Vec::new(), 0);
        let mut at = from.max(self.first_block * BLOCK);
        while let Some(sequence) = self.next_unacked(at, topic) {
            if seen.len() >= max_messages || (!seen.is_empty() && bytes >= max_bytes) {
                return (seen, Some(sequence));
            }
            at = sequence + 1;
            let Some(entry) = topic.entry(sequence) else { continue };
            bytes += u64::from(entry.location.length);
            let retry = self.retries.get(&sequence);
            let standing = self.standing(sequence, retry.map(|retry| retry.place), topic);
            let failures = retry.map_or(0, |retry| retry.failures);
            seen.push(Seen { sequence, standing, failures, location: entry.location });
        }
        (seen, None)
    }

    fn standing(&self, sequence: u64, place: Option<Place>, topic: &TopicLog) -> Standing {
        if let Some(slot) = self.slot(sequence) {
            return Standing::Leased { deadline_at_ms: self.leases.get(slot).deadline_at_ms };
        }
        match place {
            Some(Place::Delayed(until_ms)) => Standing::Delayed { until_ms },
            Some(Place::Dead) => Standing::Dead,
            Some(Place::Line) => Standing::InLine,
            // What the cursor passed and nothing else is known of waits for its ordering key.
            None if sequence < self.cursor && self.key_of(sequence, topic) != 0 => Standing::InLine,
            _ => Standing::Waiting,
        }
    }

    /// The first unacknowledged message that is visible, from a sequence on.
    fn next_unacked(&self, mut from: u64, topic: &TopicLog) -> Option<u64> {
        while from < topic.visible_end {
            let index = block_of(from);
            let block = self.blocks.get(index.checked_sub(self.first_block)? as usize)?;
            if let Some(block) = block
                && block.unacked > 0
                && let Some(offset) = block.member.without(&block.acked).next(offset_of(from))
            {
                return Some(index * BLOCK + offset as u64).filter(|sequence| *sequence < topic.visible_end);
            }
            from = (index + 1) * BLOCK;
        }
        None
    }
}
