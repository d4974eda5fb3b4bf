//! Publishing: check the messages, find the queues that take them, append once.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use super::{
    Connector, Error, SubscriptionEntry, TopicEntry,
    catalog::{Route, RouteTarget},
    schemas::{self, Named},
    traces::end_sending,
};
use crate::{
    broker::{Append, Appended, Attached, BrokerError, Kind, Target},
    model::{
        EncodedMessage, SubscriptionName, TopicName,
        limits::{MAX_PUBLISH_BYTES, MAX_PUBLISH_MESSAGES, MAX_REQUEST_BYTES},
        meter::add,
    },
    rules::filter::Filter,
};

/// Attempts at one append while subscriptions come and go. Each failed one had another client's change go first.
const APPEND_TRIES: usize = 64;
/// Attempts without a pause; more are only needed in a burst of changes.
const QUICK_TRIES: usize = 4;
/// Longest pause before a later attempt; on average half of it, so that a burst of about a third of a second is outlived.
const MAX_PAUSE: Duration = Duration::from_millis(10);
/// Subscription records read at a time when a topic's route is built.
const ROUTE_READS: usize = 64;

/// Counts the attempts at one publish.
#[derive(Default)]
struct Tries(usize);

impl Tries {
    /// Before another attempt.
    async fn next(&mut self) -> Result<(), Error> {
        self.0 += 1;
        if self.0 >= APPEND_TRIES {
            return Err(Error::Contended);
        }
        if self.0 >= QUICK_TRIES {
            tokio::time::sleep(MAX_PAUSE.mul_f64(rand::random())).await;
        }
        Ok(())
    }
}

/// Checks the size of a publish request in its encoding.
///
/// # Errors
/// [`Error::PayloadTooLarge`] beyond what a front end takes, [`Error::TooLarge`] beyond 10,000,000 bytes.
pub fn check_request_size(encoded_bytes: usize) -> Result<(), Error> {
    if encoded_bytes > MAX_REQUEST_BYTES {
        return Err(Error::PayloadTooLarge(MAX_REQUEST_BYTES));
    }
    if encoded_bytes > MAX_PUBLISH_BYTES {
        return Err(Error::TooLarge {
            field: "request_size",
            passed: encoded_bytes.to_string(),
            maximum: MAX_PUBLISH_BYTES.to_string(),
        });
    }
    Ok(())
}

fn check_count(count: usize) -> Result<(), Error> {
    let (field, passed) = ("message_count", count.to_string());
    match count {
        0 => Err(Error::TooSmall { field, passed, minimum: "1".into() }),
        1..=MAX_PUBLISH_MESSAGES => Ok(()),
        _ => Err(Error::TooLarge { field, passed, maximum: MAX_PUBLISH_MESSAGES.to_string() }),
    }
}

impl Connector {
    /// Publishes 1 to 1000 encoded `PubsubMessage`s to a topic and answers their ids in order. They are stored durably, all
    /// or none.
    ///
    /// # Errors
    /// A message or the count out of bounds, an unknown topic, or the broker's refusal.
    pub async fn publish(&self, name: &TopicName, messages: Vec<Bytes>) -> Result<Vec<u64>, Error> {
        let trace = self.trace_sending(name, &messages);
        let published = self.publish_counted(name, messages).await;
        if let Some(batch) = trace {
            end_sending(batch, &published);
        }
        published
    }

    async fn publish_counted(&self, name: &TopicName, messages: Vec<Bytes>) -> Result<Vec<u64>, Error> {
        check_count(messages.len())?;
        let topic = self.topic(name).await?;
        let published = self.publish_to(topic.clone(), messages).await;
        let meter = topic.meter(&self.meters);
        match &published {
            Ok(_) => add(&meter.requests, 1),
            Err(error) => meter.failed(error),
        }
        published
    }

    async fn publish_to(&self, mut topic: Arc<TopicEntry>, messages: Vec<Bytes>) -> Result<Vec<u64>, Error> {
        let messages = messages.into_iter().map(|wire| self.scan(wire)).collect::<Result<Vec<_>, _>>()?;
        let mut tries = Tries::default();
        loop {
            if let Some(ids) = self.try_to_publish(&topic, &messages, &mut tries).await? {
                return Ok(ids);
            }
            tries.next().await?;
            topic = self.topic(&topic.topic.name).await?;
        }
    }

    /// Nothing when the entry is out of date, or what it names.
    async fn try_to_publish(
        &self,
        topic: &TopicEntry,
        messages: &[EncodedMessage],
        tries: &mut Tries,
    ) -> Result<Option<Vec<u64>>, Error> {
        let named = self.named_schema(&topic.topic).await?;
        if topic.transforms.is_empty() && topic.topic.schema_settings.is_none() {
            return Ok(self.append(topic, &named, messages, tries).await?.map(|appended| appended.message_ids));
        }
        let prepared = self.prepare(topic, &named, messages.to_vec()).await;
        let nothing = prepared.as_ref().map_or(true, |(_, messages)| messages.is_empty());
        // Another node may have changed the topic or the schema a moment ago. What is stored is looked after by the broker.
        if nothing && !self.is_current(topic, &named).await? {
            return Ok(None);
        }
        let (kept, messages) = prepared?;
        let ids = if messages.is_empty() {
            Vec::new()
        } else {
            let Some(appended) = self.append(topic, &named, &messages, tries).await? else { return Ok(None) };
            appended.message_ids
        };
        Ok(Some(match kept {
            Some(kept) => with_dropped(&kept, ids),
            None => ids,
        }))
    }

    /// What of messages is to be stored in which form, and, where transforms may drop some, which were kept.
    async fn prepare(
        &self,
        topic: &TopicEntry,
        named: &Named,
        messages: Vec<EncodedMessage>,
    ) -> Result<(Option<Vec<bool>>, Vec<EncodedMessage>), Error> {
        // Transforms before the schema, which what they return has to follow.
        let transformed = self.transform_published(&topic.transforms, messages).await?;
        let kept = (!topic.transforms.is_empty()).then(|| transformed.iter().map(Option::is_some).collect());
        let messages = self.follow_schema(&topic.topic, named, transformed.into_iter().flatten().collect()).await?;
        Ok((kept, messages))
    }

    /// Whether the entry and the schema are those in force, where other nodes change them. What is not is forgotten.
    async fn is_current(&self, topic: &TopicEntry, named: &Named) -> Result<bool, Error> {
        if !self.broker().is_shared() {
            return Ok(true);
        }
        let name = topic.topic.name.as_str();
        let is_latest = self.catalog.version(Kind::Topic, name).await? == Some(topic.version);
        if !is_latest {
            self.catalog.forget_topic(name);
        }
        Ok(self.is_named_still(&topic.topic, named).await? && is_latest)
    }

    /// Publishes messages that were checked already, or that the server itself made (dead letters), past the limits on
    /// counts and sizes.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub async fn publish_checked(&self, name: &TopicName, messages: Vec<EncodedMessage>) -> Result<Vec<u64>, Error> {
        let mut tries = Tries::default();
        loop {
            let topic = self.topic(name).await?;
            let named = self.named_schema(&topic.topic).await?;
            if let Some(appended) = self.append(&topic, &named, &messages, &mut tries).await? {
                return Ok(appended.message_ids);
            }
            tries.next().await?;
        }
    }

    /// Checks a message. As at Google its size is that of its data: attributes and the ordering key have bounds of their own.
    pub(super) fn scan(&self, wire: Bytes) -> Result<EncodedMessage, Error> {
        let message = EncodedMessage::scan(wire)?;
        let (bytes, maximum) = (message.data().len(), self.options().max_message_bytes);
        if bytes > maximum {
            return Err(Error::TooLarge { field: "message_size", passed: bytes.to_string(), maximum: maximum.to_string() });
        }
        Ok(message)
    }

    /// Nothing when the entry is out of date, or the schema.
    async fn append(
        &self,
        topic: &TopicEntry,
        named: &Named,
        messages: &[EncodedMessage],
        tries: &mut Tries,
    ) -> Result<Option<Appended>, Error> {
        loop {
            let Some(route) = self.route(topic, named).await? else { return Ok(None) };
            let append = Append {
                topic: topic.reference.clone(),
                messages: messages.to_vec(),
                targets: targets(&route, messages),
                route_version: route.version,
            };
            match self.broker().append(append).await {
                Ok(appended) => {
                    let meter = topic.meter(&self.meters);
                    add(&meter.messages, messages.len() as u64);
                    add(&meter.bytes, messages.iter().map(|message| message.wire().len() as u64).sum());
                    return Ok(Some(appended));
                }
                Err(BrokerError::Stale) => topic.forget_route(route.version),
                Err(BrokerError::Gone) => {
                    self.catalog.forget_topic(topic.topic.name.as_str());
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
            tries.next().await?;
        }
    }

    /// The queues of a topic with their filters, remembered until the broker calls them stale; none when the entry or the
    /// schema is out of date.
    async fn route(&self, topic: &TopicEntry, named: &Named) -> Result<Option<Arc<Route>>, Error> {
        let schema = schemas::version(named);
        if let Some(route) = topic.route() {
            if route.schema == schema {
                return Ok(Some(route));
            }
            topic.forget_route(route.version);
        }
        let found = match self.broker().route(&topic.reference).await {
            Ok(found) => found,
            Err(BrokerError::Gone) => {
                self.catalog.forget_topic(topic.topic.name.as_str());
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        // The route's version stands for the records as they are now: any change of them makes it stale.
        if !self.is_current(topic, named).await? {
            return Ok(None);
        }
        let entries: Vec<_> = futures::stream::iter(found.subscriptions)
            .map(|attached| self.attached(attached))
            .buffered(ROUTE_READS)
            .try_collect()
            .await?;
        let complete = entries.iter().all(Option::is_some);
        let mut route = Route { version: found.version, schema, ..Route::default() };
        for entry in entries.into_iter().flatten() {
            route.add(entry.queue.clone(), entry.filter.as_ref());
        }
        let route = Arc::new(route);
        // A subscription that is just being created or deleted may lack its record: good for once, not to be remembered.
        if complete {
            topic.remember_route(route.clone());
        }
        Ok(Some(route))
    }

    /// The subscription behind an attached queue; none when its record is not that queue's.
    async fn attached(&self, attached: Attached) -> Result<Option<Arc<SubscriptionEntry>>, Error> {
        let Ok(name) = SubscriptionName::parse(&attached.name) else {
            return Err(Error::Internal(format!("a topic's route names '{}'", attached.name)));
        };
        let fits = |entry: &Arc<SubscriptionEntry>| entry.queue.incarnation == attached.incarnation;
        if let Some(entry) = self.catalog.subscription(&name).await?.filter(fits) {
            return Ok(Some(entry));
        }
        self.catalog.forget_subscription(name.as_str());
        Ok(self.catalog.subscription(&name).await?.filter(fits))
    }
}

/// Ids of the messages that a transform dropped, among those of the ones that were stored. A publisher gets one for each; they
/// come from the half of the numbers that brokers don't count to.
fn with_dropped(kept: &[bool], ids: Vec<u64>) -> Vec<u64> {
    let mut ids = ids.into_iter();
    let dropped = || rand::random::<u64>() | 1 << 63;
    kept.iter().map(|kept| if *kept { ids.next().unwrap_or_default() } else { dropped() }).collect()
}

/// Which queue takes which messages. Every filter is asked once a message, however many subscriptions share it.
fn targets(route: &Route, messages: &[EncodedMessage]) -> Vec<Target> {
    let kept_out = |filter: &Filter| -> Vec<u32> {
        let refused = messages.iter().enumerate().filter(|(_, message)| !filter.matches(message));
        refused.map(|(index, _)| index as u32).collect()
    };
    let filtered: Vec<Vec<u32>> = route.filters.iter().map(kept_out).collect();
    let target = |target: &RouteTarget| Target {
        queue: target.queue.clone(),
        filtered: target.filter.map(|filter| filtered[filter].clone()).unwrap_or_default(),
    };
    route.targets.iter().map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::QueueRef;

    #[test]
    fn request_sizes_are_bounded_twice() {
        assert_eq!(check_request_size(10_000_000), Ok(()));
        assert_eq!(
            check_request_size(10_000_001).unwrap_err().to_string(),
            "The value for request_size is too large. You passed 10000001 in the request, but the maximum value is 10000000."
        );
        assert!(matches!(check_request_size(10_485_760), Err(Error::TooLarge { .. })));
        assert_eq!(
            check_request_size(10_485_761).unwrap_err().to_string(),
            "Request payload size exceeds the limit: 10485760 bytes."
        );
    }

    #[test]
    fn one_to_a_thousand_messages_are_published_at_a_time() {
        assert_eq!((check_count(1), check_count(1000)), (Ok(()), Ok(())));
        assert_eq!(
            check_count(0).unwrap_err().to_string(),
            "The value for message_count is too small. You passed 0 in the request, but the minimum value is 1."
        );
        assert_eq!(
            check_count(1001).unwrap_err().to_string(),
            "The value for message_count is too large. You passed 1001 in the request, but the maximum value is 1000."
        );
    }

    #[test]
    fn queues_with_equal_filters_share_one_verdict() {
        let queue = |incarnation| QueueRef { channel: "p/s".into(), incarnation };
        let (keep, other) = (Filter::parse("attributes:keep").unwrap(), Filter::parse("attributes:other").unwrap());
        let mut route = Route::default();
        route.add(queue(1), None);
        route.add(queue(2), Some(&keep));
        route.add(queue(3), Some(&other));
        route.add(queue(4), Some(&keep));
        assert_eq!(route.filters.len(), 2);
        let messages = [
            EncodedMessage::encode(b"x", [("keep", "")], ""),
            EncodedMessage::encode(b"x", [("other", "")], ""),
            EncodedMessage::encode(b"x", [], ""),
        ];
        let targets = targets(&route, &messages);
        let filtered: Vec<_> = targets.iter().map(|t| (t.queue.incarnation, t.filtered.clone())).collect();
        assert_eq!(filtered, [(1, vec![]), (2, vec![1, 2]), (3, vec![0, 2]), (4, vec![1, 2])]);
    }
}
