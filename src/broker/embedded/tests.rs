//! The engine through the port, on a clock that is set by hand, checked against what the port promises.

mod model;
mod promises;
mod room;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::*;
use crate::{
    broker::{Expect, QueueConfig, Target, TopicConfig, next_session_id},
    model::{EncodedMessage, RetryPolicy},
};

pub const START_MS: u64 = 1_700_000_000_000;

/// Of a broker on disk: so small that tests fill several.
pub const SEGMENT_BYTES: u32 = 256 << 10;

/// A broker with one topic, on a clock that is set by hand.
pub struct Rig {
    pub broker: Arc<Embedded>,
    pub clock: Arc<AtomicU64>,
    pub topic: TopicRef,
    versions: std::collections::HashMap<u64, u64>,
}

impl Rig {
    pub async fn new() -> Self {
        Self::with_topic_retention(None).await
    }

    pub async fn with_topic_retention(retention_ms: Option<u64>) -> Self {
        let clock = Arc::new(AtomicU64::new(START_MS));
        let broker = Embedded::memory_with_clock(Clock::Manual(clock.clone()));
        Self::on(broker, clock, retention_ms).await
    }

    /// A broker on disk, with small segments.
    pub async fn on_disk(directory: &Path) -> Self {
        let clock = Arc::new(AtomicU64::new(START_MS));
        let broker = Self::open(directory, &clock);
        Self::on(broker, clock, None).await
    }

    /// Nothing is synced: the process doesn't die with the power.
    fn open(directory: &Path, clock: &Arc<AtomicU64>) -> Arc<Embedded> {
        let segment_bytes = SEGMENT_BYTES;
        let options = LogOptions { segment_bytes, ..LogOptions::on_disk(directory, Durability::None) };
        Embedded::start(options, Clock::Manual(clock.clone())).unwrap()
    }

    /// The broker again, from what is on disk.
    pub fn restart(self, directory: &Path) -> Self {
        let Self { broker, clock, topic, versions } = self;
        drop(broker);
        let broker = Self::open(directory, &clock);
        Self { broker, clock, topic, versions }
    }

    pub async fn on(broker: Arc<Embedded>, clock: Arc<AtomicU64>, retention_ms: Option<u64>) -> Self {
        let topic = TopicRef { channel: "p/topic".into(), incarnation: 1 };
        let rig = Self { broker, clock, topic: topic.clone(), versions: Default::default() };
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
        let messages = messages.iter().map(|(text, key)| EncodedMessage::encode(text.as_bytes(), [], key)).collect();
        let route_version = self.broker.route(&self.topic).await.unwrap().version;
        let append = Append { topic: self.topic.clone(), messages, targets, route_version };
        self.broker.append(append).await.unwrap().message_ids
    }

    /// Empties segments with at most `sparse` needed bytes, as a checkpoint does, and takes the checkpoint that lets go of
    /// them.
    pub fn gather(&self, sparse: u64, directory: Option<&Path>) {
        let shared = &self.broker.shared;
        while let Err(error) = gather::gather_where(shared, sparse, u64::from(SEGMENT_BYTES)) {
            assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
            std::thread::yield_now();
        }
        checkpoint::write(shared, directory).unwrap();
    }

    pub fn session(&self, queue: &QueueRef) -> Arc<Session> {
        let session = Session::new(next_session_id());
        self.broker.attach(queue, &session);
        session
    }

    pub async fn lease(&self, queue: &QueueRef, session: &Arc<Session>, max_messages: usize) -> Vec<Leased> {
        let request = LeaseRequest {
            queue: queue.clone(),
            session: session.clone(),
            max_messages,
            max_bytes: u64::MAX,
            deadline_ms: 10_000,
            max_inflight: 20_000,
        };
        self.broker.lease(request).await.unwrap()
    }

    pub async fn pull(&self, queue: &QueueRef, max_messages: usize) -> Vec<Leased> {
        self.lease(queue, &Session::new(next_session_id()), max_messages).await
    }

    pub async fn texts(&self, queue: &QueueRef, max_messages: usize) -> Vec<String> {
        self.pull(queue, max_messages).await.iter().map(text).collect()
    }

    pub async fn ack(&self, queue: &QueueRef, leased: &[Leased]) -> Vec<Outcome> {
        let tokens: Vec<_> = leased.iter().map(|l| l.token).collect();
        self.broker.acknowledge(queue, &tokens).await.unwrap()
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

#[tokio::test]
async fn leases_that_run_out_are_counted_since_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(folder.path()).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["a", "b", "c"]).await;
    let expired = async |rig: &Rig| rig.broker.stats(&queue).await.unwrap().expired_leases;
    let leased = rig.pull(&queue, 3).await;
    rig.modify(&queue, &leased[..1], 0).await;
    assert_eq!(expired(&rig).await, Some(0));
    rig.pass(10_050);
    assert_eq!(expired(&rig).await, Some(2));
    let rig = rig.restart(folder.path());
    assert_eq!(expired(&rig).await, Some(0));
}
