//! Retry policies and dead letters.

use std::time::{Duration, Instant};

use landline::api::proto::pubsub::{DeadLetterPolicy, PubsubMessage, RetryPolicy, Subscription};
use tonic::Code;

use crate::{
    fixture::{
        Api, Backend, Fixture, eventually, message,
        message::{Build, texts},
        seconds,
        wait::{SOON, assert_took},
    },
    for_durable_backends, for_every_backend, for_one_backend,
};

for_every_backend!(
    a_backoff_grows_and_does_not_jam_others,
    attempts_are_counted_only_with_a_policy,
    the_last_attempt_is_followed_by_the_dead_letter_topic,
    an_expiry_counts_as_an_attempt,
    a_missing_dead_letter_topic_loses_nothing,
    dead_letter_loops_do_bounded_work,
    a_message_at_the_attribute_limit_is_forwarded,
);
for_one_backend!(bad_dead_letter_policies_are_refused, a_nack_loop_does_not_spin_the_server, a_nack_can_bypass_the_backoff);
for_durable_backends!(a_dead_letter_is_forwarded_across_a_crash);

/// Longest time for which the connector holds a dead letter that it forwards, and a moment.
const HOLD: Duration = Duration::from_secs(25);

fn backoff(min: i64, max: i64) -> Option<RetryPolicy> {
    Some(RetryPolicy { minimum_backoff: Some(seconds(min)), maximum_backoff: Some(seconds(max)) })
}

fn policy(topic: &str) -> Option<DeadLetterPolicy> {
    Some(DeadLetterPolicy { dead_letter_topic: topic.to_owned(), max_delivery_attempts: 5 })
}

/// Dead-letter topic, its subscription, source topic, its subscription.
async fn with_graveyard(api: &Api, set: impl FnOnce(&mut Subscription)) -> [String; 4] {
    let dead = api.create_topic("dead").await;
    let graveyard = api.create_subscription("graveyard", &dead).await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.dead_letter_policy = policy(&dead);
            set(s);
        })
        .await;
    [dead, graveyard, topic, subscription]
}

/// C104
async fn a_backoff_grows_and_does_not_jam_others(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.retry_policy = backoff(4, 600)).await;
    let mut stream = api.stream_with(&subscription, |r| r.max_outstanding_messages = 1).await;
    api.publish_texts(&topic, &["poison"]).await;
    let poison = stream.message().await;
    let since = Instant::now();
    stream.nack(&poison);
    for n in 0..10 {
        api.publish_texts(&topic, &[&format!("good{n}")]).await;
        let good = stream.message().await;
        assert_eq!(good.text(), format!("good{n}"));
        stream.ack(&good);
    }
    let poison = stream.message().await;
    assert_eq!(poison.text(), "poison");
    assert_took(since, 3.95, 1.5, "the first backoff of 4 s");
    // The backoff applies to an expiry as to a nack, and is longer the second time.
    let since = Instant::now();
    stream.send(crate::fixture::stream::deadlines(&[(&poison.ack_id, 1)]));
    let poison = stream.message().await;
    let took = since.elapsed();
    assert!(took > Duration::from_millis(5100), "{took:?} for a lease of 1 s and a second backoff");
    stream.ack(&poison);
}

/// Rule of the connector: CONNECTORS_GCP_NACK_BYPASSES_BACKOFF lets a nack skip the backoff, not an expiry.
async fn a_nack_can_bypass_the_backoff(backend: Backend) {
    let settings = [("NACK_BYPASSES_BACKOFF", "true"), ("MIN_ACK_EXTENSION_SECONDS", "0")];
    let fixture = Fixture::start_with(backend, &settings).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.retry_policy = backoff(2, 2)).await;
    api.publish_texts(&topic, &["m1"]).await;
    let received = api.pull(&subscription, 1).await;
    let since = Instant::now();
    api.nack(&subscription, &received).await;
    let received = api.pull(&subscription, 1).await;
    assert!(since.elapsed() < Duration::from_millis(1900), "{:?}", since.elapsed());
    let since = Instant::now();
    api.extend(&subscription, &received, 1).await;
    api.pull(&subscription, 1).await;
    assert_took(since, 2.9, 1.5, "a lease of 1 s and a backoff of 2 s");
}

/// C103: the nacks of a busy client are its own; the server's part of it stays small.
async fn a_nack_loop_does_not_spin_the_server(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish_texts(&topic, &["m1"]).await;
    let mut stream = api.stream(&subscription).await;
    for _ in 0..200 {
        let received = stream.message().await;
        stream.nack(&received);
    }
    let received = stream.message().await;
    stream.ack(&received);
    // Idle afterwards: neither the stream nor the queue polls.
    let (before, since) = (fixture.nodes[0].cpu_time(), Instant::now());
    assert!(stream.try_message(Duration::from_secs(2)).await.is_none());
    let used = fixture.nodes[0].cpu_time() - before;
    assert!(used < since.elapsed() / 10, "{used:?} of processor time while idle");
}

/// C106
async fn attempts_are_counted_only_with_a_policy(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let dead = api.create_topic("dead").await;
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1"]).await;
        for _ in 0..3 {
            let received = api.pull(&subscription, 1).await;
            assert_eq!(received[0].delivery_attempt, 0);
            api.nack(&subscription, &received).await;
        }
        let set = |s: &mut Subscription| s.dead_letter_policy = policy(&dead);
        api.update_subscription(&subscription, &["dead_letter_policy"], set).await.unwrap();
        let received = api.pull(&subscription, 1).await;
        assert!((1..=4).contains(&received[0].delivery_attempt), "{}", received[0].delivery_attempt);
        api.ack(&subscription, &received).await;
        api.publish_texts(&topic, &["m2"]).await;
        for attempt in 1..=3 {
            let received = api.pull(&subscription, 1).await;
            assert_eq!((received[0].text(), received[0].delivery_attempt), ("m2", attempt));
            // An extension is no attempt.
            api.extend(&subscription, &received, 20).await;
            api.extend(&subscription, &received, 30).await;
            api.nack(&subscription, &received).await;
        }
    }
}

/// C107, and the attributes of the forwarded message.
async fn the_last_attempt_is_followed_by_the_dead_letter_topic(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let [dead, graveyard, topic, subscription] = with_graveyard(&api, |_| {}).await;
        let ids = api.publish(&topic, [message("m1").attribute("color", "red").key("k")]).await;
        let mut published = None;
        for attempt in 1..=5 {
            let received = api.pull(&subscription, 1).await;
            assert_eq!(received[0].delivery_attempt, attempt);
            published = received[0].message.publish_time;
            api.nack(&subscription, &received).await;
        }
        let buried = api.take(&graveyard).await;
        assert_eq!((buried.text(), buried.message.ordering_key.as_str()), ("m1", "k"));
        assert_ne!(buried.id(), ids[0]);
        let attribute = |name: &str| buried.message.attributes.get(name).map(String::as_str);
        assert_eq!(attribute("color"), Some("red"));
        assert_eq!(attribute("CloudPubSubDeadLetterSourceDeliveryCount"), Some("5"));
        assert_eq!(attribute("CloudPubSubDeadLetterSourceSubscription"), Some("billing"));
        assert_eq!(attribute("CloudPubSubDeadLetterSourceSubscriptionProject"), Some(api.project.as_str()));
        let time = attribute("CloudPubSubDeadLetterSourceTopicPublishTime").unwrap();
        let parsed: prost_types::Timestamp = time.parse().unwrap_or_else(|e| panic!("{time}: {e}"));
        assert_eq!(Some(parsed), published, "{time}");
        api.assert_drained(&topic, &subscription).await;
        api.assert_drained(&dead, &graveyard).await;
    }
}

/// C107, by expiry
async fn an_expiry_counts_as_an_attempt(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    let api = fixture.api().await;
    let [_, graveyard, topic, subscription] = with_graveyard(&api, |_| {}).await;
    api.publish_texts(&topic, &["m1"]).await;
    for attempt in 1..=5 {
        let received = api.pull(&subscription, 1).await;
        assert_eq!(received[0].delivery_attempt, attempt);
        if attempt % 2 == 0 {
            api.nack(&subscription, &received).await;
        } else {
            api.extend(&subscription, &received, 1).await;
        }
    }
    let buried = api.take(&graveyard).await;
    assert_eq!(buried.message.attributes["CloudPubSubDeadLetterSourceDeliveryCount"], "5");
    api.assert_drained(&topic, &subscription).await;
}

/// C109
async fn bad_dead_letter_policies_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let dead = api.create_topic("dead").await;
        let (topic, subscription) = api.pair().await;
        let cases = [
            (dead.as_str(), 4, Code::InvalidArgument),
            (&dead, 101, Code::InvalidArgument),
            (&dead, -1, Code::InvalidArgument),
            (&api.topic("none"), 5, Code::NotFound),
            ("dead", 5, Code::InvalidArgument),
            ("", 5, Code::InvalidArgument),
            (&subscription, 5, Code::InvalidArgument),
        ];
        for (number, (target, max_delivery_attempts, expected)) in cases.into_iter().enumerate() {
            let policy = Some(DeadLetterPolicy { dead_letter_topic: target.to_owned(), max_delivery_attempts });
            let set = |s: &mut Subscription| s.dead_letter_policy = policy.clone();
            let updated = api.update_subscription(&subscription, &["dead_letter_policy"], set).await;
            assert_eq!(updated.unwrap_err().code, expected, "update {policy:?}");
            let name = api.subscription(&format!("bad{number}"));
            let mut request = Subscription { name, topic: topic.clone(), ..Default::default() };
            set(&mut request);
            assert_eq!(api.fails(request).await, expected, "create {policy:?}");
        }
        let set = |s: &mut Subscription| {
            s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 0 });
        };
        let updated = api.update_subscription(&subscription, &["dead_letter_policy"], set).await.unwrap();
        assert_eq!(updated.dead_letter_policy.unwrap().max_delivery_attempts, 5);
    }
}

async fn exhaust(api: &Api, subscription: &str) {
    for _ in 1..=5 {
        let received = api.pull(subscription, 1).await;
        api.nack(subscription, &received).await;
    }
}

/// C110
async fn a_missing_dead_letter_topic_loses_nothing(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let [dead, _, topic, subscription] = with_graveyard(&api, |_| {}).await;
    api.publish_texts(&topic, &["m1"]).await;
    api.delete_topic(&dead).await;
    exhaust(&api, &subscription).await;
    // It stays on the source and is delivered again ...
    let received = api.pull(&subscription, 1).await;
    assert_eq!(received[0].text(), "m1");
    // ... until there is a topic to take it.
    let other = api.create_topic("other").await;
    let graveyard = api.create_subscription("second-graveyard", &other).await;
    let set = |s: &mut Subscription| s.dead_letter_policy = policy(&other);
    api.update_subscription(&subscription, &["dead_letter_policy"], set).await.unwrap();
    api.nack(&subscription, &received).await;
    assert_eq!(api.take(&graveyard).await.text(), "m1");
    api.assert_drained(&topic, &subscription).await;
}

/// C112
async fn dead_letter_loops_do_bounded_work(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("own").await;
    let own = api.create_subscription_with("own", &topic, |s| s.dead_letter_policy = policy(&topic)).await;
    api.publish_texts(&topic, &["m1"]).await;
    exhaust(&api, &own).await;
    // One exhaustion, one publish: the message starts anew, once.
    let again = api.pull(&own, 1).await;
    assert_eq!((again[0].text(), again[0].delivery_attempt), ("m1", 1));
    assert!(api.pull_now(&own, 10).await.is_empty());

    let (left, right) = (api.create_topic("left").await, api.create_topic("right").await);
    let on_left = api.create_subscription_with("on-left", &left, |s| s.dead_letter_policy = policy(&right)).await;
    let on_right = api.create_subscription_with("on-right", &right, |s| s.dead_letter_policy = policy(&left)).await;
    api.publish_texts(&left, &["m2"]).await;
    exhaust(&api, &on_left).await;
    exhaust(&api, &on_right).await;
    let again = api.pull(&on_left, 1).await;
    assert_eq!((again[0].text(), again[0].delivery_attempt), ("m2", 1));
    assert!(api.pull_now(&on_right, 10).await.is_empty());
}

/// C113
async fn a_message_at_the_attribute_limit_is_forwarded(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let [_, graveyard, topic, subscription] = with_graveyard(&api, |_| {}).await;
    let attributes = (0..100).map(|n| (format!("k{n}"), "v".repeat(1024))).collect();
    api.publish(&topic, [PubsubMessage { attributes, ..message("full") }]).await;
    exhaust(&api, &subscription).await;
    let buried = api.take(&graveyard).await;
    assert_eq!(buried.message.attributes.len(), 104);
    api.assert_drained(&topic, &subscription).await;
}

/// No dead letter is lost when the server dies before or while it forwards; it may be forwarded twice.
async fn a_dead_letter_is_forwarded_across_a_crash(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let mut api = fixture.api().await;
    let [_, graveyard, topic, subscription] = with_graveyard(&api, |_| {}).await;
    let sent: Vec<_> = (0..20).map(|n| format!("m{n:02}")).collect();
    api.publish(&topic, sent.iter().map(message)).await;
    for _ in 1..=5 {
        let received = api.pull(&subscription, 20).await;
        assert_eq!(received.len(), 20);
        api.nack(&subscription, &received).await;
    }
    fixture.crash_and_restart();
    api = fixture.api_of_node(0, &api).await;
    let mut got = std::collections::BTreeSet::new();
    // What the dead server was forwarding is held for it a while, where others may be at work as well.
    eventually("all dead letters are forwarded", HOLD + SOON, async || {
        let received = api.pull_once(&graveyard, 20).await;
        got.extend(texts(&received).into_iter().map(str::to_owned));
        if !received.is_empty() {
            api.ack(&graveyard, &received).await;
        }
        got.len() >= sent.len()
    })
    .await;
    assert_eq!(got.into_iter().collect::<Vec<_>>(), sent);
    api.assert_drained(&topic, &subscription).await;
}
