//! Limits of each project: what it may ask for in a second, and how much it may keep.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    broker::{BrokerError, Kind},
    connector::{Connector, Error},
    model::SubscriptionName,
};

/// Projects whose use is counted; beyond it all begin anew, which lets each have one second's worth once more.
const MAX_PROJECTS: usize = 10_000;
/// How old the sum of a project's backlogs may be. The sum asks the broker once for each subscription.
const BACKLOG_AGE: Duration = Duration::from_secs(2);
/// Subscriptions read at a time while summing.
const BATCH: usize = 1000;

/// Limits of every project, 0 for none. The rates hold on each node, the others in the whole cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Calls a second; a stream counts once.
    pub requests_per_second: u64,
    /// Bytes of Publish requests a second.
    pub publish_bytes_per_second: u64,
    pub topics: u64,
    pub subscriptions: u64,
    /// Bytes of all subscriptions' backlogs, beyond which nothing is published to the project's topics.
    pub backlog_bytes: u64,
}

/// A limit that is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exceeded {
    /// The setting's name.
    pub limit: &'static str,
    pub value: u64,
    pub project: String,
}

/// What a call asks for, beside the call itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost<'a> {
    Call,
    /// Bytes of a Publish request.
    Publish(usize),
    /// The full name of a topic that is to be made.
    Topic(&'a str),
    /// The same of a subscription; empty when the server chooses it.
    Subscription(&'a str),
}

/// Counts what projects use.
pub struct Meter {
    limits: Limits,
    connector: Arc<Connector>,
    used: Mutex<HashMap<String, Used>>,
}

struct Used {
    requests: Bucket,
    bytes: Bucket,
    /// The sum of the backlogs, and when it was taken.
    backlog: Option<(u64, Instant)>,
    summing: Arc<tokio::sync::Mutex<()>>,
    /// Held from counting resources to the end of the creation of one more.
    creating: Arc<tokio::sync::Mutex<()>>,
}

/// A second's worth, filled steadily. One large request may overdraw it and is paid off before the next.
struct Bucket {
    left: f64,
    at: Instant,
}

impl Bucket {
    fn full(rate: u64, now: Instant) -> Self {
        Self { left: rate as f64, at: now }
    }

    fn take(&mut self, rate: u64, amount: f64, now: Instant) -> bool {
        let grown = now.saturating_duration_since(self.at).as_secs_f64() * rate as f64;
        self.left = (self.left + grown).min(rate as f64);
        self.at = now;
        // A whole request, or any byte, must be there.
        let enough = self.left >= amount.min(1.0);
        if enough {
            self.left -= amount;
        }
        enough
    }
}

/// Keeps other creations of the same project out until it is dropped.
pub type Creating = Option<tokio::sync::OwnedMutexGuard<()>>;

impl Meter {
    pub fn new(limits: Limits, connector: Arc<Connector>) -> Self {
        Self { limits, connector, used: Mutex::default() }
    }

    /// True when there is something to count.
    pub fn is_on(&self) -> bool {
        self.limits != Limits::default()
    }

    fn used<T>(&self, project: &str, now: Instant, act: impl FnOnce(&mut Used) -> T) -> T {
        let mut used = self.used.lock();
        if used.len() >= MAX_PROJECTS && !used.contains_key(project) {
            used.clear();
        }
        if let Some(known) = used.get_mut(project) {
            return act(known);
        }
        act(used.entry(project.to_owned()).or_insert(Used {
            requests: Bucket::full(self.limits.requests_per_second, now),
            bytes: Bucket::full(self.limits.publish_bytes_per_second, now),
            backlog: None,
            summing: Arc::default(),
            creating: Arc::default(),
        }))
    }

    fn exceeded(&self, limit: &'static str, value: u64, project: &str) -> Refused {
        Refused::Exceeded(Exceeded { limit, value, project: project.to_owned() })
    }

    /// Counts a call in. Hold what it answers until the call is done.
    ///
    /// # Errors
    /// The limit that is reached, or that the broker could not tell.
    pub async fn charge(&self, project: &str, cost: Cost<'_>) -> Result<Creating, Refused> {
        let Limits { requests_per_second: requests, publish_bytes_per_second: bytes, .. } = self.limits;
        let now = Instant::now();
        if requests > 0 && !self.used(project, now, |used| used.requests.take(requests, 1.0, now)) {
            return Err(self.exceeded("LIMIT_REQUESTS_PER_SECOND", requests, project));
        }
        match cost {
            Cost::Call => Ok(None),
            Cost::Publish(size) => {
                if bytes > 0 && !self.used(project, now, |used| used.bytes.take(bytes, size as f64, now)) {
                    return Err(self.exceeded("LIMIT_PUBLISH_BYTES_PER_SECOND", bytes, project));
                }
                let limit = self.limits.backlog_bytes;
                if limit > 0 && self.backlog(project).await? >= limit {
                    return Err(self.exceeded("LIMIT_BACKLOG_BYTES", limit, project));
                }
                Ok(None)
            }
            Cost::Topic(topic) => {
                let limit = ("LIMIT_TOPICS", self.limits.topics);
                self.create(project, Kind::Topic, "topics", limit, topic).await
            }
            Cost::Subscription(subscription) => {
                let limit = ("LIMIT_SUBSCRIPTIONS", self.limits.subscriptions);
                self.create(project, Kind::Subscription, "subscriptions", limit, subscription).await
            }
        }
    }

    async fn create(
        &self,
        project: &str,
        kind: Kind,
        segment: &str,
        (name, limit): (&'static str, u64),
        resource: &str,
    ) -> Result<Creating, Refused> {
        if limit == 0 {
            return Ok(None);
        }
        let failed = |e: BrokerError| Refused::Failed(e.into());
        let creating = self.used(project, Instant::now(), |used| used.creating.clone()).lock_owned().await;
        let prefix = format!("projects/{project}/{segment}/");
        let wanted = usize::try_from(limit).unwrap_or(usize::MAX);
        let broker = self.connector.broker();
        let found = broker.list(kind, &prefix, "", wanted).await.map_err(failed)?;
        // What exists is not made once more, and whoever tries is told so.
        if found.len() < wanted || broker.get(kind, resource).await.map_err(failed)?.is_some() {
            Ok(Some(creating))
        } else {
            Err(self.exceeded(name, limit, project))
        }
    }

    /// The bytes of all backlogs of a project, as of a moment ago.
    async fn backlog(&self, project: &str) -> Result<u64, Refused> {
        let now = Instant::now();
        let known = || self.used(project, now, |used| used.backlog.filter(|(_, at)| at.elapsed() < BACKLOG_AGE));
        if let Some((sum, _)) = known() {
            return Ok(sum);
        }
        let summing = self.used(project, now, |used| used.summing.clone());
        let _one_at_a_time = summing.lock().await;
        if let Some((sum, _)) = known() {
            return Ok(sum);
        }
        let sum = self.sum(project).await.map_err(Refused::Failed)?;
        self.used(project, now, |used| used.backlog = Some((sum, Instant::now())));
        Ok(sum)
    }

    async fn sum(&self, project: &str) -> Result<u64, Error> {
        let broker = self.connector.broker();
        let prefix = format!("projects/{project}/subscriptions/");
        let (mut sum, mut after) = (0_u64, String::new());
        loop {
            let records = broker.list(Kind::Subscription, &prefix, &after, BATCH).await?;
            for record in &records {
                let Ok(name) = SubscriptionName::parse(&record.name) else { continue };
                // One that was deleted in between has no backlog.
                let Ok(entry) = self.connector.subscription(&name).await else { continue };
                sum = sum.saturating_add(broker.stats(&entry.queue).await.map_or(0, |stats| stats.backlog_bytes));
            }
            match records.last() {
                Some(last) if records.len() == BATCH => after.clone_from(&last.name),
                _ => return Ok(sum),
            }
        }
    }
}

/// Why a call is not counted in.
#[derive(Debug)]
pub enum Refused {
    Exceeded(Exceeded),
    Failed(Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_rate_and_may_be_overdrawn_once() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut bucket = Bucket::full(10, start);
        assert_eq!((0..20).filter(|_| bucket.take(10, 1.0, start)).count(), 10);
        assert_eq!((0..20).filter(|_| bucket.take(10, 1.0, at(0.5))).count(), 5);
        assert_eq!((0..20).filter(|_| bucket.take(10, 1.0, at(100.0))).count(), 10);
        let mut bucket = Bucket::full(10, start);
        assert!(bucket.take(10, 30.0, start));
        assert!(!bucket.take(10, 1.0, at(1.9)));
        assert!(bucket.take(10, 1.0, at(2.2)));
    }
}
