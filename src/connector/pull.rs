//! Unary Pull: lease what is there, or wait a while for something.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::{
    Connector, Error, SubscriptionEntry,
    channel::{Attached, Channel, release},
    meters::Delivery,
    transforms::MAX_LEASED,
};
use crate::{
    broker::{Broker, BrokerError, Kind, LeaseRequest, LeaseToken, Leased, QueueRef},
    model::{
        SubscriptionName,
        limits::{MAX_PULL_BYTES, MAX_PULL_MESSAGES},
        meter::add,
    },
    rules::{flow_control, lease},
    telemetry,
};

/// How often a call starts over because the subscription changed under it, before it gives up.
const MAX_RESTARTS: usize = 8;

/// A message on its way to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivered {
    pub ack_id: String,
    /// The encoded message with id and publish time.
    pub message: Bytes,
    /// From 1 with a dead-letter policy, 0 without.
    pub delivery_attempt: u32,
}

/// The answer to a Pull.
pub struct Pulled {
    pub messages: Vec<Delivered>,
    /// To be armed by whoever sends the answer, and told when it is sent.
    pub receipt: Receipt,
}

/// Gives messages back, as if they had not been delivered, if their response could not be sent: while it is
/// [armed](Self::arm), until it is [marked as sent](Self::sent).
pub struct Receipt {
    broker: Arc<dyn Broker>,
    tasks: TaskTracker,
    queue: QueueRef,
    tokens: Vec<LeaseToken>,
    armed: AtomicBool,
}

impl Receipt {
    /// From now on, dropping this gives the messages back.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Release);
    }

    /// The client has the messages.
    pub fn sent(&self) {
        self.armed.store(false, Ordering::Release);
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        if self.armed.load(Ordering::Acquire) {
            release(&self.broker, &self.tasks, &self.queue, std::mem::take(&mut self.tokens));
        }
    }
}

/// Checks that messages may be pulled from a subscription.
///
/// # Errors
/// [`Error::Detached`] or [`Error::NotPullable`].
pub(super) fn check_pullable(entry: &SubscriptionEntry) -> Result<(), Error> {
    let subscription = &entry.subscription;
    if subscription.detached {
        return Err(Error::Detached(subscription.name.id().to_owned()));
    }
    if !subscription.push_config.endpoint.is_empty() {
        return Err(Error::NotPullable);
    }
    Ok(())
}

/// Why nothing could be pulled.
enum PullError {
    Broker(BrokerError),
    Other(Error),
}

impl From<BrokerError> for PullError {
    fn from(error: BrokerError) -> Self {
        Self::Broker(error)
    }
}

impl Connector {
    /// The subscription, if messages may be pulled from it. Another node may have allowed it a moment ago, so nothing is
    /// refused for what is remembered: the record is looked at again.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Detached`] or [`Error::NotPullable`].
    pub(super) async fn pullable(&self, name: &SubscriptionName) -> Result<Arc<SubscriptionEntry>, Error> {
        let entry = self.subscription(name).await?;
        let Err(refusal) = check_pullable(&entry) else { return Ok(entry) };
        let record = self.broker.get(Kind::Subscription, name.as_str()).await?;
        if record.is_some_and(|record| record.version == entry.version) {
            return Err(refusal);
        }
        self.forget_subscription(name);
        let entry = self.subscription(name).await?;
        check_pullable(&entry).map(|()| entry)
    }

    /// Leases up to `max_messages` messages (at most 1000 and 10 MB), waiting for the first of them for up to `wait`. The
    /// answer is empty when none came. Dropping the future gives back what it leased.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Detached`], [`Error::NotPullable`], also when the subscription becomes so meanwhile;
    /// [`Error::Argument`] for `max_messages` below 1.
    pub async fn pull(&self, name: &SubscriptionName, max_messages: i32, wait: Duration) -> Result<Pulled, Error> {
        let max_messages = match usize::try_from(max_messages) {
            Ok(count) if count > 0 => count.min(MAX_PULL_MESSAGES),
            _ => return Err(Error::Argument("max_messages".into())),
        };
        let (until, began) = (Instant::now() + wait, self.traced_now());
        for restarts in 0..MAX_RESTARTS {
            let entry = self.pullable(name).await?;
            let channel = self.delivery.channel(&entry.queue);
            if restarts == 0 {
                add(&channel.meter.pulls, 1);
            }
            match self.pull_from(&entry, &channel, max_messages, until).await {
                Ok(Some(leased)) => {
                    let pulled = self.pulled(&channel, leased);
                    self.trace_receiving(name, telemetry::parent(), began, &pulled.messages);
                    return Ok(pulled);
                }
                // The subscription changed.
                Ok(None) => {}
                Err(PullError::Broker(BrokerError::Gone)) => self.forget_subscription(name),
                Err(PullError::Broker(BrokerError::Stale)) => self.outdated(&entry).await?,
                Err(PullError::Broker(error)) => return Err(error.into()),
                Err(PullError::Other(error)) => return Err(error),
            }
        }
        Err(Error::Contended)
    }

    /// `None` when the entry is out of date.
    async fn pull_from(
        &self,
        entry: &SubscriptionEntry,
        channel: &Channel,
        max_messages: usize,
        until: Instant,
    ) -> Result<Option<Vec<Leased>>, PullError> {
        let attached = self.delivery.attach(&channel.queue);
        loop {
            let leased = self.broker.lease(self.lease_for_pull(entry, &attached, max_messages)).await?;
            let had_some = !leased.is_empty();
            let leased = self.deliverable(entry, leased).await.map_err(PullError::Other)?;
            if !leased.is_empty() || (Instant::now() >= until && !had_some) {
                return Ok(Some(leased));
            }
            if had_some {
                // None of them was for the client; there may be others, also for a client that does not wait.
                if entry.is_retired() {
                    return Ok(None);
                }
                continue;
            }
            tokio::select! {
                () = attached.session.woken() => {}
                () = entry.retired() => return Ok(None),
                () = self.delivery.draining.cancelled() => return Ok(Some(Vec::new())),
                () = tokio::time::sleep_until(until) => return Ok(Some(Vec::new())),
            }
        }
    }

    fn lease_for_pull(&self, entry: &SubscriptionEntry, attached: &Attached, max_messages: usize) -> LeaseRequest {
        let asked_ms = u64::from(entry.subscription.ack_deadline_seconds) * 1000;
        LeaseRequest {
            queue: entry.queue.clone(),
            session: attached.session.clone(),
            max_messages: if entry.transforms.is_empty() { max_messages } else { max_messages.min(MAX_LEASED) },
            max_bytes: MAX_PULL_BYTES as u64,
            deadline_ms: lease::first_deadline_ms(asked_ms, self.max_lease_life_ms()),
            max_inflight: self.options.max_inflight_per_subscription,
            record_version: entry.lease_version(),
        }
    }

    fn pulled(&self, channel: &Channel, mut leased: Vec<Leased>) -> Pulled {
        let fitting = flow_control::fitting(leased.iter().map(|l| l.message.len()), MAX_PULL_BYTES as u64);
        let surplus = leased.split_off(fitting);
        self.delivery.release(&channel.queue, surplus.iter().map(|l| l.token).collect());
        channel.meter.sent(Delivery::Pull, leased.len(), leased.iter().map(|l| l.message.len() as u64).sum());
        let receipt = Receipt {
            broker: self.broker.clone(),
            tasks: self.delivery.tasks.clone(),
            queue: channel.queue.clone(),
            tokens: leased.iter().map(|l| l.token).collect(),
            armed: AtomicBool::new(false),
        };
        Pulled { messages: leased.into_iter().map(|l| channel.deliver(l)).collect(), receipt }
    }
}

impl Channel {
    /// Makes a leased message ready for its client.
    pub fn deliver(&self, leased: Leased) -> Delivered {
        Delivered {
            ack_id: self.minter.mint(&leased.token, leased.deadline_at_ms),
            message: leased.message,
            delivery_attempt: leased.delivery_attempt,
        }
    }
}

#[cfg(test)]
mod tests;
