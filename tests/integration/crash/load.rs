//! Publishers and consumers that note what is confirmed to them.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{FutureExt, future::BoxFuture};
use landline::api::proto::pubsub::{DeadLetterPolicy, PullRequest, RetryPolicy, StreamingPullRequest, Subscription};
use tokio::task::JoinHandle;

use super::audit::Audit;
use crate::fixture::{
    Api, Received,
    api::{acknowledge, modify, publish_request, pull},
    message,
    message::Build,
    stream,
};

/// Clients wait this long after an error before they try again.
const PAUSE: Duration = Duration::from_millis(5);
/// Time a lease of 10 s leaves to settle what was received; later settlements are not booked.
const FRESH: Duration = Duration::from_secs(7);
/// The last leases of dead calls end after 10 s; on a busy machine a little more passes between two messages.
const PATIENCE: Duration = Duration::from_secs(60);
const PUBLISHERS: u64 = 4;
/// Ordering keys of each publisher.
const KEYS: u64 = 4;
/// Publishers wait while so many messages are not settled, so that the end of a run is not a long drain.
const BACKLOG: usize = 600;

/// What a subscription promises.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub name: &'static str,
    pub ordered: bool,
    pub exactly_once: bool,
    /// Of the dead-letter policy; 0 without one.
    pub attempts: i32,
    /// Shortest time from a nack to the next delivery.
    pub backoff: Duration,
    /// How many of a hundred messages the consumers give back.
    nacks: u32,
    /// How many of a hundred they keep on a lease of 600 s until the load stops.
    holds: u32,
}

const PLAIN: Rules =
    Rules { name: "plain", ordered: false, exactly_once: false, attempts: 0, backoff: Duration::ZERO, nacks: 10, holds: 2 };

/// The subscriptions of a run. A held message would block its key, so none is held where there is order.
pub const SUBSCRIPTIONS: [Rules; 7] = [
    PLAIN,
    Rules { name: "once", exactly_once: true, ..PLAIN },
    Rules { name: "counted", attempts: 100, ..PLAIN },
    Rules { name: "buried", attempts: 5, nacks: 50, holds: 0, ..PLAIN },
    Rules { name: "ordered", ordered: true, holds: 0, ..PLAIN },
    Rules { name: "retried", backoff: Duration::from_secs(1), holds: 0, ..PLAIN },
    Rules { name: "strict", ordered: true, exactly_once: true, attempts: 5, nacks: 20, holds: 0, ..PLAIN },
];

/// What the load works on.
pub struct Target {
    topic: String,
    graveyard: String,
    /// Full names, in the order of [`SUBSCRIPTIONS`].
    subscriptions: Vec<String>,
}

impl Target {
    pub async fn create(api: &Api) -> Self {
        let dead = api.create_topic("dead").await;
        let graveyard = api.create_subscription("graveyard", &dead).await;
        let topic = api.create_topic("orders").await;
        let mut subscriptions = Vec::new();
        for rules in SUBSCRIPTIONS {
            let set = |s: &mut Subscription| {
                s.enable_message_ordering = rules.ordered;
                s.enable_exactly_once_delivery = rules.exactly_once;
                let max_delivery_attempts = rules.attempts;
                let policy = DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts };
                s.dead_letter_policy = (max_delivery_attempts > 0).then_some(policy);
                let backoff = |times: u32| prost_types::Duration::try_from(rules.backoff * times).ok();
                let policy = RetryPolicy { minimum_backoff: backoff(1), maximum_backoff: backoff(3) };
                s.retry_policy = (!rules.backoff.is_zero()).then_some(policy);
            };
            subscriptions.push(api.create_subscription_with(rules.name, &topic, set).await);
        }
        Self { topic, graveyard, subscriptions }
    }

    /// Acknowledges until every confirmed message is through, or nothing comes for longer than a lease lasts.
    pub async fn drain(&self, api: &Api, audit: &Audit) {
        let drains = (0..self.subscriptions.len()).map(|number| self.drain_one(api, audit, number));
        futures::future::join_all(drains).await;
    }

    async fn drain_one(&self, api: &Api, audit: &Audit, number: usize) {
        let subscription = &self.subscriptions[number];
        let mut until = Instant::now() + PATIENCE;
        while !audit.complete(number) && Instant::now() < until {
            if SUBSCRIPTIONS[number].attempts > 0 {
                let dead = pull_some(api, &self.graveyard).await;
                dead.iter().for_each(|received| audit.buried(received));
                if !dead.is_empty() {
                    let _ = api.call(acknowledge(&self.graveyard, &dead)).await;
                }
            }
            let batch = pull_some(api, subscription).await;
            if batch.is_empty() {
                tokio::time::sleep(PAUSE * 10).await;
                continue;
            }
            until = Instant::now() + PATIENCE;
            batch.iter().for_each(|received| audit.delivered(number, received));
            if api.call(acknowledge(subscription, &batch)).await.is_ok() {
                batch.iter().for_each(|received| audit.acked(number, received, false));
            }
        }
    }
}

/// What there is now; nothing when the server is away.
#[allow(deprecated)]
async fn pull_some(api: &Api, subscription: &str) -> Vec<Received> {
    let answer = api.call(PullRequest { return_immediately: true, ..pull(subscription, 20) }).await;
    answer.map(|a| a.received_messages.into_iter().map(Received::decode).collect()).unwrap_or_default()
}

/// A message whose lease was extended by 600 s.
struct Held {
    number: usize,
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
    target: Arc<Target>,
    api: Arc<Api>,
    audit: Arc<Audit>,
}

impl Load {
    pub fn start(api: &Arc<Api>, target: &Arc<Target>, audit: &Arc<Audit>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let held = Arc::default();
        let mut tasks = Vec::new();
        for first_key in 0..PUBLISHERS {
            let keys = first_key * KEYS..(first_key + 1) * KEYS;
            tasks.push(tokio::spawn(publish(api.clone(), target.topic.clone(), audit.clone(), stop.clone(), keys)));
        }
        for (number, rules) in SUBSCRIPTIONS.iter().enumerate() {
            let consumer = Consumer {
                api: api.clone(),
                audit: audit.clone(),
                stop: stop.clone(),
                held: Arc::clone(&held),
                target: target.clone(),
                number,
            };
            // Unary pulls and a stream, or two streams.
            if number % 2 == 0 {
                tasks.push(tokio::spawn(consumer.clone().pull()));
            } else {
                tasks.push(tokio::spawn(consumer.clone().stream()));
            }
            if rules.nacks >= 50 {
                tasks.push(tokio::spawn(consumer.clone().bury()));
            }
            tasks.push(tokio::spawn(consumer.stream()));
        }
        Self { stop, tasks, held, target: target.clone(), api: api.clone(), audit: audit.clone() }
    }

    /// Stops the clients; the leases they hold are settled afterwards.
    pub async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("a client of the load");
        }
        let held = std::mem::take(&mut *self.held.lock().expect("the held messages"));
        let (api, audit, target) = (self.api, self.audit, self.target);
        tokio::spawn(async move {
            for Held { number, received, confirmed } in held {
                let subscription = &target.subscriptions[number];
                if !confirmed {
                    // The extension may hold all the same; a nack ends it, and does nothing otherwise.
                    audit.nack_sent(number, &received);
                    let request = modify(subscription, [&received], 0);
                    while api.call(request.clone()).await.is_err_and(|failure| passes(failure.code)) {
                        tokio::time::sleep(PAUSE).await;
                    }
                    continue;
                }
                let request = acknowledge(subscription, [&received]);
                loop {
                    match api.call(request.clone()).await {
                        Ok(_) => break audit.acked(number, &received, false),
                        // The lease may have been lost with a store that failed over.
                        Err(failure) if !passes(failure.code) => break,
                        Err(_) => tokio::time::sleep(PAUSE).await,
                    }
                }
            }
        });
    }
}

/// Whether a repetition of the call may succeed.
fn passes(code: tonic::Code) -> bool {
    matches!(code, tonic::Code::Unavailable | tonic::Code::DeadlineExceeded | tonic::Code::Unknown | tonic::Code::Cancelled)
}

/// Publishes, one request after the other, so that each key's messages have an order.
async fn publish(api: Arc<Api>, topic: String, audit: Arc<Audit>, stop: Arc<AtomicBool>, keys: std::ops::Range<u64>) {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    while !stop.load(Ordering::Relaxed) {
        if audit.behind() > BACKLOG {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        let numbers: Vec<_> = (0..rand::random_range(1..20)).map(|_| NUMBER.fetch_add(1, Ordering::Relaxed)).collect();
        let messages = numbers.iter().map(|number| {
            let key = rand::random_range(keys.start..keys.end + KEYS);
            let key = if keys.contains(&key) { format!("key-{key}") } else { String::new() };
            message(number.to_string()).key(&key)
        });
        match api.call(publish_request(&topic, messages)).await {
            Ok(answer) => {
                assert_eq!(answer.message_ids.len(), numbers.len());
                answer.message_ids.iter().zip(&numbers).for_each(|(id, number)| audit.published(id, *number));
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
    target: Arc<Target>,
    number: usize,
}

/// Acks that went through a stream and are not confirmed, by ack id.
type Sent = HashMap<String, (Received, Instant, bool)>;

impl Consumer {
    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn subscription(&self) -> &str {
        &self.target.subscriptions[self.number]
    }

    /// Takes in what arrives on the dead-letter topic.
    async fn bury(self) {
        while self.running() {
            let dead = pull_some(&self.api, &self.target.graveyard).await;
            dead.iter().for_each(|received| self.audit.buried(received));
            if dead.is_empty() || self.api.call(acknowledge(&self.target.graveyard, &dead)).await.is_err() {
                tokio::time::sleep(PAUSE * 4).await;
            }
        }
    }

    async fn pull(self) {
        while self.running() {
            let received = pull_some(&self.api, self.subscription()).await;
            if received.is_empty() {
                tokio::time::sleep(PAUSE).await;
            }
            let since = Instant::now();
            // All are booked before the first is settled: the client had them together.
            received.iter().for_each(|received| self.audit.delivered(self.number, received));
            for received in received {
                self.settle(received, since).await;
            }
        }
    }

    async fn stream(self) {
        while self.running() {
            let request = StreamingPullRequest { max_outstanding_messages: 20, ..stream::first(self.subscription()) };
            let opening = stream::Stream::open(self.api.channel(), request);
            let Ok(Ok(mut stream)) = tokio::time::timeout(FRESH, opening).await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let (mut sent, mut waiting) = (Sent::new(), VecDeque::new());
            let mut settling: Option<BoxFuture<'_, ()>> = None;
            while self.running() {
                if settling.is_none() {
                    settling = waiting.pop_front().map(|(received, since)| self.settle(received, since).boxed());
                }
                // Read on meanwhile: what arrives is booked when it arrives, however long a server that starts takes to answer.
                let response = tokio::select! {
                    () = async { settling.as_mut().expect("see below").await }, if settling.is_some() => {
                        settling = None;
                        continue;
                    }
                    response = stream.response(Duration::from_millis(100)) => response,
                };
                match response {
                    Ok(Some(response)) => {
                        for id in response.acknowledge_confirmation.iter().flat_map(|c| &c.ack_ids) {
                            let known = sent.remove(id).filter(|(_, since, _)| since.elapsed() < FRESH);
                            if let Some((received, _, impossible)) = known {
                                self.audit.acked(self.number, &received, impossible);
                            }
                        }
                        let since = Instant::now();
                        let received: Vec<_> = response.received_messages.into_iter().map(Received::decode).collect();
                        received.iter().for_each(|received| self.audit.delivered(self.number, received));
                        for received in received {
                            // The stream confirms acks where delivery is exactly-once.
                            if SUBSCRIPTIONS[self.number].exactly_once && rand::random_range(0..3) == 0 {
                                let impossible = self.audit.ack_sent(self.number, &received);
                                stream.ack(&received);
                                sent.insert(received.ack_id.clone(), (received, since, impossible));
                            } else {
                                waiting.push_back((received, since));
                            }
                        }
                    }
                    Err(None) => {}
                    _ => break,
                }
            }
            if let Some(settling) = settling {
                settling.await;
            }
            for (received, since) in waiting {
                self.settle(received, since).await;
            }
        }
    }

    /// Acks most, nacks some, keeps a few.
    async fn settle(&self, received: Received, since: Instant) {
        let (rules, number, subscription) = (&SUBSCRIPTIONS[self.number], self.number, self.subscription());
        let fresh = || since.elapsed() < FRESH;
        let choice = rand::random_range(0..100);
        if choice < rules.nacks {
            let sent = Instant::now();
            self.audit.nack_sent(number, &received);
            if self.api.call(modify(subscription, [&received], 0)).await.is_ok() && fresh() {
                self.audit.nacked(number, &received, sent);
            }
        } else if choice < rules.nacks + rules.holds {
            let confirmed = self.api.call(modify(subscription, [&received], 600)).await.is_ok();
            if confirmed && fresh() {
                self.audit.held(number, &received);
            }
            self.held.lock().expect("the held messages").push(Held { number, received, confirmed });
        } else {
            let impossible = self.audit.ack_sent(number, &received);
            if self.api.call(acknowledge(subscription, [&received])).await.is_ok() && fresh() {
                self.audit.acked(number, &received, impossible);
            }
        }
    }
}
