//! The memory of Redis comes back when nobody needs its messages any more. The embedded broker's disk is looked at where the
//! log is in hand.

use landline::api::proto::pubsub::{DeleteSubscriptionRequest, DetachSubscriptionRequest};

use crate::{
    fixture::{Api, Backend, Fixture, eventually, message, wait::SOON},
    for_redis,
};

for_redis!(
    acknowledged_messages_give_their_memory_back,
    a_deleted_subscription_gives_its_memory_back,
    a_detached_subscription_gives_its_memory_back,
);

const MESSAGES: usize = 400;
const MESSAGE_BYTES: usize = 50_000;
/// What may be left: dictionaries keep their size for a while, and connections their buffers.
const LEFT_BYTES: u64 = 3_000_000;

/// Bytes that Redis has allocated.
fn used(fixture: &Fixture) -> u64 {
    let info = fixture.redis.as_ref().unwrap().command(&["INFO", "memory"]).unwrap();
    let line = info.lines().find_map(|line| line.trim().strip_prefix("used_memory:")).unwrap();
    line.parse().unwrap()
}

/// A subscription whose messages fill Redis, with what Redis used before them.
async fn filled(fixture: &Fixture, api: &Api) -> (String, u64) {
    let (topic, subscription) = api.pair().await;
    api.publish_texts(&topic, &["first"]).await;
    api.take(&subscription).await;
    let before = used(fixture);
    let text = "x".repeat(MESSAGE_BYTES);
    for _ in 0..MESSAGES / 50 {
        api.publish(&topic, (0..50).map(|_| message(&text))).await;
    }
    let full = used(fixture);
    assert!(full - before > (MESSAGES * MESSAGE_BYTES) as u64, "{} bytes", full - before);
    (subscription, before)
}

async fn given_back(fixture: &Fixture, before: u64) {
    eventually("the memory comes back", SOON * 2, async || used(fixture) < before + LEFT_BYTES).await;
}

/// C127
async fn acknowledged_messages_give_their_memory_back(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (subscription, before) = filled(&fixture, &api).await;
    let mut acked = 0;
    while acked < MESSAGES {
        let received = api.pull_once(&subscription, 100).await;
        api.ack(&subscription, &received).await;
        acked += received.len();
    }
    given_back(&fixture, before).await;
}

async fn a_deleted_subscription_gives_its_memory_back(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (subscription, before) = filled(&fixture, &api).await;
    // Some of it leased.
    api.pull_once(&subscription, 100).await;
    api.ok(DeleteSubscriptionRequest { subscription }).await;
    given_back(&fixture, before).await;
}

async fn a_detached_subscription_gives_its_memory_back(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (subscription, before) = filled(&fixture, &api).await;
    api.ok(DetachSubscriptionRequest { subscription }).await;
    given_back(&fixture, before).await;
}
