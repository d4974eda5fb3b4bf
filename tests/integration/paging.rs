//! Lists.

use std::collections::BTreeSet;

use landline::api::proto::pubsub::{
    DeleteTopicRequest, DetachSubscriptionRequest, ListSubscriptionsRequest, ListTopicSnapshotsRequest,
    ListTopicSubscriptionsRequest, ListTopicsRequest,
};
use serde_json::json;
use tonic::Code;

use crate::{
    fixture::{Api, Backend, Fixture, rest::get},
    for_every_backend, for_one_backend,
};

for_every_backend!(a_walk_over_pages_shows_each_item_once, a_topic_lists_attached_subscriptions_only);
for_one_backend!(bad_page_sizes_and_tokens_are_refused, lists_of_an_unknown_project_are_empty);

async fn page(api: &Api, page_size: i32, page_token: &str) -> (Vec<String>, String) {
    let request = ListTopicsRequest { project: api.parent(), page_size, page_token: page_token.into() };
    let answer = api.ok(request).await;
    (answer.topics.into_iter().map(|t| t.name).collect(), answer.next_page_token)
}

/// C023
async fn a_walk_over_pages_shows_each_item_once(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let mut all = BTreeSet::new();
        for number in 0..25 {
            all.insert(api.create_topic(&format!("topic-{number:02}")).await);
        }
        let (first, token) = page(&api, 10, "").await;
        let (second, token) = page(&api, 10, &token).await;
        let (third, end) = page(&api, 10, &token).await;
        assert_eq!((first.len(), second.len(), third.len()), (10, 10, 5));
        assert_eq!(end, "");
        let walked: Vec<_> = [first, second, third].concat();
        assert_eq!(walked, all.iter().cloned().collect::<Vec<_>>(), "by name, each once");
        assert_eq!(page(&api, 0, "").await.0.len(), 25);
        assert_eq!(page(&api, 1, "").await.0.len(), 1);
        assert_eq!(page(&api, 5000, "").await, (walked.clone(), String::new()));
        assert_eq!(page(&api, 25, "").await, (walked.clone(), String::new()), "a full last page has no token");

        // Items that come and go between two pages move nothing else.
        let (first, token) = page(&api, 10, "").await;
        api.ok(DeleteTopicRequest { topic: first[9].clone() }).await;
        api.create_topic("topic-000").await;
        let (second, _) = page(&api, 10, &token).await;
        assert_eq!(second, walked[10..20]);
    }
}

/// C023
async fn bad_page_sizes_and_tokens_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        for number in 0..3 {
            api.create_topic(&format!("topic-{number}")).await;
            api.create_subscription(&format!("sub-{number}"), &topic).await;
        }
        let request = |page_size, token: &str| ListTopicsRequest { project: api.parent(), page_size, page_token: token.into() };
        assert_eq!(api.fails(request(-1, "")).await, Code::InvalidArgument);
        assert_eq!(api.fails(request(2, "garbage")).await, Code::InvalidArgument);
        assert_eq!(api.fails(request(2, "Z2FyYmFnZQ")).await, Code::InvalidArgument);
        let (_, token) = page(&api, 2, "").await;
        let other = ListSubscriptionsRequest { project: api.parent(), page_size: 2, page_token: token.clone() };
        assert_eq!(api.fails(other).await, Code::InvalidArgument, "a token of another list");
        let other = ListTopicsRequest { project: "projects/other".into(), page_size: 2, page_token: token };
        assert_eq!(api.fails(other).await, Code::InvalidArgument, "a token of another project");
        for project in ["", "other", "projects/", "projects/a/topics/b"] {
            let outcome = api.call(ListTopicsRequest { project: project.into(), ..Default::default() }).await;
            assert!(outcome.is_err(), "project {project:?}");
        }
    }
}

/// C025
async fn lists_of_an_unknown_project_are_empty(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    for collection in ["schemas", "topics", "subscriptions", "snapshots"] {
        let answer = get(api.address(), &format!("/v1/projects/whatever/{collection}")).await;
        assert_eq!(answer.success(), json!({}), "{collection}");
    }
}

/// C026
async fn a_topic_lists_attached_subscriptions_only(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let kept = api.create_subscription("sub1", &topic).await;
        let detached = api.create_subscription("sub2", &topic).await;
        let attached = async || {
            let request = ListTopicSubscriptionsRequest { topic: topic.clone(), ..Default::default() };
            api.ok(request).await.subscriptions
        };
        assert_eq!(attached().await, [kept.clone(), detached.clone()]);
        api.ok(DetachSubscriptionRequest { subscription: detached.clone() }).await;
        assert_eq!(attached().await, std::slice::from_ref(&kept));
        api.delete_subscription(&kept).await;
        assert!(attached().await.is_empty());
        let listed = api.ok(ListSubscriptionsRequest { project: api.parent(), ..Default::default() }).await.subscriptions;
        assert_eq!(listed.iter().map(|s| (s.name.as_str(), s.detached)).collect::<Vec<_>>(), [(detached.as_str(), true)]);

        let absent = api.topic("none");
        let request = ListTopicSubscriptionsRequest { topic: absent.clone(), ..Default::default() };
        assert_eq!(api.fails(request).await, Code::NotFound);
        assert_eq!(api.fails(ListTopicSnapshotsRequest { topic: absent, ..Default::default() }).await, Code::NotFound);
    }
}
