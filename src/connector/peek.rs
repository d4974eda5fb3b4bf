//! Peek: shows what waits in a subscription, leased messages included, and changes nothing.

use super::{Connector, Error};
use crate::{
    broker::{BrokerError, PeekRequest, Standing},
    model::{EncodedMessage, SubscriptionName},
};

/// Messages of one look, and their bytes: they are in memory together, and one may have 10 MB.
const MAX_MESSAGES: usize = 100;
const MAX_BYTES: u64 = 4 * 1024 * 1024;

/// A message that was looked at.
#[derive(Debug, Clone)]
pub struct PeekedMessage {
    /// Its place in the subscription, for going on from there.
    pub place: u64,
    pub standing: Standing,
    /// Deliveries that failed.
    pub failures: u32,
    pub message_id: String,
    /// Milliseconds since the epoch.
    pub publish_time_ms: u64,
    /// As it is stored: transforms of the subscription are applied on delivery.
    pub message: EncodedMessage,
}

impl Connector {
    /// Shows up to `max` unacknowledged messages (at most 100 and about 4 MiB) from a place on, and where to go on. Those
    /// that the subscription's filter keeps out, as a seek may bring back, are left out.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Detached`].
    pub async fn peek(&self, name: &SubscriptionName, from: u64, max: usize) -> Result<(Vec<PeekedMessage>, Option<u64>), Error> {
        let entry = self.subscription(name).await?;
        if entry.subscription.detached {
            return Err(Error::Detached(name.id().to_owned()));
        }
        let max_messages = max.clamp(1, MAX_MESSAGES);
        let request = PeekRequest { queue: entry.queue.clone(), from, max_messages, max_bytes: MAX_BYTES };
        let found = match self.broker().peek(request).await {
            Err(BrokerError::Gone) => {
                self.forget_subscription(name);
                return Err(Error::not_found(name));
            }
            found => found?,
        };
        let mut messages = Vec::with_capacity(found.messages.len());
        for peeked in found.messages {
            let sealed = EncodedMessage::sealed(&peeked.message).map(|(id, time_ms)| (id.to_owned(), time_ms));
            let (message_id, publish_time_ms) = sealed.unwrap_or_default();
            let message = EncodedMessage::scan_system(peeked.message)?;
            if entry.filter.as_ref().is_some_and(|filter| !filter.matches(&message)) {
                continue;
            }
            let (place, standing, failures) = (peeked.sequence, peeked.standing, peeked.failures);
            messages.push(PeekedMessage { place, standing, failures, message_id, publish_time_ms, message });
        }
        Ok((messages, found.next))
    }
}
