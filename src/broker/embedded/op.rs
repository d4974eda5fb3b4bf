//! What the log records: each operation's outcome, compact, so that repeating the records rebuilds the state.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::bits::Bits;
use crate::broker::{Effect, Kind, SeekTarget};

/// One record of the log. Every variant carries the time it happened.
#[derive(Debug, Serialize, Deserialize)]
pub enum Op {
    /// Messages for a topic; their encodings are the record's bodies, in order.
    Append {
        now_ms: u64,
        topic: u64,
        /// Ids are consecutive from here.
        first_id: u64,
        /// Sequences too. Between two appends some may be left out, where a checkpoint closed a block early.
        first_sequence: u64,
        /// Ordering key hashes, one a message; empty when no message has a key.
        keys: Vec<u64>,
        /// Queues that leave out some of the messages: incarnation and indexes.
        filtered: Vec<(u64, Vec<u32>)>,
    },
    Change {
        now_ms: u64,
        kind: Kind,
        name: String,
        version: u64,
        body: Option<Arc<[u8]>>,
        effect: Effect,
    },
    Lease {
        now_ms: u64,
        queue: u64,
        lease: u64,
        session: u64,
        deadline_at_ms: u64,
        sequences: Ranges,
    },
    /// `settled`: the lease that acknowledged a redelivered message of an exactly-once queue.
    Acknowledge {
        now_ms: u64,
        queue: u64,
        sequences: Ranges,
        settled: Vec<(u64, u64)>,
    },
    Extend {
        now_ms: u64,
        queue: u64,
        leases: Vec<(u64, u64)>,
        deadline_at_ms: u64,
    },
    Nack {
        now_ms: u64,
        queue: u64,
        leases: Vec<(u64, u64)>,
        bypass_backoff: bool,
    },
    Release {
        now_ms: u64,
        queue: u64,
        leases: Vec<(u64, u64)>,
    },
    Seek {
        now_ms: u64,
        queue: u64,
        target: SeekTarget,
    },
    Revive {
        now_ms: u64,
        queue: u64,
        sequences: Ranges,
    },
    /// Messages of a topic that were written again, as the record's bodies, in order: by block, which ones. What else these
    /// blocks have in the segments is needed by nobody.
    Gather {
        now_ms: u64,
        topic: u64,
        segments: Vec<u32>,
        blocks: Vec<(u64, Bits)>,
    },
    /// The queue is in use, and nothing else tells so.
    Use {
        now_ms: u64,
        queue: u64,
    },
    /// The clock was set back, to this time.
    SetBack {
        now_ms: u64,
        by_ms: u64,
    },
}

/// Sequences, as (distance from the end of the range before, length).
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranges(Vec<(u64, u32)>);

impl Ranges {
    /// From sequences in any order; the answer is ascending and without repeats.
    pub fn new(mut sequences: Vec<u64>) -> Self {
        sequences.sort_unstable();
        sequences.dedup();
        let mut ranges: Vec<(u64, u32)> = Vec::new();
        let mut end = 0;
        for sequence in sequences {
            match ranges.last_mut() {
                Some(last) if sequence == end => last.1 += 1,
                _ => ranges.push((sequence - end, 1)),
            }
            end = sequence + 1;
        }
        Self(ranges)
    }

    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let mut end = 0u64;
        self.0.iter().flat_map(move |(gap, count)| {
            let start = end.saturating_add(*gap);
            end = start.saturating_add(u64::from(*count));
            start..end
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_keep_the_sequences() {
        let ranges = Ranges::new(vec![9, 3, 4, 5, 4, 100, 0]);
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [0, 3, 4, 5, 9, 100]);
        assert_eq!(ranges.0.len(), 4);
    }
}
