//! The use cases on the embedded engine in memory, with a clock that stands still until a test moves it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;

use super::{Connector, Error, Options, PageRequest, SubscriptionView, draft::*};
use crate::{
    broker::{
        Broker, LeaseRequest, Leased, QueueRef, Session,
        embedded::{Clock, Embedded},
        next_session_id,
        redis::{Options as StoreOptions, Redis, tests::server::empty_database},
    },
    model::{EncodedMessage, Subscription, SubscriptionName, Topic, TopicName},
};

mod nodes;
mod publish;
mod snapshots;
mod subscriptions;
mod topics;

const START_MS: u64 = 1_700_000_000_000;

struct Rig {
    connector: Arc<Connector>,
    broker: Arc<Embedded>,
    clock: Arc<AtomicU64>,
}

impl Rig {
    async fn new() -> Self {
        let clock = Arc::new(AtomicU64::new(START_MS));
        let broker = Embedded::memory_with_clock(Clock::Manual(clock.clone()));
        let connector = Connector::open(broker.clone(), Options::default()).await.unwrap();
        Self { connector, broker, clock }
    }

    /// Another node on the same store.
    async fn second_node(&self) -> Arc<Connector> {
        Connector::open(self.broker.clone(), Options::default()).await.unwrap()
    }

    fn advance_ms(&self, ms: u64) {
        self.clock.fetch_add(ms, Ordering::AcqRel);
    }

    async fn topic(&self, id: &str) -> Topic {
        self.connector.create_topic(topic_draft(id)).await.unwrap().topic
    }

    async fn subscription(&self, id: &str, topic: &str) -> Subscription {
        self.connector.create_subscription(subscription_draft(id, topic)).await.unwrap().subscription
    }

    async fn publish(&self, topic: &str, data: &str) -> u64 {
        self.connector.publish(&topic_name(topic), vec![message(data)]).await.unwrap()[0]
    }

    async fn lease(&self, subscription: &Subscription) -> Vec<Leased> {
        let queue = super::catalog::queue_ref(subscription);
        self.lease_from(queue).await
    }

    async fn lease_from(&self, queue: QueueRef) -> Vec<Leased> {
        let session = Session::new(next_session_id());
        let request = LeaseRequest {
            queue,
            session,
            max_messages: 100,
            max_bytes: 1 << 20,
            deadline_ms: 10_000,
            max_inflight: 1000,
            record_version: 0,
        };
        self.broker.lease(request).await.unwrap()
    }

    /// The payloads that are available now, leased by asking.
    async fn pulled(&self, subscription: &Subscription) -> Vec<String> {
        self.lease(subscription).await.iter().map(|leased| payload(&leased.message)).collect()
    }

    async fn acknowledge_all(&self, subscription: &Subscription) {
        let tokens: Vec<_> = self.lease(subscription).await.iter().map(|leased| leased.token).collect();
        self.broker.acknowledge(&super::catalog::queue_ref(subscription), &tokens).await.unwrap();
    }
}

fn payload(wire: &Bytes) -> String {
    String::from_utf8(EncodedMessage::scan(wire.clone()).unwrap().data().to_vec()).unwrap()
}

fn message(data: &str) -> Bytes {
    EncodedMessage::encode(data.as_bytes(), [], "").wire().clone()
}

fn topic_name(id: &str) -> TopicName {
    TopicName::new("p1", id).unwrap()
}

fn subscription_name(id: &str) -> SubscriptionName {
    SubscriptionName::new("p1", id).unwrap()
}

fn topic_draft(id: &str) -> TopicDraft {
    TopicDraft { name: format!("projects/p1/topics/{id}"), ..TopicDraft::default() }
}

fn subscription_draft(id: &str, topic: &str) -> SubscriptionDraft {
    SubscriptionDraft {
        name: format!("projects/p1/subscriptions/{id}"),
        topic: format!("projects/p1/topics/{topic}"),
        ..SubscriptionDraft::default()
    }
}

fn mask(paths: &[&str]) -> Vec<String> {
    paths.iter().map(|path| path.to_string()).collect()
}

fn page(size: i32, token: &str) -> PageRequest {
    PageRequest { size, token: token.into() }
}

#[tokio::test]
async fn nodes_that_start_together_agree_on_the_secret() {
    let broker: Arc<dyn Broker> = Embedded::memory();
    let open = || Connector::open(broker.clone(), Options::default());
    let (a, b, c) = tokio::join!(open(), open(), open());
    let secret = a.unwrap().secret().clone();
    assert_eq!(b.unwrap().secret(), &secret);
    assert_eq!(c.unwrap().secret(), &secret);
    let other = Connector::open(Embedded::memory(), Options::default()).await.unwrap();
    assert_ne!(other.secret(), &secret);
}

#[tokio::test]
async fn an_entry_is_retired_when_its_subscription_changes_on_any_node() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    rig.subscription("s11", "t11").await;
    let other = rig.second_node().await;
    let (name, update) =
        (subscription_name("s11"), SubscriptionDraft { ack_deadline_seconds: 33, ..subscription_draft("s11", "") });
    let (here, there) = (rig.connector.subscription(&name).await.unwrap(), other.subscription(&name).await.unwrap());
    assert!(!here.is_retired() && !there.is_retired());
    rig.connector.update_subscription(update, &mask(&["ack_deadline_seconds"])).await.unwrap();
    assert!(here.is_retired());
    tokio::time::timeout(std::time::Duration::from_secs(10), there.retired()).await.unwrap();
    assert_eq!(rig.connector.subscription(&name).await.unwrap().subscription.ack_deadline_seconds, 33);
    assert_eq!(other.subscription(&name).await.unwrap().subscription.ack_deadline_seconds, 33);

    let last = rig.connector.subscription(&name).await.unwrap();
    rig.connector.delete_subscription(&name).await.unwrap();
    assert!(last.is_retired());
    assert_eq!(rig.connector.subscription(&name).await.unwrap_err(), Error::NotFound("s11".into()));
}
