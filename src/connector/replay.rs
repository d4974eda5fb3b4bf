//! Replay: moves the messages of a subscription, as a rule one of a dead-letter topic, back to where they came from.
//!
//! A message is leased, published, and acknowledged only when that is confirmed. What breaks off in between is delivered
//! again: a message may then be published twice, and none is lost.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{Connector, Error, SubscriptionEntry};
use crate::{
    broker::{LeaseRequest, LeaseToken, Leased},
    model::{EncodedMessage, SubscriptionName, TopicName},
    rules::dead_letter,
};

/// Messages of one replay.
pub const MAX_REPLAY: usize = 1000;
/// Messages leased at a time, and their bytes: they are in memory together.
const BATCH: usize = 100;
const BATCH_BYTES: u64 = 4 * 1024 * 1024;
/// Much longer than a batch takes, and short enough for messages that a server takes with it when it dies.
const LEASE_MS: u64 = 60_000;
/// No batch begins later than this after the first, so that messages that stay are held for less than a lease.
const LIMIT: Duration = Duration::from_secs(20);
/// Different reasons that are told.
const MAX_REASONS: usize = 10;

/// What a replay did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Published to their topic and acknowledged.
    pub moved: usize,
    /// Left where they are.
    pub stayed: usize,
    /// Why messages stayed, and how many for each reason.
    pub reasons: BTreeMap<String, usize>,
}

impl Replayed {
    fn stay(&mut self, why: &str, count: usize) {
        self.stayed += count;
        if self.reasons.len() < MAX_REASONS || self.reasons.contains_key(why) {
            *self.reasons.entry(why.to_owned()).or_default() += count;
        }
    }
}

/// Messages of one batch with the same target.
#[derive(Default)]
struct Group {
    tokens: Vec<LeaseToken>,
    messages: Vec<EncodedMessage>,
}

impl Connector {
    /// Moves up to `max` messages (1 to 1000) to `to`, or each to the topic of the subscription that gave it up, without what
    /// dead-lettering added. Goes on if the caller stops waiting.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Detached`], a count out of bounds, or a target that would bring the messages back here.
    pub async fn replay(self: &Arc<Self>, name: &SubscriptionName, to: Option<TopicName>, max: usize) -> Result<Replayed, Error> {
        if !(1..=MAX_REPLAY).contains(&max) {
            let (low, high) = ("1".to_owned(), MAX_REPLAY.to_string());
            return Err(Error::OutOfBounds { field: "max", passed: max.to_string(), low, high });
        }
        let entry = self.subscription(name).await?;
        if entry.subscription.detached {
            return Err(Error::Detached(name.id().to_owned()));
        }
        if let Some(to) = &to {
            self.topic(to).await?;
            if *to == entry.subscription.topic {
                return Err(Error::argument("topic", "the subscription is of this topic and would get its messages again"));
            }
        }
        let connector = self.clone();
        let task = self.delivery.tasks.spawn(async move { connector.replay_now(&entry, to.as_ref(), max).await });
        task.await.unwrap_or_else(|e| Err(Error::Internal(format!("a replay was interrupted: {e}"))))
    }

    async fn replay_now(&self, entry: &SubscriptionEntry, to: Option<&TopicName>, max: usize) -> Result<Replayed, Error> {
        let attached = self.delivery.attach(&entry.queue);
        let (mut done, mut kept, mut sources) = (Replayed::default(), Vec::new(), HashMap::new());
        let until = Instant::now() + LIMIT;
        let mut outcome = Ok(());
        while done.moved + done.stayed < max && Instant::now() < until && !self.delivery.draining.is_cancelled() {
            let request = LeaseRequest {
                queue: entry.queue.clone(),
                session: attached.session.clone(),
                max_messages: BATCH.min(max - done.moved - done.stayed),
                max_bytes: BATCH_BYTES,
                deadline_ms: LEASE_MS,
                max_inflight: self.options.max_inflight_per_subscription,
                // None of its settings matter here.
                record_version: 0,
            };
            let leased = match self.broker.lease(request).await {
                Ok(leased) if leased.is_empty() => break,
                Ok(leased) => leased,
                Err(error) => {
                    outcome = Err(error.into());
                    break;
                }
            };
            let groups = self.sorted(entry, to, leased, &mut sources, &mut done, &mut kept).await;
            for (target, group) in groups {
                let tokens = group.tokens.clone();
                match self.replay_group(entry, &target, to.is_some(), group).await {
                    Ok(()) => done.moved += tokens.len(),
                    Err(error) => {
                        done.stay(&format!("{target}: {error}"), tokens.len());
                        kept.extend(tokens);
                    }
                }
            }
        }
        // Only now: what is given back earlier comes again in the next batch.
        self.delivery.release(&entry.queue, kept);
        outcome.map(|()| done)
    }

    /// Sorts leased messages by their target. Those without one are kept.
    async fn sorted(
        &self,
        entry: &SubscriptionEntry,
        to: Option<&TopicName>,
        leased: Vec<Leased>,
        sources: &mut HashMap<Option<SubscriptionName>, Result<TopicName, String>>,
        done: &mut Replayed,
        kept: &mut Vec<LeaseToken>,
    ) -> BTreeMap<TopicName, Group> {
        let mut groups: BTreeMap<TopicName, Group> = BTreeMap::new();
        for leased in leased {
            let target = match dead_letter::original(leased.message) {
                Err(error) => Err(format!("a stored message can't be read: {error}")),
                Ok((message, source)) => {
                    let topic = match (to, sources.get(&source)) {
                        (Some(to), _) => Ok(to.clone()),
                        (None, Some(known)) => known.clone(),
                        (None, None) => {
                            let found = self.source_topic(entry, source.as_ref()).await;
                            sources.insert(source, found.clone());
                            found
                        }
                    };
                    topic.map(|topic| (topic, message))
                }
            };
            match target {
                Ok((topic, message)) => {
                    let group = groups.entry(topic).or_default();
                    group.tokens.push(leased.token);
                    group.messages.push(message);
                }
                Err(why) => {
                    done.stay(&why, 1);
                    kept.push(leased.token);
                }
            }
        }
        groups
    }

    /// The topic of the subscription that a message was given up by, or why it is not to be used.
    async fn source_topic(&self, entry: &SubscriptionEntry, source: Option<&SubscriptionName>) -> Result<TopicName, String> {
        let Some(source) = source else { return Err("no attribute names the subscription it came from".into()) };
        let found = self.subscription(source).await;
        let topic = found.map(|found| found.subscription.topic.clone()).map_err(|error| format!("{source}: {error}"))?;
        match topic == entry.subscription.topic {
            true => Err(format!("{source} is of the same topic and would get its messages here again")),
            false => Ok(topic),
        }
    }

    /// Publishes, and acknowledges what was published.
    async fn replay_group(&self, entry: &SubscriptionEntry, to: &TopicName, is_chosen: bool, group: Group) -> Result<(), Error> {
        // A message went through the transforms and the schema of its own topic when it was first published; another topic
        // has its own.
        if is_chosen {
            self.publish(to, group.messages.iter().map(|message| message.wire().clone()).collect()).await?;
        } else {
            self.publish_checked(to, group.messages).await?;
        }
        // If this fails they come again: twice is better than never.
        self.broker.acknowledge(&entry.queue, &group.tokens).await?;
        Ok(())
    }
}
