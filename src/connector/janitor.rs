//! Periodic cleaning: snapshots whose time has come, and subscriptions that nobody used for their time to live. Every node
//! does it; the record's version lets only one of them win.

use std::{sync::Weak, time::Duration};

use serde::de::DeserializeOwned;

use super::{Connector, Error, catalog::queue_ref, record};
use crate::{
    broker::{Broker, BrokerError, Kind, Record},
    model::{ExpirationPolicy, Snapshot, Subscription},
};

/// Between two rounds over the snapshots. Expired ones are hidden at once, so a delay only delays the freeing of space.
const PERIOD: Duration = Duration::from_secs(60);
/// Rounds over the snapshots for one over the subscriptions, whose shortest time to live is a day and which take a broker
/// call each.
const ROUNDS: u32 = 15;
/// From the start to the first round, over everything: a server that is restarted often cleans as well.
const FIRST: Duration = Duration::from_secs(2);
/// Records read at a time.
const BATCH: usize = 500;
/// Every resource name begins with it.
const EVERYTHING: &str = "projects/";

/// Cleans until the connector is gone.
pub(super) async fn run(connector: Weak<Connector>) {
    for round in 0u32.. {
        let pause = if round == 0 { FIRST } else { PERIOD };
        // Nodes that were started together must not all come at the same moment.
        tokio::time::sleep(pause.mul_f64(rand::random_range(0.75..1.25))).await;
        let Some(connector) = connector.upgrade() else { return };
        report(connector.remove_expired_snapshots().await);
        if round.is_multiple_of(ROUNDS) {
            report(connector.remove_idle_subscriptions().await);
        }
    }
}

fn report(outcome: Result<(), Error>) {
    if let Err(error) = outcome {
        let internal = error.internal().unwrap_or_default();
        tracing::warn!("expired resources were not all removed: {error} {internal}");
    }
}

/// A walk over all records of a kind.
struct Records {
    kind: Kind,
    batch: std::vec::IntoIter<Record>,
    /// Name of the last record read; none when the last batch has been read.
    after: Option<String>,
}

impl Records {
    fn of(kind: Kind) -> Self {
        Self { kind, batch: Vec::new().into_iter(), after: Some(String::new()) }
    }

    async fn next(&mut self, broker: &dyn Broker) -> Result<Option<Record>, BrokerError> {
        if self.batch.len() == 0
            && let Some(after) = self.after.take()
        {
            let batch = broker.list(self.kind, EVERYTHING, &after, BATCH).await?;
            self.after = batch.last().filter(|_| batch.len() == BATCH).map(|last| last.name.clone());
            self.batch = batch.into_iter();
        }
        Ok(self.batch.next())
    }
}

/// Decodes a record. One that can't be read is left to the operator, and does not keep the others from being looked at.
fn readable<T: DeserializeOwned>(found: &Record) -> Option<T> {
    let report = |error: Error| tracing::error!("{}", error.internal().unwrap_or_default());
    record::decode(found).map_err(report).ok()
}

impl Connector {
    /// Removes the snapshots whose time has come.
    ///
    /// # Errors
    /// What the broker answers; what was not reached is tried again in the next round.
    pub(super) async fn remove_expired_snapshots(&self) -> Result<(), Error> {
        let mut records = Records::of(Kind::Snapshot);
        while let Some(found) = records.next(self.broker().as_ref()).await? {
            let Some(snapshot) = readable::<Snapshot>(&found) else { continue };
            if snapshot.expire_time_ms <= self.broker().now_ms() {
                tracing::info!("removing the expired snapshot {}", snapshot.name);
                self.delete_snapshot_at(&snapshot, found.version).await?;
            }
        }
        Ok(())
    }

    /// Removes the subscriptions that nobody used for their time to live.
    ///
    /// # Errors
    /// What the broker answers; what was not reached is tried again in the next round.
    pub(super) async fn remove_idle_subscriptions(&self) -> Result<(), Error> {
        let mut records = Records::of(Kind::Subscription);
        while let Some(found) = records.next(self.broker().as_ref()).await? {
            let Some(subscription) = readable::<Subscription>(&found) else { continue };
            if self.is_idle(&subscription).await? {
                tracing::info!("removing the subscription {}, unused for its time to live", subscription.name);
                self.delete_at(&subscription, found.version).await?;
            }
        }
        Ok(())
    }

    async fn is_idle(&self, subscription: &Subscription) -> Result<bool, Error> {
        let ExpirationPolicy::After { seconds, .. } = subscription.expiration_policy else { return Ok(false) };
        let (queue, now_ms) = (queue_ref(subscription), self.broker().now_ms());
        let last_active_ms = match self.broker().stats(&queue).await {
            Ok(stats) => stats.last_active_ms,
            Err(BrokerError::Gone) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        if last_active_ms >= now_ms && !self.broker().is_shared() {
            // A stream that waits is use, but leaves no trace in a store of this process alone: a crash would forget it.
            self.broker().touch(&queue).await?;
        }
        let idle_ms = self.broker().now_ms().saturating_sub(last_active_ms);
        Ok(i128::from(idle_ms) > i128::from(seconds) * 1000)
    }
}
