//! Forwards messages that reached their last delivery attempt. Every node does it; the broker gives each dead letter to one
//! of them for a while.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{Connector, Error, SubscriptionEntry, record};
use crate::{
    broker::{BrokerError, DeadLetter, Event, Kind},
    model::{EncodedMessage, Subscription, SubscriptionName, TopicName},
    rules::dead_letter,
};

/// Dead letters of one forwarding. They are in memory together and may have 10 MB each.
const BATCH: usize = 16;
/// Subscriptions whose dead letters are forwarded at the same time.
const CONCURRENCY: usize = 8;
/// How long the broker gives a dead letter to nobody else. Much longer than a publish takes, because a letter that is given
/// to two nodes is forwarded twice; what a node held that died waits this long.
const HOLD: Duration = Duration::from_secs(20);
/// All subscriptions are looked at this often, in case an event was lost with the node it was meant for.
const REVIEW: Duration = Duration::from_secs(300);
/// Records read at a time.
const PAGE: usize = 500;
/// A subscription whose letters can't be forwarded is reported this often.
const COMPLAINT: Duration = Duration::from_secs(60);

/// Counts of dead letters since the start of this node.
#[derive(Debug, Default)]
pub struct DeadLetterCounts {
    forwarded: AtomicU64,
    failed: AtomicU64,
}

impl DeadLetterCounts {
    /// Messages published to a dead-letter topic.
    pub fn forwarded(&self) -> u64 {
        self.forwarded.load(Ordering::Relaxed)
    }

    /// Messages that could not be, and went back to their subscription.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

/// How the forwarding of one subscription's dead letters ended.
enum Ended {
    /// There are no more for this node.
    Empty,
    /// They went back to the subscription, because of this.
    Refused(String),
    /// The broker failed: once more when it gives them again.
    Later(Error),
}

/// Forwards until the connector stops.
pub(super) async fn run(connector: Weak<Connector>, mut events: Receiver<Event>, stop: CancellationToken) {
    let mut work = Work::default();
    let mut review_at = Instant::now();
    loop {
        let Some(strong) = connector.upgrade() else { return };
        if review_at <= Instant::now() {
            review_at = Instant::now() + REVIEW;
            work.review(&strong).await;
        }
        work.start(&strong);
        drop(strong);
        let due = work.next_due().unwrap_or(review_at).min(review_at);
        tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = work.running.join_next() => work.ended(ended),
            () = sleep_until(due) => {}
            event = events.recv() => match event {
                Ok(Event::DeadLetters(queue)) => {
                    if let Some((project, id)) = queue.channel.split_once('/')
                        && let Ok(name) = SubscriptionName::new(project, id)
                    {
                        work.due.insert(name, Instant::now());
                    }
                }
                // Perhaps another dead-letter topic.
                Ok(Event::RecordChanged { kind: Kind::Subscription, name }) => {
                    if let Ok(name) = SubscriptionName::parse(&name) {
                        work.due.insert(name, Instant::now());
                    }
                }
                Ok(Event::RecordChanged { .. }) => {}
                Ok(Event::Reset) | Err(RecvError::Lagged(_)) => review_at = Instant::now(),
                Err(RecvError::Closed) => break,
            },
        }
    }
    while work.running.join_next().await.is_some() {}
}

#[derive(Default)]
struct Work {
    /// Subscriptions to look at, and when.
    due: HashMap<SubscriptionName, Instant>,
    busy: HashSet<SubscriptionName>,
    running: JoinSet<(SubscriptionName, Ended)>,
    complained: HashMap<SubscriptionName, Instant>,
}

impl Work {
    /// Looks at every subscription with a dead-letter topic.
    async fn review(&mut self, connector: &Arc<Connector>) {
        self.complained.retain(|_, at| at.elapsed() < COMPLAINT);
        let mut after = String::new();
        loop {
            let page = match connector.broker.list(Kind::Subscription, "projects/", &after, PAGE).await {
                Ok(page) => page,
                Err(error) => return tracing::warn!(%error, "subscriptions with dead letters can't be listed"),
            };
            for found in &page {
                match record::decode::<Subscription>(found) {
                    Ok(subscription) if subscription.dead_letter_policy.is_some() => {
                        self.due.insert(subscription.name, Instant::now());
                    }
                    Ok(_) => {}
                    Err(error) => tracing::error!("{}", error.internal().unwrap_or_default()),
                }
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after.clone_from(&last.name),
                _ => return,
            }
        }
    }

    fn start(&mut self, connector: &Arc<Connector>) {
        let now = Instant::now();
        while self.busy.len() < CONCURRENCY {
            let next = self.due.iter().find(|(name, at)| **at <= now && !self.busy.contains(*name));
            let Some(name) = next.map(|(name, _)| name.clone()) else { return };
            self.due.remove(&name);
            self.busy.insert(name.clone());
            let connector = connector.clone();
            self.running.spawn(async move {
                let ended = connector.forward_dead_letters(&name).await;
                (name, ended)
            });
        }
    }

    /// When there is something to start that waits for nothing but its time.
    fn next_due(&self) -> Option<Instant> {
        if self.busy.len() >= CONCURRENCY {
            return None;
        }
        self.due.iter().filter(|(name, _)| !self.busy.contains(*name)).map(|(_, at)| *at).min()
    }

    fn ended(&mut self, ended: Result<(SubscriptionName, Ended), tokio::task::JoinError>) {
        let (name, ended) = match ended {
            Ok(ended) => ended,
            Err(error) => {
                tracing::error!(%error, "forwarding dead letters failed");
                self.busy.clear();
                return;
            }
        };
        self.busy.remove(&name);
        match ended {
            Ended::Empty => {}
            Ended::Refused(why) => self.complain(&name, &why),
            Ended::Later(error) => {
                self.complain(&name, error.internal().unwrap_or("the broker is busy"));
                self.due.entry(name).or_insert(Instant::now() + HOLD);
            }
        }
    }

    fn complain(&mut self, name: &SubscriptionName, why: &str) {
        if self.complained.get(name).is_none_or(|at| at.elapsed() >= COMPLAINT) {
            self.complained.insert(name.clone(), Instant::now());
            tracing::warn!(subscription = %name, "dead letters are not forwarded: {why}");
        }
    }
}

impl Connector {
    /// Counts of dead letters since the start of this node.
    pub fn dead_letters(&self) -> &DeadLetterCounts {
        &self.delivery.dead_letters
    }

    /// Forwards what the broker gives of one subscription's dead letters. What can't be published for good goes back to the
    /// subscription: it is delivered again, and tried again after its next failure.
    async fn forward_dead_letters(&self, name: &SubscriptionName) -> Ended {
        let mut refused = None;
        loop {
            match self.forward_some(name).await {
                Ok(None) => return refused.map_or(Ended::Empty, Ended::Refused),
                Ok(Some(Ok(()))) => {}
                Ok(Some(Err(why))) => refused = Some(why),
                Err(Error::NotFound(_)) => return Ended::Empty,
                Err(error) => return Ended::Later(error),
            }
        }
    }

    /// `None` when there was nothing to forward; otherwise why it went back to the subscription, if it did.
    async fn forward_some(&self, name: &SubscriptionName) -> Result<Option<Result<(), String>>, Error> {
        let entry = self.subscription(name).await?;
        let letters = match self.broker.take_dead_letters(&entry.queue, BATCH, HOLD).await {
            Err(BrokerError::Gone) => return Ok(None),
            letters => letters?,
        };
        if letters.is_empty() {
            return Ok(None);
        }
        let tokens: Vec<_> = letters.iter().map(|letter| letter.token).collect();
        let entry = self.current(entry).await?;
        let topic = entry.subscription.dead_letter_policy.as_ref().and_then(|policy| policy.dead_letter_topic.as_ref());
        let refused = match topic {
            None => Some("the subscription has no dead-letter topic any more".to_owned()),
            Some(topic) => self.publish_dead_letters(&entry, topic, letters).await?,
        };
        let counts = &self.delivery.dead_letters;
        let count = if refused.is_some() { &counts.failed } else { &counts.forwarded };
        count.fetch_add(tokens.len() as u64, Ordering::Relaxed);
        let meter = self.meters.subscriptions.get(&entry.queue.channel);
        let count = if refused.is_some() { &meter.dead_letters_returned } else { &meter.dead_lettered };
        count.fetch_add(tokens.len() as u64, Ordering::Relaxed);
        self.broker.settle_dead_letters(&entry.queue, &tokens, refused.is_none()).await?;
        Ok(Some(refused.map_or(Ok(()), Err)))
    }

    /// Answers why the letters can't be published, if that is not for the broker's momentary state.
    async fn publish_dead_letters(
        &self,
        source: &SubscriptionEntry,
        topic: &TopicName,
        letters: Vec<DeadLetter>,
    ) -> Result<Option<String>, Error> {
        let errors = self.transform_errors(source, &letters).await;
        let name = &source.subscription.name;
        let forwarded = |(letter, error): (DeadLetter, Option<String>)| {
            dead_letter::forwarded(letter.message, name, letter.attempts, error.as_deref())
        };
        let messages: Vec<EncodedMessage> = match letters.into_iter().zip(errors).map(forwarded).collect() {
            Ok(messages) => messages,
            Err(error) => return Ok(Some(format!("a stored message can't be read: {error}"))),
        };
        match self.publish_checked(topic, messages).await {
            Ok(_) => Ok(None),
            Err(Error::NotFound(_)) => Ok(Some(format!("the topic {topic} does not exist"))),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
