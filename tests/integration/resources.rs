//! Many messages, many subscriptions: what is left behind and what idling costs.

use std::time::{Duration, Instant};

use landline::api::proto::pubsub::ListTopicSubscriptionsRequest;

use crate::{
    fixture::{Api, Backend, Fixture, eventually, message, within},
    for_every_backend,
};

for_every_backend!(acked_and_unwanted_messages_leave_nothing_behind, many_subscriptions_with_streams_are_served);

/// What the messages occupy: the server's memory, or Redis's.
fn occupied(fixture: &Fixture) -> u64 {
    let redis = fixture.redis.iter().chain(fixture.cluster.iter().flat_map(|c| &c.nodes));
    let used = redis.map(|r| {
        let info = r.command(&["INFO", "memory"]).expect("the memory of Redis");
        let line = info.lines().find_map(|l| l.strip_prefix("used_memory:")).expect("used_memory");
        line.trim().parse::<u64>().expect("a number")
    });
    used.sum::<u64>() + fixture.nodes.iter().map(|n| n.resident_bytes()).sum::<u64>()
}

/// Bytes of one message: large beside what the allocator keeps back, so that what is measured is messages.
const MESSAGE_BYTES: usize = 10_000;
/// Messages of one publish.
const BATCH: usize = 200;

async fn publish_batches(api: &Api, topic: &str, batches: usize) {
    for _ in 0..batches {
        api.publish(topic, (0..BATCH).map(|n| message(format!("{n:0width$}", width = MESSAGE_BYTES)))).await;
    }
}

/// C173
async fn acked_and_unwanted_messages_leave_nothing_behind(backend: Backend) {
    const BATCHES: usize = 25;
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let unwanted = api.create_topic("unwanted").await;
    let (topic, subscription) = api.pair().await;
    let consume = async |batches: usize| {
        let mut stream = api.stream(&subscription).await;
        for _ in 0..batches {
            publish_batches(&api, &topic, 1).await;
            let received = stream.messages(BATCH).await;
            api.ack(&subscription, &received).await;
        }
    };
    // The first part fills pools and caches; what grows after it is a leak.
    publish_batches(&api, &unwanted, BATCHES).await;
    consume(BATCHES).await;
    let before = occupied(&fixture);
    publish_batches(&api, &unwanted, BATCHES).await;
    consume(BATCHES).await;
    // What was published since, once unwanted and once consumed.
    let published = (2 * BATCHES * BATCH * MESSAGE_BYTES) as u64;
    let mut grown = 0;
    eventually("memory comes back", Duration::from_secs(20), async || {
        grown = occupied(&fixture).saturating_sub(before);
        grown < published / 4
    })
    .await;
    eprintln!("{backend:?}: {before} bytes before, {grown} more after {published} bytes");
    api.assert_drained(&topic, &subscription).await;
}

/// C175
async fn many_subscriptions_with_streams_are_served(backend: Backend) {
    // Redis and the test share the cores with the servers, and each of these messages takes a few calls there.
    let subscriptions = if backend == Backend::Embedded { 1000 } else { 200 };
    const MESSAGES: usize = 10;
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let mut streams = Vec::new();
    for number in 0..subscriptions {
        let subscription = api.create_subscription(&format!("sub-{number:04}"), &topic).await;
        streams.push(api.stream(&subscription).await);
    }
    let request =
        ListTopicSubscriptionsRequest { topic: topic.clone(), page_size: subscriptions as i32 - 1, ..Default::default() };
    assert_eq!(api.ok(request).await.subscriptions.len(), subscriptions - 1);

    let (before, since) = (fixture.nodes[0].cpu_time(), Instant::now());
    assert!(streams[0].try_message(Duration::from_secs(2)).await.is_none());
    let used = fixture.nodes[0].cpu_time() - before;
    assert!(used < since.elapsed() / 5, "{used:?} of processor time with {subscriptions} idle streams");

    for number in 0..MESSAGES {
        api.publish(&topic, [message(number.to_string())]).await;
    }
    let all = streams.iter_mut().map(async |stream| {
        for received in stream.messages(MESSAGES).await {
            stream.ack(&received);
        }
    });
    within(Duration::from_secs(90), "a message for every subscription", futures::future::join_all(all)).await;
}
