//! Acknowledge and ModifyAckDeadline, by unary calls and on streams.

pub(super) mod lane;

use std::sync::Arc;

use super::{
    AckFailure, Connector, Error, Scope, SubscriptionEntry,
    ack_id::{AckId, AckIdError},
    channel::Channel,
    traces::end_settling,
};
use crate::{
    broker::{BrokerError, DeadlineChange, LeaseToken, Outcome},
    model::{SubscriptionName, meter::add, text::clipped},
    rules::lease,
    telemetry::Operation,
};

impl Connector {
    /// Acknowledges deliveries.
    ///
    /// # Errors
    /// [`Error::NoAckIds`]; [`Error::AckId`] or [`Error::ForeignAckId`], and nothing happens; with exactly-once delivery
    /// [`Error::AckIds`] instead, listing the ids that failed while the others were carried out.
    pub async fn acknowledge(&self, name: &SubscriptionName, ack_ids: &[String]) -> Result<(), Error> {
        if ack_ids.is_empty() {
            return Err(Error::NoAckIds);
        }
        let entry = self.subscription(name).await?;
        let channel = self.delivery.channel(&entry.queue);
        let outcomes = self.acknowledge_on(&entry, &channel, ack_ids).await?;
        self.verdict(entry, ack_ids, &outcomes).await
    }

    /// Moves the deadlines of deliveries to `seconds` from now; 0 gives the messages back as failed deliveries.
    ///
    /// # Errors
    /// As [`acknowledge`](Self::acknowledge), and [`Error::AckDeadline`].
    pub async fn modify_ack_deadline(&self, name: &SubscriptionName, ack_ids: &[String], seconds: i32) -> Result<(), Error> {
        if ack_ids.is_empty() {
            return Err(Error::NoAckIds);
        }
        let deadline_ms = self.extension_ms(seconds)?;
        let entry = self.subscription(name).await?;
        let channel = self.delivery.channel(&entry.queue);
        let outcomes = self.modify_on(&entry, &channel, ack_ids, |_| deadline_ms).await?;
        self.verdict(entry, ack_ids, &outcomes).await
    }

    /// Checks one deadline of a ModifyAckDeadline; answers milliseconds.
    pub(super) fn extension_ms(&self, seconds: i32) -> Result<u64, Error> {
        Ok(lease::extension_ms(seconds, self.options.min_ack_extension_seconds)?)
    }

    /// One outcome an id. On a subscription without exactly-once delivery, an id that was never one is an error and nothing
    /// is done; with it, the id is invalid and the others go ahead.
    pub(super) async fn acknowledge_on(
        &self,
        entry: &SubscriptionEntry,
        channel: &Channel,
        ack_ids: &[String],
    ) -> Result<Vec<Outcome>, Error> {
        let settling = self.trace_settling(entry, ack_ids, |_| Operation::ACK);
        let outcomes = self.acknowledge_counted(entry, channel, ack_ids).await;
        end_settling(settling, &outcomes);
        outcomes
    }

    async fn acknowledge_counted(
        &self,
        entry: &SubscriptionEntry,
        channel: &Channel,
        ack_ids: &[String],
    ) -> Result<Vec<Outcome>, Error> {
        let read = self.read(entry, channel, ack_ids)?;
        let outcomes = merge(self.known(entry, channel.acks.run(read.tokens).await)?, &read.invalid);
        channel.meter.settled(&channel.meter.acknowledged, &outcomes);
        Ok(outcomes)
    }

    /// The same for deadlines: `deadline_ms` of the id at an index.
    pub(super) async fn modify_on(
        &self,
        entry: &SubscriptionEntry,
        channel: &Channel,
        ack_ids: &[String],
        deadline_ms: impl Fn(usize) -> u64,
    ) -> Result<Vec<Outcome>, Error> {
        let operation = |index| if deadline_ms(index) == 0 { Operation::NACK } else { Operation::MODACK };
        let settling = self.trace_settling(entry, ack_ids, operation);
        let outcomes = self.modify_counted(entry, channel, ack_ids, &deadline_ms).await;
        end_settling(settling, &outcomes);
        outcomes
    }

    async fn modify_counted(
        &self,
        entry: &SubscriptionEntry,
        channel: &Channel,
        ack_ids: &[String],
        deadline_ms: impl Fn(usize) -> u64,
    ) -> Result<Vec<Outcome>, Error> {
        let read = self.read(entry, channel, ack_ids)?;
        let mut invalid = read.invalid.iter().peekable();
        let valid = (0..ack_ids.len()).filter(|index| invalid.next_if(|next| *next == index).is_none());
        let change = |(token, index)| DeadlineChange {
            token,
            deadline_ms: deadline_ms(index),
            bypass_backoff: self.options.nack_bypasses_backoff,
            max_life_ms: self.max_lease_life_ms(),
        };
        let changes: Vec<_> = read.tokens.into_iter().zip(valid).map(change).collect();
        let nacks: Vec<bool> = changes.iter().map(|change| change.deadline_ms == 0).collect();
        let outcomes = self.known(entry, channel.changes.run(changes).await)?;
        let (mut nacked, mut extended) = (Vec::new(), Vec::new());
        for (outcome, nack) in outcomes.iter().zip(nacks) {
            if nack { nacked.push(*outcome) } else { extended.push(*outcome) }
        }
        channel.meter.settled(&channel.meter.nacked, &nacked);
        channel.meter.settled(&channel.meter.extended, &extended);
        add(&channel.meter.refused, read.invalid.len() as u64);
        Ok(merge(outcomes, &read.invalid))
    }

    /// The longest life of one lease, milliseconds; 0 is without bound.
    pub(super) fn max_lease_life_ms(&self) -> u64 {
        u64::from(self.options.max_ack_extension_seconds) * 1000
    }

    fn read(&self, entry: &SubscriptionEntry, channel: &Channel, ack_ids: &[String]) -> Result<Read, Error> {
        let exactly_once = entry.subscription.enable_exactly_once_delivery;
        let own_only = exactly_once && self.options.exactly_once_scope == Scope::Node;
        let mut read = Read { tokens: Vec::with_capacity(ack_ids.len()), invalid: Vec::new() };
        for (index, ack_id) in ack_ids.iter().enumerate() {
            match channel.minter.read(ack_id) {
                Ok(AckId { own_node: false, .. }) if own_only => read.invalid.push(index),
                Ok(AckId { token, .. }) => read.tokens.push(token),
                Err(_) if exactly_once => read.invalid.push(index),
                Err(AckIdError::Malformed) => return Err(Error::AckId(clipped(ack_id).into_owned())),
                Err(AckIdError::Foreign) => return Err(Error::ForeignAckId(clipped(ack_id).into_owned())),
            }
        }
        Ok(read)
    }

    /// What a unary call answers.
    async fn verdict(&self, entry: Arc<SubscriptionEntry>, ack_ids: &[String], outcomes: &[Outcome]) -> Result<(), Error> {
        if outcomes.iter().all(|outcome| *outcome == Outcome::Done) {
            return Ok(());
        }
        // The broker's part in it is that of the settings now.
        if self.current(entry).await?.subscription.enable_exactly_once_delivery {
            let failed =
                ack_ids.iter().zip(outcomes).filter_map(|(id, outcome)| Some((clipped(id).into_owned(), failure(*outcome)?)));
            return Err(Error::AckIds(failed.collect()));
        }
        if outcomes.contains(&Outcome::Retry) {
            return Err(undecided());
        }
        Ok(())
    }

    /// The broker's answer; a queue that is gone means a subscription that was deleted.
    fn known(&self, entry: &SubscriptionEntry, answer: Result<Vec<Outcome>, BrokerError>) -> Result<Vec<Outcome>, Error> {
        match answer {
            Err(BrokerError::Gone) => {
                let name = &entry.subscription.name;
                self.forget_subscription(name);
                Err(Error::not_found(name))
            }
            answer => Ok(answer?),
        }
    }
}

impl From<lease::DeadlineError> for Error {
    fn from(error: lease::DeadlineError) -> Self {
        Self::AckDeadline { passed: error.passed, low: error.low }
    }
}

/// The ids of one request.
struct Read {
    tokens: Vec<LeaseToken>,
    /// Indexes of the ids that can't be valid, ascending.
    invalid: Vec<usize>,
}

/// Puts the invalid ids' outcomes back in their places.
fn merge(outcomes: Vec<Outcome>, invalid: &[usize]) -> Vec<Outcome> {
    if invalid.is_empty() {
        return outcomes;
    }
    let (mut outcomes, mut invalid) = (outcomes.into_iter(), invalid.iter().peekable());
    let mut merged = Vec::new();
    loop {
        if invalid.next_if(|index| **index == merged.len()).is_some() {
            merged.push(Outcome::Invalid);
        } else if let Some(outcome) = outcomes.next() {
            merged.push(outcome);
        } else {
            return merged;
        }
    }
}

fn failure(outcome: Outcome) -> Option<AckFailure> {
    match outcome {
        Outcome::Done => None,
        Outcome::Invalid => Some(AckFailure::Permanent),
        Outcome::Retry => Some(AckFailure::Transient),
    }
}

/// The broker could not tell what became of some ids.
pub(super) fn undecided() -> Error {
    Error::Unavailable("the broker could not tell what became of some ack ids".into())
}

#[cfg(test)]
mod tests;
