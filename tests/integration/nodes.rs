//! Several servers on one store.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::{
    CreateSchemaRequest, DeadLetterPolicy, DeleteSchemaRequest, Encoding, PushConfig, Schema, SchemaSettings,
    StreamingPullRequest, Subscription, Topic, UpdateTopicRequest, schema::Type,
};
use tonic::Code;

use crate::{
    aging::library,
    fixture::{
        Api, Backend, Fixture, eventually, mask, message,
        message::{Build, texts},
        node::{Node, NodeSpec},
        ports,
        sink::Sink,
        timestamp,
        wait::{SOON, assert_took},
    },
    for_two_nodes,
};

for_two_nodes!(
    an_ack_through_another_node_counts_everywhere,
    a_nack_through_another_node_redelivers_and_keeps_the_order,
    a_key_stays_with_one_node_at_a_time,
    changes_on_one_node_are_seen_on_the_other,
    a_changed_topic_is_in_force_on_the_other_node_at_once,
    a_changed_subscription_is_in_force_on_the_other_node_at_once,
    the_inflight_cap_holds_over_all_nodes,
    a_dead_node_blocks_nobody,
    clocks_that_differ_make_no_difference,
    the_pushes_of_a_dead_node_are_taken_over,
);

async fn both(fixture: &Fixture, api: &Api) -> (Api, Api) {
    (fixture.api_of_node(0, api).await, fixture.api_of_node(1, api).await)
}

/// C191
async fn an_ack_through_another_node_counts_everywhere(backend: Backend) {
    for exactly_once in [false, true] {
        let fixture = Fixture::start(backend).await;
        let api = fixture.api().await;
        let (topic, subscription) = api
            .pair_with(|s| {
                s.enable_exactly_once_delivery = exactly_once;
                s.ack_deadline_seconds = 600;
            })
            .await;
        let (here, there) = both(&fixture, &api).await;
        let set = |r: &mut StreamingPullRequest| {
            r.max_outstanding_messages = 5;
            r.stream_ack_deadline_seconds = 600;
        };
        let mut stream = here.stream_with(&subscription, set).await;
        api.publish(&topic, (0..100).map(|n| message(n.to_string()))).await;
        let mut seen = BTreeSet::new();
        while seen.len() < 100 {
            let received = stream.message().await;
            assert!(seen.insert(received.id().to_owned()), "{} came twice", received.text());
            there.extend(&subscription, [&received], 60).await;
            there.ack(&subscription, [&received]).await;
            // A repeat anywhere is fine.
            here.ack(&subscription, [&received]).await;
        }
        drop(stream);
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C191
async fn a_nack_through_another_node_redelivers_and_keeps_the_order(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.enable_message_ordering = true).await;
    let (here, there) = both(&fixture, &api).await;
    let mut stream = here.stream_with(&subscription, |r| r.max_outstanding_messages = 1).await;
    api.publish(&topic, (0..5).map(|n| message(n.to_string()).key("k"))).await;
    for n in 0..5 {
        for attempt in 0..2 {
            let received = stream.message().await;
            assert_eq!(received.text(), n.to_string());
            if attempt == 0 {
                there.nack(&subscription, [&received]).await;
            } else {
                there.ack(&subscription, [&received]).await;
            }
        }
    }
}

/// C101 over nodes
async fn a_key_stays_with_one_node_at_a_time(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.enable_message_ordering = true).await;
    let (here, there) = both(&fixture, &api).await;
    let mut first = here.stream(&subscription).await;
    api.publish(&topic, [message("m1").key("k")]).await;
    let held = first.message().await;
    let mut second = there.stream(&subscription).await;
    api.publish(&topic, [message("m2").key("k")]).await;
    api.publish(&topic, [message("m3").key("k")]).await;
    assert_eq!(texts(&first.messages(2).await), ["m2", "m3"]);
    assert!(second.try_message(Duration::from_millis(300)).await.is_none());
    assert_eq!(held.text(), "m1");
    // The first node's client goes away; its leases end and the key moves over, in order.
    drop(first);
    for expected in ["m1", "m2", "m3"] {
        let received = second.message_within(Duration::from_secs(20)).await;
        assert_eq!(received.text(), expected);
        second.ack(&received);
    }
}

/// Resources, filters, policies and ends of subscriptions reach the other node at once.
async fn changes_on_one_node_are_seen_on_the_other(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (here, there) = both(&fixture, &api).await;
    for round in 0..10 {
        let topic = here.create_topic(&format!("topic-{round}")).await;
        let subscription = there.create_subscription(&format!("sub-{round}"), &topic).await;
        // The publisher's node knows of the subscription that was made elsewhere just now.
        here.publish_texts(&topic, &["m1"]).await;
        assert_eq!(there.take(&subscription).await.text(), "m1");
        let mut stream = there.stream_with(&subscription, |r| r.protocol_version = 1).await;
        here.update_subscription(&subscription, &["enable_exactly_once_delivery"], |s| s.enable_exactly_once_delivery = true)
            .await
            .unwrap();
        let until = Instant::now() + SOON;
        loop {
            stream.send(StreamingPullRequest::default());
            let response = stream.response(SOON).await.unwrap().unwrap();
            if response.subscription_properties.unwrap().exactly_once_delivery_enabled {
                break;
            }
            assert!(Instant::now() < until, "the stream does not show the update of the other node");
        }
        here.delete_subscription(&subscription).await;
        assert_eq!(stream.end_code().await, Code::NotFound);
        here.delete_topic(&topic).await;
        let publish = crate::fixture::api::publish_request(&topic, [message("x")]);
        assert_eq!(there.fails(publish).await, Code::NotFound);
    }
}

/// Updates that were answered are in force: a schema, its absence, and its deletion.
async fn a_changed_topic_is_in_force_on_the_other_node_at_once(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (here, there) = both(&fixture, &api).await;
    let name = api.topic("topic");
    here.ok(Topic { name: name.clone(), ..Default::default() }).await;
    let definition = r#"{"type":"record","name":"R","fields":[{"name":"a","type":"int"}]}"#.to_owned();
    let schema = Schema { r#type: Type::Avro as i32, definition, ..Default::default() };
    let schema = CreateSchemaRequest { parent: api.parent(), schema: Some(schema), schema_id: "schema".into() };
    let update = async |settings: Option<SchemaSettings>| {
        let topic = Topic { name: name.clone(), schema_settings: settings, ..Default::default() };
        here.ok(UpdateTopicRequest { topic: Some(topic), update_mask: Some(mask(&["schema_settings"])) }).await;
    };
    let publish = |text: &str| crate::fixture::api::publish_request(&name, [message(text)]);
    for round in 0..60 {
        let made = here.ok(schema.clone()).await;
        let settings = SchemaSettings { schema: made.name.clone(), encoding: Encoding::Json as i32, ..Default::default() };
        // So that the node remembers the topic as it was.
        there.ok(publish("anything")).await;
        update(Some(settings)).await;
        assert_eq!(there.fails(publish("anything")).await, Code::InvalidArgument, "round {round}");
        there.ok(publish(r#"{"a":1}"#)).await;
        here.ok(DeleteSchemaRequest { name: made.name }).await;
        assert_eq!(there.fails(publish(r#"{"a":1}"#)).await, Code::FailedPrecondition, "round {round}");
        update(None).await;
        there.ok(publish("anything")).await;
    }
}

/// What the other node leases right after an update was answered follows it, also on a stream that is open.
async fn a_changed_subscription_is_in_force_on_the_other_node_at_once(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let (topic, subscription) = api.pair().await;
    let (here, there) = both(&fixture, &api).await;
    let mut stream = there.stream(&subscription).await;
    let policy = DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 5 };
    for round in 0..60 {
        let on = round % 2 == 0;
        here.update_subscription(&subscription, &["dead_letter_policy"], |s| s.dead_letter_policy = on.then(|| policy.clone()))
            .await
            .unwrap();
        there.publish_texts(&topic, &["m"]).await;
        let received = stream.message().await;
        assert_eq!(received.delivery_attempt, i32::from(on), "round {round}");
        stream.ack(&received);
    }
}

/// CONNECTORS_GCP_MAX_INFLIGHT_PER_SUBSCRIPTION counts the leases of all nodes.
async fn the_inflight_cap_holds_over_all_nodes(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MAX_INFLIGHT_PER_SUBSCRIPTION", "6")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let (here, there) = both(&fixture, &api).await;
    api.publish(&topic, (0..20).map(|n| message(n.to_string()))).await;
    let mut received = here.pull(&subscription, 4).await;
    received.extend(there.pull(&subscription, 2).await);
    assert!(here.pull_now(&subscription, 10).await.is_empty());
    assert!(there.pull_now(&subscription, 10).await.is_empty());
    there.ack(&subscription, &received[..3]).await;
    assert_eq!(here.pull(&subscription, 3).await.len(), 3);
    assert!(there.pull_now(&subscription, 10).await.is_empty());
}

/// What a killed node had leased comes back on time through the other, with its attempt counted.
async fn a_dead_node_blocks_nobody(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let policy = DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 5 };
    let (topic, subscription) = api.pair_with(|s| s.dead_letter_policy = Some(policy)).await;
    let (here, there) = both(&fixture, &api).await;
    let mut stream = here.stream_with(&subscription, |r| r.max_outstanding_messages = 10).await;
    api.publish(&topic, (0..10).map(|n| message(n.to_string()))).await;
    let since = Instant::now();
    let leased = stream.messages(10).await;
    fixture.nodes[0].kill();
    there.publish_texts(&topic, &["fresh"]).await;
    let mut other = there.stream(&subscription).await;
    assert_eq!(other.message().await.text(), "fresh");
    let mut back = BTreeSet::new();
    while back.len() < 10 {
        let received = other.message_within(Duration::from_secs(20)).await;
        assert_eq!(received.delivery_attempt, 2, "{}", received.text());
        back.insert(received.id().to_owned());
    }
    assert_took(since, 9.5, 3.0, "the leases of the dead node");
    assert_eq!(back, leased.iter().map(|r| r.id().to_owned()).collect());
}

/// C188: times are those of the store, so that a node whose clock is wrong neither dates messages wrongly nor ends leases early
/// or late.
async fn clocks_that_differ_make_no_difference(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let url = fixture.redis.as_ref().unwrap().url();
    for skew in ["+30s", "-30s"] {
        let env = [("BROKER_URL", url.clone()), ("PORT", ports::reserve().to_string()), ("ADMIN_ADDRESS", String::new())];
        let env = env.map(|(key, value)| (format!("CONNECTORS_GCP_{key}"), value)).into();
        let words = ["env".to_owned(), format!("LD_PRELOAD={}", library()), format!("FAKETIME={skew}")];
        // Time that is waited for passes as ever; only the time of day differs.
        let still = ["FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1"].map(str::to_owned);
        let log = fixture.folder.path().join(format!("node{skew}.log"));
        fixture.nodes.push(Node::start(NodeSpec { wrapper: [&words[..], &still].concat(), env, log }).unwrap());
    }
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.enable_message_ordering = true).await;
    let right = fixture.api_of_node(0, &api).await;
    let fast = fixture.api_of_node(2, &api).await;
    let slow = fixture.api_of_node(3, &api).await;
    for (n, node) in [&right, &fast, &slow].into_iter().cycle().take(9).enumerate() {
        let before = timestamp(0).seconds;
        node.publish(&topic, [message(n.to_string()).key("k")]).await;
        let received = slow.pull(&subscription, 1).await;
        let published = received[0].message.publish_time.as_ref().unwrap().seconds;
        assert!((before - 1..=timestamp(0).seconds + 1).contains(&published), "{published} is not about {before}");
        right.ack(&subscription, &received).await;
    }
    for (giver, taker) in [(&fast, &right), (&right, &slow), (&slow, &fast)] {
        right.publish(&topic, [message("leased")]).await;
        let since = Instant::now();
        giver.pull(&subscription, 1).await;
        let mut again = Vec::new();
        eventually("the lease runs out", Duration::from_secs(20), async || {
            again = taker.pull_now(&subscription, 1).await;
            !again.is_empty()
        })
        .await;
        assert_took(since, 9.5, 3.0, "the lease");
        taker.ack(&subscription, &again).await;
    }
    api.assert_drained(&topic, &subscription).await;
}

/// Each push subscription belongs to one node, and to another one when that dies.
async fn the_pushes_of_a_dead_node_are_taken_over(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (_, there) = both(&fixture, &api).await;
    let sink = Sink::start().await;
    let topic = api.create_topic("topic").await;
    for n in 0..8 {
        let push_endpoint = sink.url(&format!("/{n}"));
        let push = |s: &mut Subscription| s.push_config = Some(PushConfig { push_endpoint, ..Default::default() });
        api.create_subscription_with(&format!("push-{n}"), &topic, push).await;
    }
    let mut endpoints = BTreeSet::new();
    api.publish_texts(&topic, &["before"]).await;
    while endpoints.len() < 8 {
        endpoints.insert(sink.next().await.target);
    }
    fixture.nodes[0].kill();
    there.publish_texts(&topic, &["after"]).await;
    while !endpoints.is_empty() {
        // What the dead node may have pushed without an acknowledgement comes again.
        let pushed = sink.next_within(Duration::from_secs(30)).await;
        if pushed.text() == "after" {
            endpoints.remove(&pushed.target);
        }
    }
}
