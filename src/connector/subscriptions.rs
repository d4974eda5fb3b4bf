//! Subscriptions: create, get, list, update, detach, delete.

use std::sync::Arc;

use super::{
    Connector, Error,
    catalog::{TopicEntry, queue_ref, topic_ref},
    draft::SubscriptionDraft,
    listing::{Listing, Page, PageRequest, check_project},
    mask::merge,
    record,
    topics::{CHANGE_TRIES, new_incarnation},
    validate,
};
use crate::{
    broker::{BrokerError, Change, Effect, Expect, Kind, QueueConfig, QueueStats},
    model::{ExpirationPolicy, PushConfig, Subscription, SubscriptionName, TopicName, resource::Labels},
};

mod fields;

use fields::{FIELDS, PATHS};

/// A subscription as it is shown: with what depends on its topic.
#[derive(Debug, Clone)]
pub struct SubscriptionView {
    pub subscription: Subscription,
    /// None when the topic was deleted, even if another one has its name by now.
    pub topic: Option<Arc<TopicEntry>>,
}

/// What the engine itself acts on.
fn config(subscription: &Subscription) -> QueueConfig {
    let policy = subscription.dead_letter_policy.as_ref();
    QueueConfig {
        queue: queue_ref(subscription),
        topic: topic_ref(&subscription.topic, subscription.topic_incarnation),
        ordered: subscription.enable_message_ordering,
        exactly_once: subscription.enable_exactly_once_delivery,
        retry: subscription.retry_policy,
        max_delivery_attempts: policy.filter(|p| p.dead_letter_topic.is_some()).map(|p| p.max_delivery_attempts),
        retention_ms: subscription.message_retention_ms,
        retain_acked: subscription.retain_acked_messages,
    }
}

/// The name of a subscription whose creator left that to the server: in its topic's project.
fn new_name(topic: &TopicName) -> Result<SubscriptionName, Error> {
    Ok(SubscriptionName::new(topic.project(), &format!("sub-{:032x}", rand::random::<u128>()))?)
}

impl Connector {
    /// Creates a subscription; an empty name has the server choose one.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NotFound`] of the topic or the dead-letter topic, or a field that is not legal.
    pub async fn create_subscription(&self, draft: SubscriptionDraft) -> Result<SubscriptionView, Error> {
        let topic = TopicName::parse(&draft.topic)?;
        let name = if draft.name.is_empty() { new_name(&topic)? } else { SubscriptionName::parse(&draft.name)? };
        let mut subscription = self.blank(name.clone(), topic.clone(), &draft)?;
        for field in FIELDS {
            self.set_field(&mut subscription, field, &draft).await?;
        }
        check_combination(&subscription)?;
        subscription.topic_incarnation = self.read_topic(&topic).await?.0.incarnation;
        self.check_dead_letter_topic(&subscription).await?;
        let change = Change {
            kind: Kind::Subscription,
            name: name.to_string(),
            expect: Expect::Absent,
            body: Some(record::encode(&subscription)?),
            effect: Effect::OpenQueue(config(&subscription)),
        };
        match self.catalog.change(change).await {
            Ok(_) => self.view(subscription).await,
            Err(BrokerError::Conflict(_)) => Err(Error::exists(&name)),
            Err(BrokerError::Gone) => Err(Error::not_found(&topic)),
            Err(error) => Err(error.into()),
        }
    }

    /// A subscription with its immutable fields set and the others still without meaning.
    fn blank(&self, name: SubscriptionName, topic: TopicName, draft: &SubscriptionDraft) -> Result<Subscription, Error> {
        Ok(Subscription {
            name,
            incarnation: new_incarnation(),
            topic,
            topic_incarnation: 0,
            push_config: PushConfig::default(),
            ack_deadline_seconds: 0,
            retain_acked_messages: false,
            message_retention_ms: 0,
            labels: Labels::new(),
            enable_message_ordering: draft.enable_message_ordering,
            expiration_policy: ExpirationPolicy::Never,
            filter: validate::filter(&draft.filter)?,
            dead_letter_policy: None,
            retry_policy: None,
            detached: false,
            enable_exactly_once_delivery: false,
            message_transforms: Vec::new(),
        })
    }

    async fn set_field(&self, sub: &mut Subscription, field: fields::Field, draft: &SubscriptionDraft) -> Result<(), Error> {
        if field == fields::Field::Transforms {
            sub.message_transforms = self.message_transforms(&draft.message_transforms).await?;
        }
        fields::set(sub, field, draft, self.options())
    }

    async fn check_dead_letter_topic(&self, subscription: &Subscription) -> Result<(), Error> {
        match subscription.dead_letter_policy.as_ref().and_then(|policy| policy.dead_letter_topic.as_ref()) {
            Some(topic) => self.read_topic(topic).await.map(|_| ()),
            None => Ok(()),
        }
    }

    /// Reads a subscription.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn get_subscription(&self, name: &SubscriptionName) -> Result<SubscriptionView, Error> {
        let (subscription, _) = self.read_subscription(name).await?;
        self.touch(&subscription).await;
        self.view(subscription).await
    }

    pub(super) async fn read_subscription(&self, name: &SubscriptionName) -> Result<(Subscription, u64), Error> {
        self.catalog.read(Kind::Subscription, name.as_str()).await?.ok_or_else(|| Error::not_found(name))
    }

    /// The state of a subscription's queue at this moment, read past every cache. It does not count as use.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn backlog(&self, name: &SubscriptionName) -> Result<QueueStats, Error> {
        let (subscription, _) = self.read_subscription(name).await?;
        match self.broker().stats(&queue_ref(&subscription)).await {
            Err(BrokerError::Gone) if subscription.detached => Ok(QueueStats::default()),
            Err(BrokerError::Gone) => Err(Error::not_found(name)),
            stats => Ok(stats?),
        }
    }

    /// Administration counts as use: it puts off the expiration of an idle subscription.
    async fn touch(&self, subscription: &Subscription) {
        // A failure leaves the older time, which the next use corrects; it must not fail what the caller asked for.
        if let Err(error) = self.broker().touch(&queue_ref(subscription)).await {
            tracing::debug!("the use of {} was not noted: {error}", subscription.name);
        }
    }

    async fn view(&self, subscription: Subscription) -> Result<SubscriptionView, Error> {
        let topic = self.catalog.topic(&subscription.topic).await?;
        let topic = topic.filter(|topic| topic.topic.incarnation == subscription.topic_incarnation);
        Ok(SubscriptionView { subscription, topic })
    }

    /// Lists the subscriptions of a project, `projects/{id}`, by name.
    ///
    /// # Errors
    /// A bad project, page size or page token.
    pub async fn list_subscriptions(&self, project: &str, page: &PageRequest) -> Result<Page<SubscriptionView>, Error> {
        check_project(project)?;
        let listing = Listing { list: "subscriptions", parent: project };
        let prefix = format!("{project}/subscriptions/");
        let found = self.list(&listing, page, Kind::Subscription, &prefix, |found| record::decode(found).map(Some)).await?;
        let mut items = Vec::with_capacity(found.items.len());
        for subscription in found.items {
            items.push(self.view(subscription).await?);
        }
        Ok(Page { items, next_token: found.next_token })
    }

    /// Changes the fields that `mask` names, all or none.
    ///
    /// # Errors
    /// [`Error::NotFound`] of the subscription or a newly named dead-letter topic, a bad mask, or a named field that is not
    /// legal.
    pub async fn update_subscription(&self, draft: SubscriptionDraft, mask: &[String]) -> Result<SubscriptionView, Error> {
        let name = SubscriptionName::parse(&draft.name)?;
        let paths = PATHS.resolve(mask)?;
        let names_dead_letter_topic = paths.iter().any(|p| matches!(p.path, fields::DEAD_LETTER | fields::DEAD_LETTER_TOPIC));
        for _ in 0..CHANGE_TRIES {
            let (mut next, version) = self.read_subscription(&name).await?;
            let mut merged = fields::to_draft(&next);
            for field in merge(&paths, &mut merged, &draft) {
                self.set_field(&mut next, field, &merged).await?;
            }
            check_combination(&next)?;
            if names_dead_letter_topic {
                self.check_dead_letter_topic(&next).await?;
            }
            if self.write(&next, version).await? {
                return self.view(next).await;
            }
        }
        Err(Error::Contended)
    }

    /// Writes a changed subscription; false when another change came first.
    async fn write(&self, next: &Subscription, version: u64) -> Result<bool, Error> {
        // A detached queue has nothing left to configure, and must not be attached again.
        let effect = if next.detached { Effect::None } else { Effect::OpenQueue(config(next)) };
        self.write_with(next, version, effect).await
    }

    async fn write_with(&self, next: &Subscription, version: u64, effect: Effect) -> Result<bool, Error> {
        let change = Change {
            kind: Kind::Subscription,
            name: next.name.to_string(),
            expect: Expect::Version(version),
            body: Some(record::encode(next)?),
            effect,
        };
        match self.catalog.change(change).await {
            Ok(_) => Ok(true),
            Err(BrokerError::Conflict(_) | BrokerError::Gone) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the push configuration; one without endpoint makes a pull subscription. The backlog stays.
    ///
    /// # Errors
    /// [`Error::NotFound`] or a configuration that is not legal.
    pub async fn modify_push_config(&self, name: &SubscriptionName, push_config: &PushConfig) -> Result<(), Error> {
        let push_config = validate::push_config(push_config)?;
        for _ in 0..CHANGE_TRIES {
            let (mut next, version) = self.read_subscription(name).await?;
            next.push_config = push_config.clone();
            check_combination(&next)?;
            if self.write(&next, version).await? {
                return Ok(());
            }
        }
        Err(Error::Contended)
    }

    /// Takes a subscription off its topic for good: its backlog is dropped, it gets nothing new and can't be pulled. Doing it
    /// again changes nothing.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn detach_subscription(&self, name: &SubscriptionName) -> Result<(), Error> {
        for _ in 0..CHANGE_TRIES {
            let (mut next, version) = self.read_subscription(name).await?;
            if next.detached {
                return Ok(());
            }
            next.detached = true;
            if self.write_with(&next, version, Effect::DetachQueue(queue_ref(&next))).await? {
                return Ok(());
            }
        }
        Err(Error::Contended)
    }

    /// Deletes a subscription with its backlog.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn delete_subscription(&self, name: &SubscriptionName) -> Result<(), Error> {
        for _ in 0..CHANGE_TRIES {
            let (subscription, version) = self.read_subscription(name).await?;
            if self.delete_at(&subscription, version).await? {
                return Ok(());
            }
        }
        Err(Error::Contended)
    }

    /// Deletes a subscription that was read at this version; false when another change came first.
    pub(super) async fn delete_at(&self, subscription: &Subscription, version: u64) -> Result<bool, Error> {
        let effect = Effect::CloseQueue(queue_ref(subscription));
        self.delete_record(Kind::Subscription, subscription.name.as_str(), version, effect).await
    }
}

/// What no field alone can tell.
fn check_combination(subscription: &Subscription) -> Result<(), Error> {
    let exactly_once = subscription.enable_exactly_once_delivery;
    validate::unsupported::exactly_once_push(exactly_once, &subscription.push_config.endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{DeadLetterPolicy, RetryPolicy};

    fn subscription() -> Subscription {
        let name = SubscriptionName::parse("projects/p1/subscriptions/s11").unwrap();
        let topic = TopicName::parse("projects/p2/topics/t11").unwrap();
        Subscription {
            retain_acked_messages: true,
            message_retention_ms: 600_000,
            enable_message_ordering: true,
            retry_policy: Some(RetryPolicy { minimum_backoff_ms: 1, maximum_backoff_ms: 2 }),
            enable_exactly_once_delivery: true,
            ..Subscription::plain(name, 7, topic, 8)
        }
    }

    #[test]
    fn the_queue_is_configured_as_the_subscription_says() {
        let (subscription, config) = (subscription(), config(&subscription()));
        assert_eq!((&*config.queue.channel, config.queue.incarnation), ("p1/s11", 7));
        assert_eq!((&*config.topic.channel, config.topic.incarnation), ("p2/t11", 8));
        assert!(config.ordered && config.exactly_once && config.retain_acked);
        assert_eq!((config.retry, config.retention_ms), (subscription.retry_policy, 600_000));
        assert_eq!(config.max_delivery_attempts, None);
    }

    #[test]
    fn attempts_are_limited_only_while_there_is_a_topic_for_dead_letters() {
        let with = |dead_letter_topic| {
            let policy = DeadLetterPolicy { dead_letter_topic, max_delivery_attempts: 5 };
            config(&Subscription { dead_letter_policy: Some(policy), ..subscription() }).max_delivery_attempts
        };
        assert_eq!(with(None), None);
        assert_eq!(with(Some(TopicName::parse("projects/p1/topics/dead").unwrap())), Some(5));
    }
}
