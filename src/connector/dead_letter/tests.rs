use super::*;
use crate::{
    connector::{
        pull::Delivered,
        rig::{Rig, eventually, ids, texts},
    },
    model::{DeadLetterPolicy, RetryPolicy},
};

fn policy(topic: &TopicName) -> Option<DeadLetterPolicy> {
    Some(DeadLetterPolicy { dead_letter_topic: Some(topic.clone()), max_delivery_attempts: 5 })
}

/// Fails every delivery until the message no longer comes; answers the attempts that were seen.
async fn exhaust(rig: &Rig, sub: &SubscriptionName) -> Vec<u32> {
    let mut seen = Vec::new();
    for _ in 0..5 {
        let delivered = rig.pull_soon(sub).await;
        seen.push(delivered.delivery_attempt);
        rig.connector.modify_ack_deadline(sub, &[delivered.ack_id], 0).await.unwrap();
    }
    seen
}

fn attributes(delivered: &Delivered) -> std::collections::BTreeMap<String, String> {
    EncodedMessage::scan_system(delivered.message.clone()).unwrap().attribute_map()
}

#[tokio::test]
async fn an_exhausted_message_moves_to_the_dead_letter_topic() {
    let rig = Rig::new().await;
    let dead = rig.topic("dead").await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = policy(&dead)).await;
    let watch = rig.subscription_on("watch", "dead", |_| {}).await;
    rig.publish(&["poison"]).await;
    assert_eq!(exhaust(&rig, &sub).await, [1, 2, 3, 4, 5]);
    let forwarded = rig.pull_soon(&watch).await;
    assert_eq!(texts(std::slice::from_ref(&forwarded)), ["poison"]);
    let attributes = attributes(&forwarded);
    assert_eq!(attributes["CloudPubSubDeadLetterSourceDeliveryCount"], "5");
    assert_eq!(attributes["CloudPubSubDeadLetterSourceSubscription"], "sub");
    assert_eq!(attributes["CloudPubSubDeadLetterSourceSubscriptionProject"], "p1");
    eventually(|| async { rig.backlog(&sub).await == 0 }).await;
    assert_eq!((rig.connector.dead_letters().forwarded(), rig.connector.dead_letters().failed()), (1, 0));
}

#[tokio::test]
async fn expiries_count_as_nacks_do() {
    let rig = Rig::new().await;
    let dead = rig.topic("dead").await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = policy(&dead)).await;
    let watch = rig.subscription_on("watch", "dead", |_| {}).await;
    rig.publish(&["poison"]).await;
    for attempt in 1..=5 {
        assert_eq!(rig.pull_soon(&sub).await.delivery_attempt, attempt);
        rig.pass(Duration::from_secs(11));
    }
    assert_eq!(texts(&[rig.pull_soon(&watch).await]), ["poison"]);
}

#[tokio::test]
async fn without_its_topic_a_dead_letter_goes_on_cycling_until_there_is_one_again() {
    let rig = Rig::new().await;
    let dead = rig.topic("dead").await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = policy(&dead)).await;
    rig.publish(&["poison"]).await;
    rig.delete_topic(&dead).await;
    exhaust(&rig, &sub).await;
    // Not lost: delivered once more.
    let again = rig.pull_soon(&sub).await;
    assert_eq!(again.delivery_attempt, 6);
    assert_eq!(rig.connector.dead_letters().failed(), 1);
    let other = rig.topic("other").await;
    let watch = rig.subscription_on("watch", "other", |_| {}).await;
    rig.update(&sub, |s| s.dead_letter_policy = policy(&other)).await;
    rig.connector.modify_ack_deadline(&sub, &ids(&[again]), 0).await.unwrap();
    assert_eq!(texts(&[rig.pull_soon(&watch).await]), ["poison"]);
    eventually(|| async { rig.backlog(&sub).await == 0 }).await;
}

#[tokio::test]
async fn a_dead_letter_topic_may_be_the_subscriptions_own_topic() {
    let rig = Rig::new().await;
    let own = TopicName::new("p1", "topic").unwrap();
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = policy(&own)).await;
    rig.publish(&["loop"]).await;
    for round in 1..=2 {
        assert_eq!(exhaust(&rig, &sub).await, [1, 2, 3, 4, 5]);
        eventually(|| async { rig.connector.dead_letters().forwarded() == round }).await;
    }
    assert_eq!(attributes(&rig.pull_soon(&sub).await).len(), 4);
}

#[tokio::test]
async fn many_dead_letters_are_forwarded_in_their_order() {
    let rig = Rig::new().await;
    let dead = rig.topic("dead").await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = policy(&dead)).await;
    let watch = rig.subscription_on("watch", "dead", |_| {}).await;
    let names: Vec<String> = (0..100).map(|n| format!("{n:03}")).collect();
    rig.publish(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for _ in 0..5 {
        let delivered = rig.connector.pull(&sub, 1000, Duration::from_secs(20)).await.unwrap().messages;
        assert_eq!(delivered.len(), 100);
        rig.connector.modify_ack_deadline(&sub, &ids(&delivered), 0).await.unwrap();
    }
    eventually(|| async { rig.backlog(&sub).await == 0 }).await;
    assert_eq!(rig.texts(&watch).await, names);
}

#[tokio::test]
async fn dead_letters_left_by_another_node_are_found_at_the_start() {
    let rig = Rig::new().await;
    let dead = rig.topic("dead").await;
    let retry = RetryPolicy { minimum_backoff_ms: 0, maximum_backoff_ms: 0 };
    let sub = rig.subscription("sub", |s| (s.dead_letter_policy, s.retry_policy) = (policy(&dead), Some(retry))).await;
    let watch = rig.subscription_on("watch", "dead", |_| {}).await;
    rig.publish(&["poison"]).await;
    // The node stops forwarding and goes on with the rest.
    rig.connector.delivery.draining.cancel();
    eventually(|| async { rig.connector.delivery.tasks.is_empty() }).await;
    exhaust(&rig, &sub).await;
    assert_eq!(rig.backlog(&sub).await, 1);
    let other = rig.node("n2", |_| {}).await;
    let forwarded = other.pull(&watch, 1, Duration::from_secs(20)).await.unwrap().messages;
    assert_eq!(texts(&forwarded), ["poison"]);
}
