//! Deleting and detaching.

use landline::api::proto::pubsub::{
    CreateSnapshotRequest, DeleteSnapshotRequest, DeleteSubscriptionRequest, DeleteTopicRequest, DetachSubscriptionRequest,
    GetSnapshotRequest, ListTopicSubscriptionsRequest, SeekRequest, Subscription, seek_request::Target,
};
use prost_types::Timestamp;
use tonic::Code;

use crate::{
    fixture::{Api, Backend, Fixture, api::pull, code, message, message::texts, timestamp},
    for_every_backend,
};

for_every_backend!(
    subscriptions_outlive_their_topic,
    a_deleted_subscription_is_gone_for_good,
    a_detached_subscription_keeps_only_its_settings,
    snapshots_outlive_subscription_and_topic,
    a_new_topic_of_an_old_name_starts_empty,
);

/// C169
async fn subscriptions_outlive_their_topic(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1", "m2"]).await;
        api.delete_topic(&topic).await;
        assert_eq!(code(&api.get_topic(&topic).await), Code::NotFound);
        assert_eq!(api.fails(DeleteTopicRequest { topic: topic.clone() }).await, Code::NotFound);
        assert_eq!(api.fails(crate::fixture::api::publish_request(&topic, [message("x")])).await, Code::NotFound);
        assert_eq!(api.get_subscription(&subscription).await.unwrap().topic, "_deleted-topic_");
        let received = api.pull(&subscription, 2).await;
        let mut got = texts(&received);
        got.sort_unstable();
        assert_eq!(got, ["m1", "m2"]);
        api.ack(&subscription, &received).await;

        api.create_topic("orders").await;
        let attached = ListTopicSubscriptionsRequest { topic: topic.clone(), ..Default::default() };
        assert!(api.ok(attached).await.subscriptions.is_empty());
        assert_eq!(api.get_subscription(&subscription).await.unwrap().topic, "_deleted-topic_");
        let other = api.create_subscription("other", &topic).await;
        api.publish_texts(&topic, &["m3"]).await;
        assert_eq!(api.take(&other).await.text(), "m3");
        assert!(api.pull_now(&subscription, 10).await.is_empty());
        let again = Subscription { name: subscription, topic, ..Default::default() };
        assert_eq!(api.fails(again).await, Code::AlreadyExists);
    }
}

/// C170
async fn a_deleted_subscription_is_gone_for_good(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        for _ in 0..10 {
            api.publish(&topic, (0..1000).map(|n| message(n.to_string()))).await;
        }
        let leased = api.pull(&subscription, 100).await;
        api.delete_subscription(&subscription).await;
        assert_eq!(code(&api.get_subscription(&subscription).await), Code::NotFound);
        let request = DeleteSubscriptionRequest { subscription: subscription.clone() };
        assert_eq!(api.fails(request).await, Code::NotFound);
        assert_eq!(api.fails(pull(&subscription, 1)).await, Code::NotFound);
        api.create_subscription("billing", &topic).await;
        assert!(api.pull_now(&subscription, 100).await.is_empty(), "a message of the old one");
        api.publish_texts(&topic, &["new"]).await;
        let received = api.pull(&subscription, 1).await;
        assert_eq!(texts(&received), ["new"]);
        // Settling what the old one leased does nothing to the new one.
        let _ = api.call(crate::fixture::api::acknowledge(&subscription, &leased)).await;
        api.nack(&subscription, &received).await;
        assert_eq!(api.take(&subscription).await.text(), "new");
        api.assert_drained(&topic, &subscription).await;
    }
}

/// Detaching drops the backlog, ends delivery and can be repeated; the subscription stays listed.
async fn a_detached_subscription_keeps_only_its_settings(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1", "m2"]).await;
        let leased = api.pull(&subscription, 1).await;
        let detach = || DetachSubscriptionRequest { subscription: subscription.clone() };
        api.ok(detach()).await;
        api.ok(detach()).await;
        let got = api.get_subscription(&subscription).await.unwrap();
        assert!(got.detached && got.topic == topic, "{got:?}");
        assert_eq!(api.fails(pull(&subscription, 1)).await, Code::FailedPrecondition);
        let seek = SeekRequest { subscription: subscription.clone(), target: Some(Target::Time(timestamp(-60))) };
        assert_eq!(api.fails(seek).await, Code::FailedPrecondition);
        // A late ack is no accident of the client: it is not an internal error.
        let late = code(&api.call(crate::fixture::api::acknowledge(&subscription, &leased)).await);
        assert!([Code::Ok, Code::FailedPrecondition, Code::InvalidArgument].contains(&late), "{late:?}");
        api.publish_texts(&topic, &["m3"]).await;
        assert_eq!(api.fails(pull(&subscription, 1)).await, Code::FailedPrecondition);
        let absent = DetachSubscriptionRequest { subscription: api.subscription("none") };
        assert_eq!(api.fails(absent).await, Code::NotFound);
        api.delete_subscription(&subscription).await;
    }
}

async fn snapshot_of(api: &Api, subscription: &str) -> String {
    let request =
        CreateSnapshotRequest { name: api.snapshot("snap"), subscription: subscription.to_owned(), ..Default::default() };
    api.ok(request).await.name
}

/// A snapshot serves every subscription of its topic, also when the one it was taken of is gone.
async fn snapshots_outlive_subscription_and_topic(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(|s| s.retain_acked_messages = true).await;
        let other = api.create_subscription_with("other", &topic, |s| s.retain_acked_messages = true).await;
        api.publish_texts(&topic, &["m1"]).await;
        let snapshot = snapshot_of(&api, &subscription).await;
        api.take(&other).await;
        api.delete_subscription(&subscription).await;
        api.ok(SeekRequest { subscription: other.clone(), target: Some(Target::Snapshot(snapshot.clone())) }).await;
        assert_eq!(api.take(&other).await.text(), "m1");
        api.delete_topic(&topic).await;
        assert_eq!(api.ok(GetSnapshotRequest { snapshot: snapshot.clone() }).await.topic, "_deleted-topic_");
        api.ok(DeleteSnapshotRequest { snapshot }).await;
        // A topic that is deleted with everything it kept does not keep its subscriptions from being saved.
        api.ok(SeekRequest { subscription: other.clone(), target: Some(Target::Time(Timestamp::default())) }).await;
        let late = snapshot_of(&api, &other).await;
        api.take(&other).await;
        api.ok(SeekRequest { subscription: other.clone(), target: Some(Target::Snapshot(late.clone())) }).await;
        assert_eq!(api.take(&other).await.text(), "m1");
        api.ok(DeleteSnapshotRequest { snapshot: late }).await;
    }
}

/// Messages of a deleted topic never reach subscriptions of a topic that takes its name.
async fn a_new_topic_of_an_old_name_starts_empty(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        for round in 0..5 {
            let topic = api.create_topic("orders").await;
            let subscription = api.create_subscription(&format!("sub{round}"), &topic).await;
            let text = format!("m{round}");
            api.publish_texts(&topic, &[&text]).await;
            let request = SeekRequest { subscription: subscription.clone(), target: Some(Target::Time(timestamp(-3600))) };
            api.ok(request).await;
            let received = api.pull(&subscription, 1).await;
            assert_eq!(received[0].text(), text);
            assert!(api.pull_now(&subscription, 10).await.is_empty());
            api.delete_topic(&topic).await;
        }
    }
}
