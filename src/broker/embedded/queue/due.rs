//! What a queue does when time passes: expired leases, ended backoffs, retention.

use super::{Effects, Lease, MAX_SETTLED, Place, Queue, SETTLED_MS};
use crate::broker::embedded::{
    bits::{BLOCK, block_of, offset_of},
    topic_log::TopicLog,
};

impl Queue {
    /// Carries out what is due: expired leases, ended backoffs, retention.
    pub fn advance(&mut self, topic: &mut TopicLog, now_ms: u64, fx: &mut Effects) {
        while let Some(due) = self.leases.due(now_ms) {
            for lease in due {
                self.expire(lease, fx);
            }
        }
        while let Some((at, sequence)) = self.delayed.first().copied().filter(|(at, _)| *at <= now_ms) {
            self.delayed.remove(&(at, sequence));
            self.make_ready(sequence, false);
            fx.available = true;
        }
        self.advance_keys(now_ms, fx);
        self.expire_messages(topic, now_ms, fx);
        while let Some((at, sequence)) = self.settled_order.front().copied() {
            if at + SETTLED_MS > now_ms && self.settled_order.len() <= MAX_SETTLED {
                break;
            }
            self.settled_order.pop_front();
            self.settled.remove(&sequence);
        }
        if self.dead_due_ms.is_some_and(|at| at <= now_ms) {
            self.dead_due_ms = None;
            fx.dead |= !self.dead.is_empty();
        }
    }

    /// The clock was set back: what was to happen in so many milliseconds still does.
    pub fn set_back(&mut self, by_ms: u64) {
        let earlier = |at_ms: &mut u64| *at_ms = at_ms.saturating_sub(by_ms);
        self.leases.set_back(by_ms);
        self.keys.set_back(by_ms);
        for retry in self.retries.values_mut() {
            if let Place::Delayed(at_ms) = &mut retry.place {
                earlier(at_ms);
            }
        }
        let delayed = std::mem::take(&mut self.delayed);
        self.delayed = delayed.into_iter().map(|(at, sequence)| (at.saturating_sub(by_ms), sequence)).collect();
        self.dead.values_mut().for_each(|dead| earlier(&mut dead.held_until_ms));
        self.dead_due_ms.iter_mut().for_each(earlier);
        self.settled_order.iter_mut().for_each(|(at, _)| earlier(at));
        [&mut self.active_ms, &mut self.use_logged_ms, &mut self.counts_from_ms].into_iter().for_each(earlier);
    }

    /// When [`advance`](Self::advance) has something to do next.
    pub fn next_due_ms(&self, topic: &TopicLog) -> Option<u64> {
        let retention = self.next_expiry(topic).map(|(_, at)| at);
        let delayed = self.delayed.first().map(|(at, _)| *at);
        [self.leases.next_due_ms(), delayed, self.keys.next_due_ms(), retention, self.dead_due_ms].into_iter().flatten().min()
    }

    pub(super) fn expire(&mut self, lease: Lease, fx: &mut Effects) {
        // An earlier expiry of the same span may have taken this lease back already.
        if self.slot(lease.sequence).is_some_and(|slot| *self.leases.get(slot) == lease) {
            self.expired_leases += u64::from(lease.deadline_at_ms >= self.counts_from_ms);
            self.take_lease(lease.sequence, fx);
            self.fail(lease, lease.deadline_at_ms, false, fx);
        }
    }

    /// The first message that retention has not looked at yet, and when it is due.
    pub(super) fn next_expiry(&self, topic: &TopicLog) -> Option<(u64, u64)> {
        let mut from = self.expire_from.max(topic.first_block() * BLOCK);
        while from < topic.next_sequence() {
            match topic.entry(from) {
                Some(entry) => return Some((from, entry.published_ms + self.config.retention_ms)),
                None => from = (block_of(from) + 1) * BLOCK,
            }
        }
        None
    }

    pub(super) fn expire_messages(&mut self, topic: &mut TopicLog, now_ms: u64, fx: &mut Effects) {
        while let Some((sequence, at)) = self.next_expiry(topic) {
            let crossed = block_of(sequence) != block_of(self.expire_from);
            let left = block_of(self.expire_from);
            self.expire_from = sequence;
            if crossed {
                self.release_if_done(left, topic);
            }
            if at > now_ms {
                return;
            }
            if self.is_unacked(sequence) {
                self.remove(sequence, topic, fx);
            }
            self.expire_from = sequence + 1;
            if offset_of(self.expire_from) == 0 {
                self.release_if_done(block_of(sequence), topic);
            }
        }
    }
}
