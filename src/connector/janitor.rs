//! Periodic cleaning: snapshots whose time has come, and subscriptions that nobody used for their time to live. Every node
//! does it; the record's version lets only one of them win.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use super::{Connector, Error, catalog::queue_ref, record};
use crate::{
    broker::{BrokerError, Kind},
    model::{ExpirationPolicy, Snapshot, Subscription},
};

/// Between two rounds. Expired snapshots are hidden at once, and times to live are a day or more, so a minute's delay only
/// delays the freeing of space.
const PERIOD: Duration = Duration::from_secs(60);
/// Records read at a time.
const BATCH: usize = 500;
/// Every resource name begins with it.
const EVERYTHING: &str = "projects/";

/// Cleans until the connector is gone.
pub(super) async fn run(connector: Weak<Connector>) {
    loop {
        // Nodes that were started together must not all come at the same moment.
        tokio::time::sleep(PERIOD.mul_f64(rand::random_range(0.75..1.25))).await;
        let Some(connector) = connector.upgrade() else { return };
        if let Err(error) = connector.remove_expired().await {
            let internal = error.internal().unwrap_or_default();
            tracing::warn!("expired snapshots and subscriptions were not all removed: {error} {internal}");
        }
    }
}

impl Connector {
    /// Removes what has expired, once over all resources.
    ///
    /// # Errors
    /// What the broker answers; what was not reached is tried again in the next round.
    pub async fn remove_expired(self: &Arc<Self>) -> Result<(), Error> {
        self.remove_expired_snapshots().await?;
        self.remove_idle_subscriptions().await
    }

    async fn remove_expired_snapshots(&self) -> Result<(), Error> {
        let mut after = String::new();
        loop {
            let records = self.broker().list(Kind::Snapshot, EVERYTHING, &after, BATCH).await?;
            for found in &records {
                let snapshot: Snapshot = record::decode(found)?;
                if snapshot.expire_time_ms <= self.broker().now_ms() {
                    tracing::info!("removing the expired snapshot {}", snapshot.name);
                    self.delete_snapshot_at(&snapshot, found.version).await?;
                }
            }
            match records.last() {
                Some(last) if records.len() == BATCH => after.clone_from(&last.name),
                _ => return Ok(()),
            }
        }
    }

    async fn remove_idle_subscriptions(&self) -> Result<(), Error> {
        let mut after = String::new();
        loop {
            let records = self.broker().list(Kind::Subscription, EVERYTHING, &after, BATCH).await?;
            for found in &records {
                let subscription: Subscription = record::decode(found)?;
                if self.is_idle(&subscription).await? {
                    tracing::info!("removing the subscription {}, unused for its time to live", subscription.name);
                    self.delete_at(&subscription, found.version).await?;
                }
            }
            match records.last() {
                Some(last) if records.len() == BATCH => after.clone_from(&last.name),
                _ => return Ok(()),
            }
        }
    }

    async fn is_idle(&self, subscription: &Subscription) -> Result<bool, Error> {
        let ExpirationPolicy::After { seconds, .. } = subscription.expiration_policy else { return Ok(false) };
        let last_active_ms = match self.broker().stats(&queue_ref(subscription)).await {
            Ok(stats) => stats.last_active_ms,
            Err(BrokerError::Gone) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let idle_ms = self.broker().now_ms().saturating_sub(last_active_ms);
        Ok(i128::from(idle_ms) > i128::from(seconds) * 1000)
    }
}
