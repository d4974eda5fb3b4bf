//! Update masks.

use std::collections::BTreeMap;

use landline::api::proto::pubsub::{
    CreateSnapshotRequest, DeadLetterPolicy, ModifyPushConfigRequest, PushConfig, Snapshot, Subscription, Topic,
    UpdateSnapshotRequest, UpdateSubscriptionRequest, UpdateTopicRequest,
};
use serde_json::json;
use tonic::Code;

use crate::{
    fixture::{Api, Backend, Failure, Fixture, mask, message::texts, rest},
    for_every_backend, for_one_backend,
};

for_one_backend!(
    an_empty_mask_changes_nothing,
    a_rest_mask_has_many_spellings,
    an_update_is_all_or_nothing,
    clearing_a_part_of_what_is_not_set_changes_nothing,
    labels_are_replaced_as_a_whole,
    immutable_and_unknown_paths_are_refused,
);
for_every_backend!(parts_of_a_dead_letter_policy_change_alone, the_backlog_survives_a_switch_between_push_and_pull);

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

async fn update_topic(api: &Api, topic: Topic, paths: &[&str]) -> Result<Topic, Failure> {
    api.call(UpdateTopicRequest { topic: Some(topic), update_mask: Some(mask(paths)) }).await
}

/// C010
async fn an_empty_mask_changes_nothing(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        let snapshot = api.ok(CreateSnapshotRequest {
            name: api.snapshot("snap"),
            subscription: subscription.clone(),
            ..Default::default()
        });
        let snapshot = snapshot.await;
        for update_mask in [None, Some(mask(&[]))] {
            let body = Some(Subscription { name: subscription.clone(), ack_deadline_seconds: 30, ..Default::default() });
            let request = UpdateSubscriptionRequest { subscription: body, update_mask: update_mask.clone() };
            assert_eq!(api.fails(request).await, Code::InvalidArgument);
            let body = Some(Topic { name: topic.clone(), labels: labels(&[("a", "b")]), ..Default::default() });
            let request = UpdateTopicRequest { topic: body, update_mask: update_mask.clone() };
            assert_eq!(api.fails(request).await, Code::InvalidArgument);
            let body = Some(Snapshot { labels: labels(&[("a", "b")]), ..snapshot.clone() });
            assert_eq!(api.fails(UpdateSnapshotRequest { snapshot: body, update_mask }).await, Code::InvalidArgument);
        }
        assert_eq!(api.get_subscription(&subscription).await.unwrap().ack_deadline_seconds, 10);
        assert!(api.get_topic(&topic).await.unwrap().labels.is_empty());
    }
}

/// C011
async fn a_rest_mask_has_many_spellings(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (_, name) = api.pair_with(|s| s.retain_acked_messages = true).await;
    let body = |seconds: u32| json!({ "ackDeadlineSeconds": seconds, "labels": { "a": seconds.to_string() }, "retainAckedMessages": false });
    let in_body = |seconds: u32, mask: &str| json!({ "subscription": body(seconds), "updateMask": mask });
    let path = format!("/v1/{name}");
    let requests = [
        (20, path.clone(), in_body(20, "ackDeadlineSeconds,labels")),
        (21, path.clone(), in_body(21, "ack_deadline_seconds,labels")),
        (22, format!("{path}?updateMask=ackDeadlineSeconds%2Clabels"), in_body(22, "ackDeadlineSeconds,labels")),
        (23, format!("{path}?updateMask=ackDeadlineSeconds%2Clabels"), json!({ "subscription": body(23) })),
        (24, format!("{path}?updateMask=ackDeadlineSeconds,labels"), json!({ "subscription": body(24) })),
    ];
    for (seconds, path, body) in requests {
        let answer = rest::json(api.address(), "PATCH", &path, body.clone()).await;
        assert_eq!(answer.status, 200, "{path} {body}: {:?}", answer.body);
        let now = api.get_subscription(&name).await.unwrap();
        assert_eq!(now.ack_deadline_seconds, seconds, "{path} {body}");
        assert_eq!(now.labels, labels(&[("a", &seconds.to_string())]));
        assert!(now.retain_acked_messages, "a field outside the mask changed");
    }
}

/// C013
async fn parts_of_a_dead_letter_policy_change_alone(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let dead = api.create_topic("dead").await;
        let policy = DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 10 };
        let (topic, name) = api.pair_with(|s| s.dead_letter_policy = Some(policy.clone())).await;

        let attempts = DeadLetterPolicy { max_delivery_attempts: 20, ..Default::default() };
        let paths = ["dead_letter_policy.max_delivery_attempts"];
        let updated = api.update_subscription(&name, &paths, |s| s.dead_letter_policy = Some(attempts)).await.unwrap();
        let changed = DeadLetterPolicy { max_delivery_attempts: 20, ..policy.clone() };
        assert_eq!(updated.dead_letter_policy, Some(changed));

        let paths = ["dead_letter_policy.dead_letter_topic", "dead_letter_policy.max_delivery_attempts"];
        let updated = api.update_subscription(&name, &paths, |_| {}).await.unwrap().dead_letter_policy;
        assert!(updated.is_none_or(|p| p.dead_letter_topic.is_empty() && p.max_delivery_attempts == 5));

        let set = |s: &mut Subscription| s.dead_letter_policy = Some(policy.clone());
        api.update_subscription(&name, &["dead_letter_policy"], set).await.unwrap();
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.pull(&name, 1).await;
        assert_eq!(received[0].delivery_attempt, 1);
        let updated = api.update_subscription(&name, &["dead_letter_policy"], |_| {}).await.unwrap();
        assert_eq!(updated.dead_letter_policy, None);
        api.nack(&name, &received).await;
        assert_eq!(api.pull(&name, 1).await[0].delivery_attempt, 0);
    }
}

/// C014
async fn an_update_is_all_or_nothing(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (_, name) = api.pair_with(|s| s.filter = "attributes:a".into()).await;
        let before = api.get_subscription(&name).await.unwrap();
        let change = |s: &mut Subscription| {
            s.ack_deadline_seconds = 30;
            s.filter = "attributes:b".into();
            s.labels = labels(&[("a", "b")]);
        };
        for paths in [&["ack_deadline_seconds", "filter"][..], &["labels", "nosuch_field"], &["labels", "topic"]] {
            let failure = api.update_subscription(&name, paths, change).await.unwrap_err();
            assert_eq!(failure.code, Code::InvalidArgument, "{paths:?}");
        }
        let low = |s: &mut Subscription| {
            s.ack_deadline_seconds = 5;
            s.labels = labels(&[("a", "b")]);
        };
        let failure = api.update_subscription(&name, &["labels", "ack_deadline_seconds"], low).await.unwrap_err();
        assert_eq!(failure.code, Code::InvalidArgument);
        assert_eq!(api.get_subscription(&name).await.unwrap(), before);
        // A field outside the mask is not even looked at.
        let updated = api.update_subscription(&name, &["labels"], low).await.unwrap();
        assert_eq!(updated, Subscription { labels: labels(&[("a", "b")]), ..before });
    }
}

async fn clearing_a_part_of_what_is_not_set_changes_nothing(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        let before = api.get_topic(&topic).await.unwrap();
        for part in ["schema", "encoding", "first_revision_id", "last_revision_id"] {
            let request = Topic { name: topic.clone(), ..Default::default() };
            let updated = update_topic(&api, request, &[&format!("schema_settings.{part}")]).await;
            assert_eq!(updated.unwrap_or_else(|e| panic!("{part}: {e:?}")), before);
        }
        let before = api.get_subscription(&subscription).await.unwrap();
        for part in ["push_config.oidc_token", "push_config.attributes", "dead_letter_policy.max_delivery_attempts"] {
            let updated = api.update_subscription(&subscription, &[part], |_| {}).await;
            assert_eq!(updated.unwrap_or_else(|e| panic!("{part}: {e:?}")), before);
        }
    }
}

/// C016
async fn labels_are_replaced_as_a_whole(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = Topic { name: api.topic("orders"), labels: labels(&[("a", "1"), ("b", "2")]), ..Default::default() };
        api.ok(topic.clone()).await;
        let subscription = api.create_subscription("billing", &topic.name).await;
        let name = api.snapshot("snap");
        let snapshot = CreateSnapshotRequest { name, subscription, labels: topic.labels.clone(), ..Default::default() };
        let snapshot = api.ok(snapshot).await;
        for expected in [labels(&[("b", "3")]), labels(&[])] {
            let changed = Topic { labels: expected.clone(), ..topic.clone() };
            assert_eq!(update_topic(&api, changed, &["labels"]).await.unwrap().labels, expected);
            assert_eq!(api.get_topic(&topic.name).await.unwrap().labels, expected);
            let changed = Some(Snapshot { labels: expected.clone(), ..snapshot.clone() });
            let request = UpdateSnapshotRequest { snapshot: changed, update_mask: Some(mask(&["labels"])) };
            assert_eq!(api.ok(request).await, Snapshot { labels: expected, ..snapshot.clone() });
        }
    }
}

/// C017
async fn the_backlog_survives_a_switch_between_push_and_pull(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        // Nothing listens on port 9 of loopback, so every push fails and its message stays.
        let push = |endpoint: &str| PushConfig { push_endpoint: endpoint.into(), ..Default::default() };
        let (topic, name) = api.pair_with(|s| s.push_config = Some(push("http://127.0.0.1:9/"))).await;
        api.publish_texts(&topic, &["m1", "m2", "m3"]).await;
        assert_eq!(api.fails(crate::fixture::api::pull(&name, 1)).await, Code::FailedPrecondition);

        api.ok(ModifyPushConfigRequest { subscription: name.clone(), push_config: Some(PushConfig::default()) }).await;
        let received = api.pull(&name, 3).await;
        let mut got = texts(&received);
        got.sort_unstable();
        assert_eq!(got, ["m1", "m2", "m3"]);
        api.ack(&name, &received).await;

        let set = |s: &mut Subscription| s.push_config = Some(push("http://127.0.0.1:9/b"));
        let updated = api.update_subscription(&name, &["push_config"], set).await.unwrap();
        assert_eq!(updated.push_config.unwrap().push_endpoint, "http://127.0.0.1:9/b");
        let updated = api.update_subscription(&name, &["push_config"], |_| {}).await.unwrap();
        assert_eq!(updated.push_config, Some(PushConfig::default()));
        api.publish_texts(&topic, &["m4"]).await;
        assert_eq!(api.take(&name).await.text(), "m4");
    }
}

/// Rule of the connector: name, filter, topic and ordering never change.
async fn immutable_and_unknown_paths_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, name) = api.pair().await;
        let immutable = [
            "name",
            "topic",
            "filter",
            "enable_message_ordering",
            "detached",
            "state",
            "topic_message_retention_duration",
            "tags",
            "ackDeadline",
            "push_config.nosuch",
            "labels.a.b.c",
        ];
        for path in immutable {
            // JSON has no form for a path that is not in snake case.
            if api.transport == crate::fixture::Transport::Rest && path.contains(char::is_uppercase) {
                continue;
            }
            let failure = api.update_subscription(&name, &[path], |s| s.topic = topic.clone()).await.unwrap_err();
            assert_eq!(failure.code, Code::InvalidArgument, "{path}: {failure:?}");
        }
        for path in ["name", "state", "satisfies_pzs", "tags", "nosuch"] {
            let failure = update_topic(&api, Topic { name: topic.clone(), ..Default::default() }, &[path]).await.unwrap_err();
            assert_eq!(failure.code, Code::InvalidArgument, "{path}: {failure:?}");
        }
        let absent = api.update_subscription(&api.subscription("none"), &["labels"], |_| {}).await.unwrap_err();
        assert_eq!(absent.code, Code::NotFound);
    }
}
