//! For tests: a broker with one topic, spoken to through the port, on a clock that is set by hand. Each engine adds how it is
//! started.

pub mod account;
pub mod ledger;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;

use super::{
    Append, Appended, Broker, BrokerError, Change, DeadlineChange, Effect, Expect, Kind, LeaseRequest, LeaseToken, Leased,
    Outcome, QueueConfig, QueueRef, Session, Target, TopicConfig, TopicRef, next_session_id,
};
use crate::model::{EncodedMessage, RetryPolicy};

pub const START_MS: u64 = 1_700_000_000_000;

/// A broker with one topic.
pub struct Rig<B> {
    pub broker: Arc<B>,
    pub clock: Arc<AtomicU64>,
    pub topic: TopicRef,
    /// Of the queues' records, by incarnation.
    pub versions: HashMap<u64, u64>,
}

impl<B: Broker> Rig<B> {
    /// Creates the topic in an empty broker.
    pub async fn with_topic(broker: Arc<B>, clock: Arc<AtomicU64>, retention_ms: Option<u64>) -> Self {
        let topic = TopicRef { channel: "p/topic".into(), incarnation: 1 };
        let rig = Self { broker, clock, topic: topic.clone(), versions: HashMap::new() };
        let effect = Effect::OpenTopic(TopicConfig { topic, retention_ms });
        rig.broker.change(change(Kind::Topic, "topic", Expect::Absent, true, effect)).await.unwrap();
        rig
    }

    pub fn config(&self, incarnation: u64) -> QueueConfig {
        QueueConfig {
            queue: QueueRef { channel: format!("p/s{incarnation}").into(), incarnation },
            topic: self.topic.clone(),
            ordered: false,
            exactly_once: false,
            retry: None,
            max_delivery_attempts: None,
            retention_ms: 7 * 86_400_000,
            retain_acked: false,
        }
    }

    pub async fn queue(&mut self, incarnation: u64, adjust: impl FnOnce(&mut QueueConfig)) -> QueueRef {
        let mut config = self.config(incarnation);
        adjust(&mut config);
        let queue = config.queue.clone();
        let expect = self.versions.get(&incarnation).map_or(Expect::Absent, |v| Expect::Version(*v));
        let name = format!("s{incarnation}");
        let version =
            self.broker.change(change(Kind::Subscription, &name, expect, true, Effect::OpenQueue(config))).await.unwrap();
        self.versions.insert(incarnation, version);
        queue
    }

    pub async fn snapshot(&self, snapshot: u64, queue: &QueueRef) {
        let effect = Effect::TakeSnapshot { snapshot, queue: queue.clone() };
        let name = format!("snapshot{snapshot}");
        self.broker.change(change(Kind::Snapshot, &name, Expect::Absent, true, effect)).await.unwrap();
    }

    pub async fn publish(&self, texts: &[&str]) -> Vec<u64> {
        self.publish_keyed(&texts.iter().map(|t| (*t, "")).collect::<Vec<_>>()).await
    }

    pub async fn publish_keyed(&self, messages: &[(&str, &str)]) -> Vec<u64> {
        self.publish_filtered(messages, Vec::new()).await
    }

    pub async fn publish_filtered(&self, messages: &[(&str, &str)], targets: Vec<Target>) -> Vec<u64> {
        let encoded = messages.iter().map(|(text, key)| EncodedMessage::encode(text.as_bytes(), [], key)).collect();
        self.append(encoded, targets).await.unwrap().message_ids
    }

    /// Appends with the route as it is now; `filtered` are the targets that leave something out.
    pub async fn append(&self, messages: Vec<EncodedMessage>, filtered: Vec<Target>) -> Result<Appended, BrokerError> {
        let route = self.broker.route(&self.topic).await?;
        let targets = route.subscriptions.iter().map(|attached| {
            let queue = QueueRef { channel: format!("p/{}", attached.name).into(), incarnation: attached.incarnation };
            let known = filtered.iter().find(|t| t.queue == queue).cloned();
            known.unwrap_or(Target { queue, filtered: Vec::new() })
        });
        let targets = targets.collect();
        self.broker.append(Append { topic: self.topic.clone(), messages, targets, route_version: route.version }).await
    }

    pub fn session(&self, queue: &QueueRef) -> Arc<Session> {
        let session = Session::new(next_session_id());
        self.broker.attach(queue, &session);
        session
    }

    pub async fn lease(&self, queue: &QueueRef, session: &Arc<Session>, max_messages: usize) -> Vec<Leased> {
        self.broker.lease(lease_request(queue, session, max_messages)).await.unwrap()
    }

    pub async fn pull(&self, queue: &QueueRef, max_messages: usize) -> Vec<Leased> {
        self.lease(queue, &Session::new(next_session_id()), max_messages).await
    }

    pub async fn texts(&self, queue: &QueueRef, max_messages: usize) -> Vec<String> {
        self.pull(queue, max_messages).await.iter().map(text).collect()
    }

    pub async fn ack(&self, queue: &QueueRef, leased: &[Leased]) -> Vec<Outcome> {
        self.broker.acknowledge(queue, &tokens(leased)).await.unwrap()
    }

    pub async fn modify(&self, queue: &QueueRef, leased: &[Leased], deadline_ms: u64) -> Vec<Outcome> {
        let change = |l: &Leased| DeadlineChange { token: l.token, deadline_ms, bypass_backoff: false, max_life_ms: 0 };
        self.broker.modify_deadlines(queue, &leased.iter().map(change).collect::<Vec<_>>()).await.unwrap()
    }

    pub fn pass(&self, ms: u64) {
        self.clock.fetch_add(ms, Ordering::AcqRel);
    }

    pub fn now_ms(&self) -> u64 {
        self.clock.load(Ordering::Acquire)
    }
}

pub fn lease_request(queue: &QueueRef, session: &Arc<Session>, max_messages: usize) -> LeaseRequest {
    LeaseRequest {
        queue: queue.clone(),
        session: session.clone(),
        max_messages,
        max_bytes: u64::MAX,
        deadline_ms: 10_000,
        max_inflight: 20_000,
        record_version: 0,
    }
}

pub fn tokens(leased: &[Leased]) -> Vec<LeaseToken> {
    leased.iter().map(|l| l.token).collect()
}

pub fn change(kind: Kind, name: &str, expect: Expect, present: bool, effect: Effect) -> Change {
    Change { kind, name: name.into(), expect, body: present.then(|| Bytes::from_static(b"{}")), effect }
}

/// The payload of a leased message.
pub fn text(leased: &Leased) -> String {
    let message = EncodedMessage::scan(leased.message.clone()).unwrap();
    String::from_utf8(message.data().to_vec()).unwrap()
}

pub fn retry(minimum_backoff_ms: u64, maximum_backoff_ms: u64) -> Option<RetryPolicy> {
    Some(RetryPolicy { minimum_backoff_ms, maximum_backoff_ms })
}
