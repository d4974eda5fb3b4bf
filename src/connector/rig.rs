//! For tests of delivery: a connector on an embedded broker in memory, with resources written straight to the broker and a
//! clock that is set by hand.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt};

use super::{
    Connector, Error, Options,
    catalog::{queue_ref, topic_ref},
    pull::Delivered,
    record,
    session::{Opening, StreamRequest, StreamResponse},
};
use crate::{
    broker::{
        Append, Broker, Change, Effect, Expect, Kind, QueueConfig, Target, TopicConfig,
        embedded::{Clock, Embedded},
    },
    model::{EncodedMessage, Subscription, SubscriptionName, Topic, TopicName},
};

const START_MS: u64 = 1_700_000_000_000;

/// Longest wait of a test for something that must happen. The broker looks at the clock every 20 ms.
const PATIENCE: Duration = Duration::from_secs(20);

pub struct Rig {
    pub connector: Arc<Connector>,
    pub broker: Arc<Embedded>,
    clock: Arc<AtomicU64>,
}

/// A stream's responses.
pub type Responses = std::pin::Pin<Box<dyn Stream<Item = Result<StreamResponse, Error>> + Send>>;

/// A stream's client side.
pub struct Client {
    pub requests: tokio::sync::mpsc::Sender<Result<StreamRequest, Error>>,
    pub responses: Responses,
}

impl Rig {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(adjust: impl FnOnce(&mut Options)) -> Self {
        let clock = Arc::new(AtomicU64::new(START_MS));
        let broker = Embedded::memory_with_clock(Clock::Manual(clock.clone()));
        let mut options = Options { node_id: "n1".into(), ..Options::default() };
        adjust(&mut options);
        let connector = Connector::open(broker.clone(), options).await.unwrap();
        let rig = Self { connector, broker, clock };
        rig.topic("topic").await;
        rig
    }

    /// Another node on the same broker.
    pub async fn node(&self, node_id: &str, adjust: impl FnOnce(&mut Options)) -> Arc<Connector> {
        let mut options = Options { node_id: node_id.into(), ..Options::default() };
        adjust(&mut options);
        Connector::open(self.broker.clone(), options).await.unwrap()
    }

    pub async fn topic(&self, id: &str) -> TopicName {
        let name = TopicName::new("p1", id).unwrap();
        let topic = Topic {
            name: name.clone(),
            incarnation: rand::random(),
            labels: Default::default(),
            message_storage_policy: None,
            kms_key_name: String::new(),
            schema_settings: None,
            message_retention_ms: None,
            message_transforms: Vec::new(),
        };
        let config = TopicConfig { topic: topic_ref(&name, topic.incarnation), retention_ms: None };
        self.change(Kind::Topic, name.as_str(), Some(record::encode(&topic).unwrap()), Effect::OpenTopic(config)).await;
        name
    }

    pub async fn subscription(&self, id: &str, adjust: impl FnOnce(&mut Subscription)) -> SubscriptionName {
        self.subscription_on(id, "topic", adjust).await
    }

    pub async fn subscription_on(&self, id: &str, topic: &str, adjust: impl FnOnce(&mut Subscription)) -> SubscriptionName {
        let name = SubscriptionName::new("p1", id).unwrap();
        let topic = self.connector.topic(&TopicName::new("p1", topic).unwrap()).await.unwrap();
        let topic = &topic.topic;
        let mut subscription = Subscription::plain(name.clone(), rand::random(), topic.name.clone(), topic.incarnation);
        adjust(&mut subscription);
        self.write(&subscription).await;
        name
    }

    /// Changes a subscription.
    pub async fn update(&self, name: &SubscriptionName, adjust: impl FnOnce(&mut Subscription)) {
        let mut subscription = self.connector.subscription(name).await.unwrap().subscription.clone();
        adjust(&mut subscription);
        self.write(&subscription).await;
    }

    async fn write(&self, subscription: &Subscription) {
        let config = QueueConfig {
            queue: queue_ref(subscription),
            topic: topic_ref(&subscription.topic, subscription.topic_incarnation),
            ordered: subscription.enable_message_ordering,
            exactly_once: subscription.enable_exactly_once_delivery,
            retry: subscription.retry_policy,
            max_delivery_attempts: subscription.dead_letter_policy.as_ref().map(|p| p.max_delivery_attempts),
            retention_ms: subscription.message_retention_ms,
            retain_acked: subscription.retain_acked_messages,
        };
        let body = record::encode(subscription).unwrap();
        self.change(Kind::Subscription, subscription.name.as_str(), Some(body), Effect::OpenQueue(config)).await;
    }

    pub async fn delete(&self, name: &SubscriptionName) {
        let queue = self.connector.subscription(name).await.unwrap().queue.clone();
        self.change(Kind::Subscription, name.as_str(), None, Effect::CloseQueue(queue)).await;
    }

    pub async fn delete_topic(&self, name: &TopicName) {
        let topic = self.connector.topic(name).await.unwrap().reference.clone();
        self.change(Kind::Topic, name.as_str(), None, Effect::CloseTopic(topic)).await;
    }

    async fn change(&self, kind: Kind, name: &str, body: Option<bytes::Bytes>, effect: Effect) {
        let found = self.broker.get(kind, name).await.unwrap();
        let expect = found.map_or(Expect::Absent, |record| Expect::Version(record.version));
        self.broker.change(Change { kind, name: name.into(), expect, body, effect }).await.unwrap();
        self.connector.catalog.forget_subscription(name);
        self.connector.catalog.forget_topic(name);
    }

    pub async fn publish(&self, texts: &[&str]) {
        self.publish_to("topic", texts.iter().map(|t| EncodedMessage::encode(t.as_bytes(), [], "")).collect()).await;
    }

    pub async fn publish_to(&self, topic: &str, messages: Vec<EncodedMessage>) {
        let topic = self.connector.topic(&TopicName::new("p1", topic).unwrap()).await.unwrap().reference.clone();
        let route_version = self.broker.route(&topic).await.unwrap().version;
        self.broker.append(Append { topic, messages, targets: Vec::<Target>::new(), route_version }).await.unwrap();
    }

    pub fn pass(&self, time: Duration) {
        self.clock.fetch_add(time.as_millis() as u64, Ordering::AcqRel);
    }

    pub async fn pull(&self, name: &SubscriptionName, max_messages: i32) -> Vec<Delivered> {
        self.connector.pull(name, max_messages, Duration::ZERO).await.unwrap().messages
    }

    /// The texts of what can be pulled now.
    pub async fn texts(&self, name: &SubscriptionName) -> Vec<String> {
        texts(&self.pull(name, 1000).await)
    }

    /// Pulls one message that is on its way.
    pub async fn pull_soon(&self, name: &SubscriptionName) -> Delivered {
        let pulled = self.connector.pull(name, 1, PATIENCE).await.unwrap();
        pulled.messages.into_iter().next().expect("a message within 20 s")
    }

    pub async fn open(&self, name: &SubscriptionName, adjust: impl FnOnce(&mut Opening)) -> Client {
        self.try_open(name, adjust).await.unwrap()
    }

    pub async fn try_open(&self, name: &SubscriptionName, adjust: impl FnOnce(&mut Opening)) -> Result<Client, Error> {
        let mut opening = Opening {
            subscription: name.clone(),
            stream_ack_deadline_seconds: 10,
            max_outstanding_messages: 0,
            max_outstanding_bytes: 0,
            protocol_version: 0,
            request: StreamRequest::default(),
        };
        adjust(&mut opening);
        let (requests, received) = tokio::sync::mpsc::channel(100);
        let received = futures::stream::unfold(received, |mut r| async move { r.recv().await.map(|request| (request, r)) });
        let responses = self.connector.stream(opening, received).await?;
        Ok(Client { requests, responses: Box::pin(responses) })
    }

    /// Messages of the subscription that are leased now.
    pub async fn outstanding(&self, name: &SubscriptionName) -> u64 {
        let queue = self.connector.subscription(name).await.unwrap().queue.clone();
        self.broker.stats(&queue).await.unwrap().outstanding_messages
    }

    /// Messages of the subscription that are not acknowledged.
    pub async fn backlog(&self, name: &SubscriptionName) -> u64 {
        let queue = self.connector.subscription(name).await.unwrap().queue.clone();
        self.broker.stats(&queue).await.unwrap().undelivered_messages
    }
}

impl Client {
    pub async fn next(&mut self) -> StreamResponse {
        self.try_next().await.expect("the stream goes on").unwrap()
    }

    pub async fn try_next(&mut self) -> Option<Result<StreamResponse, Error>> {
        tokio::time::timeout(PATIENCE, self.responses.next()).await.expect("a response within 20 s")
    }

    /// The error that ends the stream; control responses before it are passed over.
    pub async fn end(&mut self) -> Option<Error> {
        loop {
            match self.try_next().await {
                Some(Ok(response)) => assert!(response.messages.is_empty(), "{response:?}"),
                Some(Err(error)) => return Some(error),
                None => return None,
            }
        }
    }

    /// Polls once: the response that is there already.
    pub fn ready(&mut self) -> Option<StreamResponse> {
        use futures::FutureExt;
        self.responses.next().now_or_never().map(|response| response.expect("the stream goes on").unwrap())
    }

    pub async fn send(&self, request: StreamRequest) {
        self.requests.send(Ok(request)).await.unwrap();
    }

    pub async fn ack(&self, messages: &[Delivered]) {
        self.send(StreamRequest { ack_ids: ids(messages), ..Default::default() }).await;
    }

    pub async fn modify(&self, messages: &[Delivered], seconds: i32) {
        self.send(StreamRequest {
            modify_deadline_ack_ids: ids(messages),
            modify_deadline_seconds: vec![seconds; messages.len()],
            ..Default::default()
        })
        .await;
    }
}

pub fn ids(messages: &[Delivered]) -> Vec<String> {
    messages.iter().map(|m| m.ack_id.clone()).collect()
}

pub fn texts(messages: &[Delivered]) -> Vec<String> {
    let text = |m: &Delivered| {
        let data = EncodedMessage::scan(m.message.clone()).unwrap().data().to_vec();
        String::from_utf8_lossy(&data[..data.len().min(40)]).into_owned()
    };
    messages.iter().map(text).collect()
}

/// Waits until a condition holds.
pub async fn eventually<F: Future<Output = bool>>(mut condition: impl FnMut() -> F) {
    let start = std::time::Instant::now();
    while !condition().await {
        assert!(start.elapsed() < PATIENCE, "the condition does not hold after 20 s");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
