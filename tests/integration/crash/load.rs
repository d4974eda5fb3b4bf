//! Publishers and consumers that note what is confirmed to them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::DeadLetterPolicy;
use tokio::task::JoinHandle;

use super::audit::Audit;
use crate::fixture::{
    Api, Received,
    api::{acknowledge, modify, publish_request},
    message, stream,
};

/// Clients wait this long after an error before they try again.
const PAUSE: Duration = Duration::from_millis(5);
/// Time a lease of 10 s leaves to settle what was received; later settlements are not booked.
const FRESH: Duration = Duration::from_secs(7);
/// The last leases of dead calls end after 10 s; on a busy machine a little more passes between two messages.
const PATIENCE: Duration = Duration::from_secs(40);

/// What the load works on.
pub struct Target {
    topic: String,
    subscriptions: Vec<String>,
}

impl Target {
    /// One subscription each: plain, exactly-once, and with attempts counted.
    pub async fn create(api: &Api) -> Self {
        let dead = api.create_topic("dead").await;
        let topic = api.create_topic("orders").await;
        let plain = api.create_subscription("plain", &topic).await;
        let once = api.create_subscription_with("once", &topic, |s| s.enable_exactly_once_delivery = true).await;
        let policy = DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 100 };
        let counted = api.create_subscription_with("counted", &topic, |s| s.dead_letter_policy = Some(policy)).await;
        Self { topic, subscriptions: vec![plain, once, counted] }
    }

    /// Acknowledges until every confirmed message is through, or nothing comes for longer than a lease lasts.
    pub async fn drain(&self, api: &Api, audit: &Audit) {
        let drains = self.subscriptions.iter().map(|subscription| drain(api, audit, subscription));
        futures::future::join_all(drains).await;
    }
}

async fn drain(api: &Api, audit: &Audit, subscription: &str) {
    let mut until = Instant::now() + PATIENCE;
    while !audit.complete(subscription) && Instant::now() < until {
        let batch = api.pull_now(subscription, 1000).await;
        if batch.is_empty() {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        until = Instant::now() + PATIENCE;
        batch.iter().for_each(|received| audit.delivered(subscription, received));
        if api.call(acknowledge(subscription, &batch)).await.is_ok() {
            batch.iter().for_each(|received| audit.acked(subscription, received.id()));
        }
    }
}

/// A message whose lease was extended by 600 s.
struct Held {
    subscription: String,
    received: Received,
    /// Whether the server said so.
    confirmed: bool,
}

/// Running clients.
pub struct Load {
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
    /// Messages whose lease is kept on purpose, to be acked when the load ends.
    held: Arc<std::sync::Mutex<Vec<Held>>>,
    api: Arc<Api>,
    audit: Arc<Audit>,
}

impl Load {
    pub fn start(api: &Arc<Api>, target: &Target, audit: &Arc<Audit>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let held = Arc::default();
        let mut tasks = Vec::new();
        for _ in 0..4 {
            tasks.push(tokio::spawn(publish(api.clone(), target.topic.clone(), audit.clone(), stop.clone())));
        }
        for (number, subscription) in target.subscriptions.iter().enumerate() {
            let consumer = Consumer {
                api: api.clone(),
                audit: audit.clone(),
                stop: stop.clone(),
                held: Arc::clone(&held),
                subscription: subscription.clone(),
            };
            // Unary pulls on one of two, streams on both.
            if number % 2 == 0 {
                tasks.push(tokio::spawn(consumer.clone().pull()));
            }
            tasks.push(tokio::spawn(consumer.stream()));
        }
        Self { stop, tasks, held, api: api.clone(), audit: audit.clone() }
    }

    /// Stops the clients after a kill; the leases they hold are settled once the server is back.
    pub async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("a client of the load");
        }
        let held = std::mem::take(&mut *self.held.lock().expect("the held messages"));
        let (api, audit) = (self.api, self.audit);
        tokio::spawn(async move {
            for Held { subscription, received, confirmed } in held {
                // An extension that nobody confirmed may hold all the same; a nack ends it, and does nothing otherwise.
                while !confirmed && api.call(modify(&subscription, [&received], 0)).await.is_err() {
                    tokio::time::sleep(PAUSE).await;
                }
                while confirmed && api.call(acknowledge(&subscription, [&received])).await.is_err() {
                    tokio::time::sleep(PAUSE).await;
                }
                if confirmed {
                    audit.acked(&subscription, received.id());
                }
            }
        });
    }
}

async fn publish(api: Arc<Api>, topic: String, audit: Arc<Audit>, stop: Arc<AtomicBool>) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    while !stop.load(Ordering::Relaxed) {
        let texts: Vec<_> = (0..rand::random_range(1..20)).map(|_| NUMBER.fetch_add(1, Ordering::Relaxed).to_string()).collect();
        match api.call(publish_request(&topic, texts.iter().map(message))).await {
            Ok(answer) => {
                assert_eq!(answer.message_ids.len(), texts.len());
                answer.message_ids.iter().zip(&texts).for_each(|(id, text)| audit.published(id, text));
            }
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

#[derive(Clone)]
struct Consumer {
    api: Arc<Api>,
    audit: Arc<Audit>,
    stop: Arc<AtomicBool>,
    held: Arc<std::sync::Mutex<Vec<Held>>>,
    subscription: String,
}

impl Consumer {
    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    async fn pull(self) {
        #[allow(deprecated)]
        let request = landline::api::proto::pubsub::PullRequest {
            return_immediately: true,
            ..crate::fixture::api::pull(&self.subscription, 20)
        };
        while self.running() {
            let Ok(answer) = self.api.call(request.clone()).await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            for received in answer.received_messages.into_iter().map(Received::decode) {
                self.settle(received).await;
            }
        }
    }

    async fn stream(self) {
        while self.running() {
            let request = landline::api::proto::pubsub::StreamingPullRequest {
                max_outstanding_messages: 20,
                ..stream::first(&self.subscription)
            };
            let Ok(mut stream) = stream::Stream::open(self.api.channel(), request).await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            while self.running() {
                match stream.response(Duration::from_millis(100)).await {
                    Ok(Some(response)) => {
                        for received in response.received_messages.into_iter().map(Received::decode) {
                            self.settle(received).await;
                        }
                    }
                    Err(None) => {}
                    _ => break,
                }
            }
        }
    }

    /// Acks most, nacks some, keeps a few.
    async fn settle(&self, received: Received) {
        let since = Instant::now();
        self.audit.delivered(&self.subscription, &received);
        let (subscription, id) = (&self.subscription, received.id().to_owned());
        let fresh = || since.elapsed() < FRESH;
        match rand::random_range(0..100) {
            0..10 => {
                if self.api.call(modify(subscription, [&received], 0)).await.is_ok() && fresh() {
                    self.audit.nacked(subscription, &id);
                }
            }
            10..12 => {
                let confirmed = self.api.call(modify(subscription, [&received], 600)).await.is_ok();
                if confirmed && fresh() {
                    self.audit.held(subscription, &id);
                }
                self.held.lock().expect("the held messages").push(Held {
                    subscription: subscription.clone(),
                    received,
                    confirmed,
                });
            }
            _ => {
                self.audit.ack_sent(subscription, &id);
                if self.api.call(acknowledge(subscription, [&received])).await.is_ok() && fresh() {
                    self.audit.acked(subscription, &id);
                }
            }
        }
    }
}
