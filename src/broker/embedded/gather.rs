//! Making room: a segment of the log that a few old messages keep alive is emptied by writing those messages again at the
//! log's end. Without it one message that nobody acknowledges would hold 64 MiB for as long as its retention lasts.
//!
//! A round has a survey, block by block so that the lock is never held for long, and then moves. Whether a message is still
//! needed is asked again under the lock that moves it. The emptied segments go with the next checkpoint, seconds later, when
//! calls that had picked a message at its old place are over.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use bytes::Bytes;

use super::{
    Shared,
    bits::Bits,
    encode,
    log::{AppendKind, Location},
    op::Op,
    topic_log::Block,
};
use crate::broker::BrokerError;

/// A segment is emptied while at most one in this many of its bytes is needed.
const SPARSE: u64 = 4;
/// Bytes moved in a round, so that other writers hardly notice it.
const ROUND_BYTES: u64 = 32 << 20;
/// The same while the disk is full: they come out of what is reserved for acknowledgements.
const ROUND_BYTES_SHORT: u64 = 4 << 20;
/// Bytes moved under one hold of the lock, unless one message is larger.
const RECORD_BYTES: u64 = 1 << 20;
/// Blocks looked at under one hold of the lock.
const SURVEY_BLOCKS: u64 = 64;

/// A block of a topic's index, and which of its messages are needed.
struct Found {
    topic: u64,
    index: u64,
    block: Arc<Block>,
    needed: Bits,
}

impl Found {
    fn places(&self) -> impl Iterator<Item = (usize, Location)> + '_ {
        self.block.entries.iter().enumerate().filter(|(_, e)| e.is_there()).map(|(at, e)| (at, e.location))
    }
}

/// Empties sparse segments. The next checkpoint lets go of them.
///
/// # Errors
/// What the log answers; what was moved until then stays moved.
pub(super) fn gather(shared: &Shared) -> Result<(), BrokerError> {
    let budget = if shared.log.short_of_space() { ROUND_BYTES_SHORT } else { ROUND_BYTES };
    // What is moved of one block goes into one record, and that has to fit into a segment.
    let segment_bytes = u64::from(shared.log.segment_bytes());
    gather_where(shared, segment_bytes / SPARSE, budget.min(segment_bytes / 2))
}

/// The same for segments of at most `sparse` needed bytes, moving at most `budget` bytes.
pub(super) fn gather_where(shared: &Shared, sparse: u64, budget: u64) -> Result<(), BrokerError> {
    // Later segments are still being filled.
    let current = shared.log.current_segment();
    let found = survey(shared);
    let segments = choose(&found, current, sparse, budget);
    let mut batch = Batch::default();
    for found in found.iter().filter(|f| f.places().any(|(_, place)| segments.contains(&place.segment))) {
        let mut moved = Bits::default();
        let places = found.places().filter(|(at, place)| segments.contains(&place.segment) && found.needed.get(*at));
        for (at, place) in places {
            moved.set(at);
            batch.places.push(place);
            batch.bytes += u64::from(place.length);
        }
        batch.blocks.push((found.topic, found.index, moved));
        if batch.bytes >= RECORD_BYTES {
            std::mem::take(&mut batch).apply(shared, &segments)?;
        }
    }
    batch.apply(shared, &segments)
}

fn survey(shared: &Shared) -> Vec<Found> {
    let topics: Vec<u64> = shared.state.lock().topics.keys().copied().collect();
    let mut found = Vec::new();
    for topic in topics {
        let mut next = 0;
        loop {
            let state = shared.state.lock();
            let Some(log) = state.topics.get(&topic) else { break };
            let (from, end) = (log.first_block().max(next), log.end_block());
            next = end.min(from + SURVEY_BLOCKS);
            for index in from..next {
                if let Some(block) = log.block(index).cloned() {
                    found.push(Found { topic, index, block, needed: state.needed(topic, index) });
                }
            }
            if next >= end {
                break;
            }
        }
    }
    found
}

/// The segments to empty, those with the least to move first.
fn choose(found: &[Found], current: u32, sparse: u64, budget: u64) -> BTreeSet<u32> {
    let mut live: HashMap<u32, u64> = HashMap::new();
    for found in found {
        for (at, place) in found.places() {
            *live.entry(place.segment).or_default() += if found.needed.get(at) { u64::from(place.length) } else { 0 };
        }
    }
    let mut candidates: Vec<(u64, u32)> = live.into_iter().map(|(segment, bytes)| (bytes, segment)).collect();
    candidates.retain(|(bytes, segment)| *segment < current && *bytes <= sparse);
    candidates.sort_unstable();
    let mut left = budget;
    let fits = candidates.into_iter().take_while(|(bytes, _)| {
        let fits = *bytes <= left;
        left = left.saturating_sub(*bytes);
        fits
    });
    fits.map(|(_, segment)| segment).collect()
}

/// Messages that are moved together: blocks by topic and index, and where the messages to move lie, in the same order.
#[derive(Default)]
struct Batch {
    blocks: Vec<(u64, u64, Bits)>,
    places: Vec<Location>,
    bytes: u64,
}

/// Messages of one block, and what they are.
struct Moved<'a> {
    index: u64,
    moved: Bits,
    own: Vec<&'a Bytes>,
}

impl Batch {
    fn apply(self, shared: &Shared, segments: &BTreeSet<u32>) -> Result<(), BrokerError> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        let bodies = futures::executor::block_on(shared.log.read(&self.places))?;
        let mut bodies = bodies.iter();
        let mut by_topic: BTreeMap<u64, Vec<Moved>> = BTreeMap::new();
        for (topic, index, moved) in self.blocks {
            let own = bodies.by_ref().take(moved.count()).collect();
            by_topic.entry(topic).or_default().push(Moved { index, moved, own });
        }
        for (topic, blocks) in by_topic {
            let mut state = shared.state.lock();
            shared.log.admit(AppendKind::Control)?;
            let (mut kept, mut body, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
            for Moved { index, moved, own } in blocks {
                // A message may have become needed since, for example by a change of the subscription: the next round sees it.
                if state.needed_in(topic, index, segments).is_none_or(|needed| !needed.without(&moved).is_empty()) {
                    continue;
                }
                for bytes in own {
                    body.extend_from_slice(bytes);
                    lengths.push(bytes.len() as u32);
                }
                kept.push((index, moved));
            }
            let now_ms = shared.tick(&mut state);
            let op = Op::Gather { now_ms, topic, segments: segments.iter().copied().collect(), blocks: kept };
            let placed = shared.log.append(AppendKind::Control, false, &encode(&op)?, &body, &lengths)?;
            let Op::Gather { segments, blocks, .. } = op else { unreachable!("made above") };
            state.gather(topic, &segments, &blocks, &placed.bodies);
        }
        Ok(())
    }
}
