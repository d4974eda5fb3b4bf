//! What of leased messages is for the client.

use super::{Connector, Error, SubscriptionEntry, channel::Held};
use crate::{
    broker::{BrokerError, Leased},
    model::EncodedMessage,
};

impl Connector {
    /// What is left of leased messages after the subscription's filter and its transforms; everything else is settled. The
    /// filter keeps messages out when they are published, but a seek may bring in what was published before the subscription
    /// was there, or what a snapshot of another subscription held. Leases are given back when the future is dropped.
    ///
    /// # Errors
    /// None from a server with transforms; one without refuses subscriptions that have some.
    pub async fn deliverable(&self, entry: &SubscriptionEntry, leased: Vec<Leased>) -> Result<Vec<Leased>, Error> {
        let leased = self.filtered(entry, leased).await;
        self.transform_leased(entry, leased).await
    }

    /// Acknowledges what the filter keeps out.
    async fn filtered(&self, entry: &SubscriptionEntry, leased: Vec<Leased>) -> Vec<Leased> {
        let Some(filter) = &entry.filter else { return leased };
        let matches = |leased: &Leased| EncodedMessage::scan_system(leased.message.clone()).map_or(true, |m| filter.matches(&m));
        if leased.iter().all(matches) {
            return leased;
        }
        let (kept, out): (Vec<_>, Vec<_>) = leased.into_iter().partition(matches);
        let mut held = Held::new(self.broker(), self.delivery.tasks.clone(), &entry.queue, kept.iter().map(|l| l.token));
        let out: Vec<_> = out.iter().map(|l| l.token).collect();
        note_settled(entry, self.broker().acknowledge(&entry.queue, &out).await);
        held.forget(&kept.iter().map(|l| l.token).collect::<Vec<_>>());
        kept
    }
}

/// A fault of the broker is as good as a lost answer: the leases run out.
pub fn note_settled<T>(entry: &SubscriptionEntry, settled: Result<T, BrokerError>) {
    if let Err(error) = settled {
        tracing::warn!(%error, subscription = %entry.subscription.name, "messages can't be settled; their leases run out");
    }
}
