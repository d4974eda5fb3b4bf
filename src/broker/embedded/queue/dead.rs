//! Dead letters: messages at their last delivery attempt, waiting to be forwarded.

use super::{Dead, Effects, Queue};
use crate::broker::{
    LeaseToken,
    embedded::{log::Location, topic_log::TopicLog},
};

impl Queue {
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
}
