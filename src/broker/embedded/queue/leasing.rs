//! Picking messages for a session.

use super::{Budget, Effects, Lease, Picked, Place, Queue};
use crate::broker::{
    LeaseToken,
    embedded::{
        bits::{BLOCK, block_of, offset_of},
        topic_log::TopicLog,
    },
};

impl Queue {
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

    pub(super) fn has_fresh(&self, topic: &TopicLog) -> bool {
        self.next_fresh(topic).is_some()
    }

    /// The first fresh message that is visible.
    pub(super) fn next_fresh(&self, topic: &TopicLog) -> Option<u64> {
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

    pub(super) fn lease_ready(&mut self, topic: &TopicLog, pick: &mut Pick, mut share: usize) {
        while share > 0 && pick.wants() {
            let Some((_, sequence)) = self.ready.pop_first() else { return };
            self.give(sequence, 0, topic, pick);
            share -= 1;
        }
    }

    pub(super) fn lease_fresh(&mut self, topic: &TopicLog, pick: &mut Pick, fx: &mut Effects) {
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
    pub(super) fn give(&mut self, sequence: u64, key: u64, topic: &TopicLog, pick: &mut Pick) {
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

    pub(super) fn put_lease(&mut self, lease: Lease) {
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
}

/// A lease call under way.
pub(super) struct Pick {
    pub(super) lease: u64,
    pub(super) budget: Budget,
    pub(super) now_ms: u64,
    pub(super) left: usize,
    pub(super) bytes: u64,
    pub(super) picked: Vec<Picked>,
}

impl Pick {
    pub(super) fn wants(&self) -> bool {
        self.left > 0 && (self.picked.is_empty() || self.bytes < self.budget.max_bytes)
    }
}
