use std::time::Duration;

use super::*;
use crate::{
    connector::rig::{Rig, eventually, ids, texts},
    model::{DeadLetterPolicy, EncodedMessage},
};

#[tokio::test]
async fn a_pull_takes_all_it_asked_for() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a", "b", "c", "d"]).await;
    assert_eq!(texts(&rig.pull(&sub, 3).await), ["a", "b", "c"]);
    assert_eq!(texts(&rig.pull(&sub, 10_000).await), ["d"]);
    assert!(rig.pull(&sub, 1).await.is_empty());
}

#[tokio::test]
async fn a_pull_for_less_than_one_message_is_refused() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    for count in [0, -1] {
        let error = rig.connector.pull(&sub, count, Duration::ZERO).await.err().unwrap();
        assert_eq!(error.to_string(), "You have passed an invalid argument to the service (argument=max_messages).");
    }
}

#[tokio::test]
async fn a_pull_stops_before_its_limit_and_gives_the_rest_back_uncounted() {
    let rig = Rig::new().await;
    let policy = DeadLetterPolicy { dead_letter_topic: None, max_delivery_attempts: 5 };
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = Some(policy)).await;
    let large = vec![b'x'; MAX_PULL_BYTES / 2 - 100];
    rig.publish_to("topic", (0..3).map(|_| EncodedMessage::encode(&large, [], "")).collect()).await;
    let first = rig.pull(&sub, 10).await;
    assert_eq!(first.len(), 2);
    rig.connector.acknowledge(&sub, &ids(&first)).await.unwrap();
    assert_eq!(rig.pull_soon(&sub).await.delivery_attempt, 1);
}

#[tokio::test]
async fn a_message_larger_than_the_limit_is_still_pulled() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish_to("topic", vec![EncodedMessage::encode(&vec![b'x'; MAX_PULL_BYTES + 1], [], "")]).await;
    assert_eq!(rig.pull(&sub, 10).await.len(), 1);
}

#[tokio::test]
async fn a_pull_waits_for_a_message() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let waiting = tokio::spawn({
        let (connector, sub) = (rig.connector.clone(), sub.clone());
        async move { connector.pull(&sub, 10, Duration::from_secs(60)).await.unwrap().messages }
    });
    tokio::task::yield_now().await;
    rig.publish(&["a"]).await;
    assert_eq!(texts(&waiting.await.unwrap()), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_answers_empty_when_its_time_is_over() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let start = Instant::now();
    assert!(rig.connector.pull(&sub, 10, Duration::from_secs(15)).await.unwrap().messages.is_empty());
    assert_eq!(start.elapsed().as_secs(), 15);
}

#[tokio::test]
async fn a_waiting_pull_hears_that_its_subscription_is_deleted_or_can_no_longer_be_pulled() {
    let rig = Rig::new().await;
    let (gone, pushed, detached) = (
        rig.subscription("gone", |_| {}).await,
        rig.subscription("pushed", |_| {}).await,
        rig.subscription("detached", |_| {}).await,
    );
    let wait = |name: &SubscriptionName| {
        let (connector, name) = (rig.connector.clone(), name.clone());
        tokio::spawn(async move { connector.pull(&name, 1, Duration::from_secs(60)).await.err() })
    };
    let (on_gone, on_pushed, on_detached) = (wait(&gone), wait(&pushed), wait(&detached));
    tokio::task::yield_now().await;
    rig.delete(&gone).await;
    rig.update(&pushed, |s| s.push_config.endpoint = "http://localhost:1/".into()).await;
    rig.update(&detached, |s| s.detached = true).await;
    assert_eq!(on_gone.await.unwrap(), Some(Error::NotFound("gone".into())));
    assert_eq!(on_pushed.await.unwrap(), Some(Error::NotPullable));
    assert_eq!(on_detached.await.unwrap(), Some(Error::Detached("detached".into())));
}

#[tokio::test]
async fn a_waiting_pull_survives_a_change_of_other_settings() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let waiting = tokio::spawn({
        let (connector, sub) = (rig.connector.clone(), sub.clone());
        async move { connector.pull(&sub, 10, Duration::from_secs(60)).await.unwrap().messages }
    });
    tokio::task::yield_now().await;
    rig.update(&sub, |s| s.ack_deadline_seconds = 20).await;
    rig.publish(&["a"]).await;
    assert_eq!(texts(&waiting.await.unwrap()), ["a"]);
}

#[tokio::test]
async fn cancelled_pulls_swallow_no_message() {
    let rig = Rig::new().await;
    let policy = DeadLetterPolicy { dead_letter_topic: None, max_delivery_attempts: 5 };
    let sub = rig.subscription("sub", |s| (s.ack_deadline_seconds, s.dead_letter_policy) = (600, Some(policy))).await;
    for round in 0..50 {
        let mut pulls: Vec<_> = (0..5).map(|_| Box::pin(rig.connector.pull(&sub, 1, Duration::from_secs(60)))).collect();
        for pull in &mut pulls {
            assert!(futures::poll!(pull.as_mut()).is_pending());
        }
        rig.publish(&["x"]).await;
        // Some of them get as far as the message, or as far as a response that is not sent any more.
        for pull in &mut pulls[..round % 5] {
            if let std::task::Poll::Ready(pulled) = futures::poll!(pull.as_mut()) {
                pulled.unwrap().receipt.arm();
            }
        }
        drop(pulls);
        let healthy = rig.pull_soon(&sub).await;
        assert_eq!(healthy.delivery_attempt, 1);
        rig.connector.acknowledge(&sub, &[healthy.ack_id]).await.unwrap();
    }
}

#[tokio::test]
async fn a_response_that_was_not_sent_gives_its_messages_back_uncounted() {
    let rig = Rig::new().await;
    let policy = DeadLetterPolicy { dead_letter_topic: None, max_delivery_attempts: 5 };
    let sub = rig.subscription("sub", |s| (s.ack_deadline_seconds, s.dead_letter_policy) = (600, Some(policy))).await;
    rig.publish(&["a"]).await;
    let pulled = rig.connector.pull(&sub, 1, Duration::ZERO).await.unwrap();
    pulled.receipt.arm();
    drop(pulled);
    assert_eq!(rig.pull_soon(&sub).await.delivery_attempt, 1);
}

#[tokio::test]
async fn a_response_that_was_sent_keeps_its_leases() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let pulled = rig.connector.pull(&sub, 1, Duration::ZERO).await.unwrap();
    pulled.receipt.arm();
    pulled.receipt.sent();
    drop(pulled);
    rig.connector.drain().await;
    assert_eq!(rig.outstanding(&sub).await, 1);
}

#[tokio::test]
async fn a_drain_answers_waiting_pulls() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let mut pull = Box::pin(rig.connector.pull(&sub, 1, Duration::from_secs(60)));
    assert!(futures::poll!(pull.as_mut()).is_pending());
    rig.connector.drain().await;
    assert!(pull.await.unwrap().messages.is_empty());
}

#[tokio::test]
async fn leases_of_one_subscription_are_capped_without_an_error() {
    let rig = Rig::with(|options| options.max_inflight_per_subscription = 2).await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a", "b", "c"]).await;
    let pulled = rig.pull(&sub, 10).await;
    assert_eq!(texts(&pulled), ["a", "b"]);
    assert!(rig.pull(&sub, 10).await.is_empty());
    rig.connector.acknowledge(&sub, &ids(&pulled[..1])).await.unwrap();
    eventually(|| async { texts(&rig.pull(&sub, 10).await) == ["c"] }).await;
}
