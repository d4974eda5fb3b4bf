//! Seek: moves a subscription to another point of its retained messages.

use super::{Connector, Error, catalog::queue_ref, draft::Span, validate};
use crate::{
    broker::{BrokerError, SeekTarget},
    model::{Snapshot, SnapshotName, Subscription, SubscriptionName},
};

/// Where a caller wants to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeekTo {
    /// Since the epoch. Messages published before it count as acknowledged, the others do not.
    Time(Span),
    /// Full name of a snapshot.
    Snapshot(String),
}

impl Connector {
    /// Seeks. Every lease ends, and ids from before settle nothing any more.
    ///
    /// # Errors
    /// [`Error::NoSeekTarget`], [`Error::NotFound`] of the subscription or the snapshot, [`Error::Detached`], or a snapshot
    /// of another topic.
    pub async fn seek(&self, name: &SubscriptionName, target: Option<SeekTo>) -> Result<(), Error> {
        let target = target.ok_or(Error::NoSeekTarget)?;
        let (subscription, _) = self.read_subscription(name).await?;
        if subscription.detached {
            return Err(Error::Detached(name.id().to_owned()));
        }
        let target = match target {
            // Publish times are whole milliseconds. Rounding up keeps "before" exact: a message published at this very
            // time counts as not acknowledged, one published a nanosecond earlier as acknowledged.
            SeekTo::Time(time) => SeekTarget::Time(validate::timestamp("time", time)?.ms_rounded_up()),
            SeekTo::Snapshot(name) => {
                let snapshot = self.read_snapshot(&SnapshotName::parse(&name)?).await?.0;
                check_topic(&subscription, &snapshot)?;
                SeekTarget::Snapshot(snapshot.incarnation)
            }
        };
        let outcome = self.broker().seek(&queue_ref(&subscription), target).await;
        match (outcome, target) {
            (Ok(()), _) => Ok(()),
            (Err(BrokerError::Gone), SeekTarget::Time(_)) => Err(Error::not_found(name)),
            // The queue or the snapshot was deleted after it was read.
            (Err(BrokerError::Gone), SeekTarget::Snapshot(_)) => match self.read_subscription(name).await {
                Ok(_) => Err(Error::NotFound("snapshot".into())),
                Err(error) => Err(error),
            },
            (Err(error), _) => Err(error.into()),
        }
    }
}

fn check_topic(subscription: &Subscription, snapshot: &Snapshot) -> Result<(), Error> {
    if subscription.topic == snapshot.topic && subscription.topic_incarnation == snapshot.topic_incarnation {
        return Ok(());
    }
    Err(Error::SnapshotOfOtherTopic { subscription: subscription.topic.to_string(), snapshot: snapshot.topic.to_string() })
}
