//! Resource names.

use http::StatusCode;
use landline::api::proto::pubsub::{
    CreateSnapshotRequest, DeleteTopicRequest, GetSnapshotRequest, ListSubscriptionsRequest, ListTopicSubscriptionsRequest,
    ListTopicsRequest, Subscription, Topic,
};
use serde_json::json;
use tonic::Code;

use crate::{
    fixture::{
        Backend, Fixture, code,
        rest::{self, get},
        stream::first,
    },
    for_every_backend, for_one_backend,
};

for_one_backend!(illegal_topic_ids_are_refused, a_name_in_path_and_body_names_one_resource, a_server_names_what_has_no_name);
for_every_backend!(
    awkward_characters_mean_the_same_over_both_transports,
    a_subscription_needs_a_topic_that_exists,
    topic_and_subscription_may_be_in_different_projects,
    ids_that_look_like_internal_keys_are_ordinary,
);

/// C001
async fn illegal_topic_ids_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let long = "a".repeat(256);
        for id in ["ab", "1abc", "goog-x", "googx", "a b", "a*b", "a^b", "_abc", "abé", long.as_str()] {
            let failure = api.failure(Topic { name: api.topic(id), ..Default::default() }).await;
            assert_eq!(failure.code, Code::InvalidArgument, "{id}: {failure:?}");
            assert!(failure.message.starts_with("Invalid resource name given (name="), "{failure:?}");
        }
        for id in ["a".repeat(255), "abc".into(), "Goog-x".into(), "a-_.~+%".into()] {
            api.create_topic(&id).await;
        }
        let topics = api.ok(ListTopicsRequest { project: api.parent(), ..Default::default() }).await.topics;
        assert_eq!(topics.len(), 4);
    }
    let api = fixture.api().await;
    for name in ["t1", "projects/p1/topic/t11", "projects/p1/topics/", "projects/p1/topics/a/b", "projects//topics/t11", ""] {
        let created = api.fails(Topic { name: name.into(), ..Default::default() }).await;
        assert_eq!(created, Code::InvalidArgument, "create {name:?}");
        assert_eq!(api.get_topic(name).await.unwrap_err().code, Code::InvalidArgument, "get {name:?}");
        assert_eq!(api.fails(DeleteTopicRequest { topic: name.into() }).await, Code::InvalidArgument, "delete {name:?}");
    }
    assert_eq!(api.refused_stream(first("s1")).await, Code::InvalidArgument);
}

/// C002
async fn awkward_characters_mean_the_same_over_both_transports(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let path = |rest: &str| format!("/v1/{}/{rest}", api.parent());
    let put = rest::json(api.address(), "PUT", &path("subscriptions/a%25b"), json!({ "topic": topic })).await.success();
    assert_eq!(put["name"], api.subscription("a%b"));
    let put = rest::json(api.address(), "PUT", &path("topics/x+y~z.w"), json!({})).await.success();
    assert_eq!(put["name"], api.topic("x+y~z.w"));

    assert_eq!(api.get_subscription(&api.subscription("a%b")).await.unwrap().name, api.subscription("a%b"));
    assert_eq!(api.get_topic(&api.topic("x+y~z.w")).await.unwrap().name, api.topic("x+y~z.w"));
    let listed = get(api.address(), &path("subscriptions")).await.success();
    assert_eq!(listed["subscriptions"][0]["name"], api.subscription("a%b"));
    let listed = api.ok(ListTopicsRequest { project: api.parent(), ..Default::default() }).await.topics;
    assert_eq!(listed.iter().map(|t| &t.name).collect::<Vec<_>>(), [&topic, &api.topic("x+y~z.w")]);

    // Two characters of three in hex: only one decoding happens, so this names `a%25b`, which does not exist.
    assert_eq!(get(api.address(), &path("subscriptions/a%2525b")).await.status, StatusCode::NOT_FOUND);
    assert_eq!(rest::send(api.address(), "DELETE", &path("subscriptions/a%25b"), &[], "").await.status, StatusCode::OK);
    assert_eq!(rest::send(api.address(), "DELETE", &path("topics/x%2By~z.w"), &[], "").await.status, StatusCode::OK);
    assert_eq!(code(&api.get_subscription(&api.subscription("a%b")).await), Code::NotFound);
    assert_eq!(code(&api.get_topic(&api.topic("x+y~z.w")).await), Code::NotFound);
}

/// C004
async fn a_name_in_path_and_body_names_one_resource(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.topic("orders");
    let put = rest::json(api.address(), "PUT", &format!("/v1/{topic}"), json!({ "name": topic })).await.success();
    assert_eq!(put["name"], topic);
    let name = api.subscription("billing");
    let body = json!({ "name": name, "topic": topic });
    assert_eq!(rest::json(api.address(), "PUT", &format!("/v1/{name}"), body).await.success()["name"], name);
    // A different name in the body makes no second resource, whatever the answer.
    let body = json!({ "name": api.topic("other") });
    rest::json(api.address(), "PUT", &format!("/v1/{}", api.topic("third")), body).await;
    assert_eq!(code(&api.get_topic(&api.topic("other")).await), Code::NotFound);
}

/// C005
async fn a_server_names_what_has_no_name(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let first = api.ok(Subscription { topic: topic.clone(), ..Default::default() }).await.name;
    let second = api.ok(Subscription { topic: topic.clone(), ..Default::default() }).await.name;
    assert!(first.starts_with(&api.subscription("")) && first != second, "{first} {second}");
    assert_eq!(api.get_subscription(&first).await.unwrap().topic, topic);
    let snapshot = api.ok(CreateSnapshotRequest { subscription: first, ..Default::default() }).await.name;
    assert!(snapshot.starts_with(&api.snapshot("")), "{snapshot}");
    assert_eq!(api.ok(GetSnapshotRequest { snapshot: snapshot.clone() }).await.name, snapshot);
    let path = format!("/v1/{}", api.subscription(""));
    let put = rest::json(api.address(), "PUT", &path, json!({ "topic": topic })).await;
    assert!([StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST].contains(&put.status), "{put:?}");
}

/// C007
async fn a_subscription_needs_a_topic_that_exists(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let name = api.subscription("billing");
        let without = Subscription { name: name.clone(), ..Default::default() };
        assert_eq!(api.fails(without.clone()).await, Code::InvalidArgument);
        let absent = Subscription { topic: api.topic("none"), ..without };
        assert_eq!(api.fails(absent).await, Code::NotFound);
        assert_eq!(code(&api.get_subscription(&name).await), Code::NotFound);
        let listed = api.ok(ListSubscriptionsRequest { project: api.parent(), ..Default::default() }).await;
        assert!(listed.subscriptions.is_empty());
    }
}

/// C008
async fn topic_and_subscription_may_be_in_different_projects(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (owner, reader) = (fixture.api().await, fixture.api().await);
    assert_ne!(owner.project, reader.project);
    let topic = owner.create_topic("orders").await;
    let subscription = reader.create_subscription("billing", &topic).await;
    owner.publish_texts(&topic, &["m1"]).await;
    assert_eq!(reader.take(&subscription).await.text(), "m1");
    let attached = owner.ok(ListTopicSubscriptionsRequest { topic, ..Default::default() }).await.subscriptions;
    assert_eq!(attached, std::slice::from_ref(&subscription));
    let listed = reader.ok(ListSubscriptionsRequest { project: reader.parent(), ..Default::default() }).await;
    assert_eq!(listed.subscriptions.iter().map(|s| &s.name).collect::<Vec<_>>(), [&subscription]);
    let listed = owner.ok(ListSubscriptionsRequest { project: owner.parent(), ..Default::default() }).await;
    assert!(listed.subscriptions.is_empty());
}

/// C193
async fn ids_that_look_like_internal_keys_are_ordinary(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let ids =
        ["sub.x", "topic.x", "gcp.sub.x", "a.b", "a~b", "a%3Ab", "topics", "lock", "messages", "subscriptions", "Lock", "LOCK"];
    for id in ids {
        let topic = api.create_topic(id).await;
        // The subscription has the same id as its topic.
        api.create_subscription(id, &topic).await;
    }
    for id in ids {
        api.publish_texts(&api.topic(id), &[id]).await;
    }
    for id in ids {
        let subscription = api.subscription(id);
        assert_eq!(api.take(&subscription).await.text(), id);
        assert!(api.pull_now(&subscription, 10).await.is_empty(), "{id} got another topic's message");
    }
}
