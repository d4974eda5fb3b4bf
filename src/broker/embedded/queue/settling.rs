//! What becomes of leased messages: acknowledged, extended, failed, given back.

use super::{Acknowledged, Dead, Effects, Keys, Lease, Leases, Place, Queue, Retry};
use crate::broker::{
    LeaseToken, Outcome,
    embedded::{
        bits::{block_of, offset_of},
        topic_log::TopicLog,
    },
};

impl Queue {
    /// Removes one message for good. `now_ms` is only remembered.
    pub fn acknowledge(&mut self, topic: &mut TopicLog, token: LeaseToken, now_ms: u64, fx: &mut Effects) -> Acknowledged {
        let strict = self.config.exactly_once;
        let nothing = |outcome| Acknowledged { outcome, removed: false, remember: false };
        if token.lease < self.barrier || self.detached {
            return nothing(self.stale());
        }
        let sequence = token.sequence;
        if !self.is_unacked(sequence) {
            return nothing(if strict && !self.settled_by(token) { Outcome::Invalid } else { Outcome::Done });
        }
        if strict && self.current(token).is_none() {
            return nothing(Outcome::Invalid);
        }
        let remember = strict && self.retries.contains_key(&sequence);
        if remember {
            self.remember_settled(sequence, token.lease, now_ms);
        }
        self.remove(sequence, topic, fx);
        Acknowledged { outcome: Outcome::Done, removed: true, remember }
    }

    /// Whether an acknowledged message was acknowledged by this very delivery. A message that was delivered once, counted or
    /// not, needs no record: its only token is the one that settled it.
    pub(super) fn settled_by(&self, token: LeaseToken) -> bool {
        match self.settled.get(&token.sequence) {
            Some(lease) => *lease == token.lease,
            None => token.attempt == 1,
        }
    }

    /// Removes messages without asking for a token.
    pub fn remove_all(&mut self, topic: &mut TopicLog, sequences: impl IntoIterator<Item = u64>, fx: &mut Effects) {
        for sequence in sequences {
            if self.is_unacked(sequence) {
                self.remove(sequence, topic, fx);
            }
        }
    }

    /// Remembers which lease acknowledged a message, as [`acknowledge`](Self::acknowledge) does.
    pub fn remember_settled(&mut self, sequence: u64, lease: u64, now_ms: u64) {
        self.settled.insert(sequence, lease);
        self.settled_order.push_back((now_ms, sequence));
    }

    /// Moves a lease's deadline and answers where to, or nothing when the lease is over.
    pub fn extend(&mut self, token: LeaseToken, deadline_at_ms: u64, max_life_ms: u64) -> Option<u64> {
        let slot = self.current(token)?;
        let bound = if max_life_ms == 0 { u64::MAX } else { self.leases.get(slot).leased_at_ms + max_life_ms };
        let deadline_at_ms = deadline_at_ms.min(bound);
        self.leases.set_deadline(slot, deadline_at_ms);
        Some(deadline_at_ms)
    }

    /// Gives a message back as a failed delivery; false when the lease is over.
    pub fn nack(&mut self, token: LeaseToken, bypass_backoff: bool, now_ms: u64, fx: &mut Effects) -> bool {
        let Some(slot) = self.current(token) else { return false };
        let lease = *self.leases.get(slot);
        self.take_lease(token.sequence, fx);
        self.fail(lease, now_ms, bypass_backoff, fx);
        true
    }

    /// Gives a message back as if it had not been delivered; false when the lease is over.
    pub fn release(&mut self, token: LeaseToken, fx: &mut Effects) -> bool {
        let Some(slot) = self.current(token) else { return false };
        let lease = *self.leases.get(slot);
        self.take_lease(token.sequence, fx);
        if lease.key == 0 {
            self.put_back(lease.sequence, 0, true, fx);
        } else {
            // Before the time of any deadline: nothing of the key counts as failed.
            self.bring_back(lease, 0, 0, fx);
            fx.available = true;
        }
        true
    }

    /// Makes a message wait for its next delivery without delay.
    pub(super) fn put_back(&mut self, sequence: u64, key: u64, first: bool, fx: &mut Effects) {
        if key != 0 {
            self.set_place(sequence, Place::Line);
            self.keys.give_back(key, sequence);
            self.key_changed(key, fx);
        } else {
            self.make_ready(sequence, first);
        }
        fx.available = true;
    }

    /// The ordering key hash that governs a message's delivery; 0 when none does.
    pub(super) fn key_of(&self, sequence: u64, topic: &TopicLog) -> u64 {
        if self.config.ordered { topic.key(sequence) } else { 0 }
    }

    pub(super) fn current(&self, token: LeaseToken) -> Option<u32> {
        let slot = self.slot(token.sequence)?;
        (self.leases.get(slot).lease == token.lease).then_some(slot)
    }

    /// The outcome of settling a lease that is over.
    pub fn stale(&self) -> Outcome {
        if self.config.exactly_once { Outcome::Invalid } else { Outcome::Done }
    }

    /// Takes a message out of its lease, leaving it nowhere.
    pub(super) fn take_lease(&mut self, sequence: u64, fx: &mut Effects) -> Option<Lease> {
        let slot = self.slot(sequence)?;
        let lease = self.leases.remove(slot);
        if let Some(block) = self.block_mut(sequence) {
            block.leased -= 1;
            if block.leased == 0 {
                block.slots = None;
            } else if let Some(slots) = &mut block.slots {
                slots[offset_of(sequence)] = 0;
            }
        }
        fx.credit(lease.session, u64::from(lease.length));
        Some(lease)
    }

    /// One delivery failed at `at_ms`: redeliver after the backoff, or give up.
    pub(super) fn fail(&mut self, lease: Lease, at_ms: u64, bypass_backoff: bool, fx: &mut Effects) {
        let sequence = lease.sequence;
        let policy = self.config.max_delivery_attempts;
        let retry = self.retries.entry(sequence).or_insert(Retry { failures: 0, counted: 0, place: Place::Leased });
        retry.failures += 1;
        retry.counted += u32::from(policy.is_some());
        let failures = retry.failures;
        if policy.is_some_and(|max| retry.counted >= max) {
            retry.place = Place::Dead;
            self.dead.insert(sequence, Dead::default());
            self.key_settled(lease.key, sequence, fx);
            fx.dead = true;
            return;
        }
        let wait = self.config.retry.filter(|_| !bypass_backoff).map_or(0, |policy| policy.backoff_ms(failures));
        if lease.key != 0 {
            self.bring_back(lease, at_ms, at_ms + wait, fx);
        } else if wait == 0 {
            self.make_ready(sequence, false);
            fx.available = true;
        } else {
            self.set_place(sequence, Place::Delayed(at_ms + wait));
            self.delayed.insert((at_ms + wait, sequence));
        }
    }

    pub(super) fn set_place(&mut self, sequence: u64, place: Place) {
        self.retries.entry(sequence).or_insert(Retry { failures: 0, counted: 0, place }).place = place;
    }

    pub(super) fn make_ready(&mut self, sequence: u64, first: bool) {
        let order = if first {
            self.ready_front -= 1;
            self.ready_front
        } else {
            self.ready_back += 1;
            self.ready_back
        };
        self.ready.insert(order, sequence);
        self.set_place(sequence, Place::Ready(order));
    }

    /// Takes a message out of the place it waits in or is leased from, so that it can go elsewhere.
    pub(super) fn withdraw(&mut self, sequence: u64, topic: &TopicLog, fx: &mut Effects) {
        if let Some(lease) = self.take_lease(sequence, fx) {
            self.key_settled(lease.key, sequence, fx);
        }
        match self.retries.get(&sequence).map(|r| r.place) {
            Some(Place::Ready(order)) => {
                self.ready.remove(&order);
            }
            Some(Place::Delayed(at)) => {
                self.delayed.remove(&(at, sequence));
            }
            Some(Place::Dead) => {
                self.dead.remove(&sequence);
            }
            Some(Place::Leased) => {}
            Some(Place::Line) | None if self.config.ordered => {
                let key = topic.key(sequence);
                if key != 0 && self.keys.withdraw(key, sequence) {
                    self.key_changed(key, fx);
                }
            }
            Some(Place::Line) | None => {}
        }
    }

    /// Takes a message out for good, wherever it is.
    pub(super) fn remove(&mut self, sequence: u64, topic: &mut TopicLog, fx: &mut Effects) {
        self.withdraw(sequence, topic, fx);
        if !self.retries.is_empty() {
            self.retries.remove(&sequence);
        }
        let length = u64::from(topic.entry(sequence).map_or(0, |e| e.location.length));
        let Some(block) = self.block_mut(sequence) else { return };
        block.acked.set(offset_of(sequence));
        block.unacked -= 1;
        let done = block.unacked == 0;
        self.unacked -= 1;
        self.unacked_bytes = self.unacked_bytes.saturating_sub(length);
        if done {
            self.release_if_done(block_of(sequence), topic);
        }
    }

    /// Ends every delivery and forgets what was remembered of single messages.
    pub(super) fn drop_deliveries(&mut self, fx: &mut Effects) {
        for lease in self.leases.iter() {
            fx.credits.push((lease.session, 1, u64::from(lease.length)));
        }
        self.leases = Leases::default();
        for block in self.blocks.iter_mut().flatten() {
            block.leased = 0;
            block.slots = None;
        }
        self.retries.clear();
        self.ready.clear();
        self.delayed.clear();
        self.dead.clear();
        self.settled.clear();
        self.settled_order.clear();
        self.keys = Keys::default();
    }
}
