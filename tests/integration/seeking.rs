//! Seek, snapshots and retention.

use std::{collections::BTreeSet, time::Duration};

use landline::api::proto::pubsub::{
    CreateSnapshotRequest, DeadLetterPolicy, DeleteSnapshotRequest, GetSnapshotRequest, ListSnapshotsRequest,
    ListTopicSnapshotsRequest, PubsubMessage, SeekRequest, SeekResponse, Snapshot, Topic, UpdateSnapshotRequest,
    seek_request::Target,
};
use prost_types::Timestamp;
use tonic::Code;

use crate::{
    fixture::{
        Api, Backend, Fixture, eventually, mask, message,
        message::{Build, texts},
        seconds, timestamp,
        wait::SOON,
    },
    for_every_backend, for_one_backend,
};

for_every_backend!(
    a_seek_to_the_past_replays_what_is_retained,
    a_seek_to_now_purges_what_came_before,
    a_seek_to_a_publish_time_includes_that_message,
    an_ack_from_before_a_seek_does_not_count_after_it,
    a_snapshot_restores_its_state,
    a_topic_that_retains_lets_new_subscriptions_look_back,
    a_seek_serves_an_open_stream,
    a_seek_brings_back_nothing_that_the_filter_keeps_out,
    a_seek_keeps_the_order_of_a_key_whose_publish_was_acknowledged_in_part,
    a_seek_begins_the_attempts_anew,
    a_subscription_moves_back_and_forth_over_many_chunks,
);
for_one_backend!(bad_snapshots_and_seeks_are_refused, snapshots_have_expiry_and_labels);

async fn seek(api: &Api, subscription: &str, target: Target) {
    let request = SeekRequest { subscription: subscription.to_owned(), target: Some(target) };
    assert_eq!(api.ok(request).await, SeekResponse {});
}

async fn snapshot(api: &Api, id: &str, subscription: &str) -> Snapshot {
    let name = api.snapshot(id);
    api.ok(CreateSnapshotRequest { name, subscription: subscription.to_owned(), ..Default::default() }).await
}

async fn consume(api: &Api, subscription: &str, count: usize) -> Vec<String> {
    let received = api.pull(subscription, count).await;
    api.ack(subscription, &received).await;
    let mut got: Vec<_> = received.iter().map(|r| r.text().to_owned()).collect();
    got.sort_unstable();
    got
}

/// C115
async fn a_seek_to_the_past_replays_what_is_retained(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, keeping) = api.pair_with(|s| s.retain_acked_messages = true).await;
        let dropping = api.create_subscription("dropping", &topic).await;
        let before = timestamp(-3600);
        api.publish_texts(&topic, &["m1", "m2", "m3"]).await;
        consume(&api, &keeping, 3).await;
        let leased = api.pull(&dropping, 3).await;
        api.ack(&dropping, &leased[..2]).await;
        let rest = leased[2].text();
        seek(&api, &keeping, Target::Time(before)).await;
        seek(&api, &dropping, Target::Time(before)).await;
        assert_eq!(consume(&api, &keeping, 3).await, ["m1", "m2", "m3"]);
        // The one that was not acked is still retained, and its lease is over.
        assert_eq!(consume(&api, &dropping, 1).await, [rest]);
        api.assert_drained(&topic, &dropping).await;
    }
}

/// C116
async fn a_seek_to_now_purges_what_came_before(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(|s| s.retain_acked_messages = true).await;
        for round in 0..5 {
            api.publish_texts(&topic, &["old"]).await;
            // The clock of this machine is the server's; its next millisecond is after the publish time.
            let published = timestamp(0);
            let mut now = timestamp(0);
            while now.seconds == published.seconds && now.nanos / 1_000_000 == published.nanos / 1_000_000 {
                tokio::task::yield_now().await;
                now = timestamp(0);
            }
            seek(&api, &subscription, Target::Time(now)).await;
            let new = format!("new{round}");
            api.publish_texts(&topic, &[&new]).await;
            assert_eq!(consume(&api, &subscription, 1).await, [new]);
            assert!(api.pull_now(&subscription, 10).await.is_empty());
        }
        // A seek to the future purges as well.
        api.publish_texts(&topic, &["old"]).await;
        seek(&api, &subscription, Target::Time(timestamp(3600))).await;
        assert!(api.pull_now(&subscription, 10).await.is_empty());
    }
}

/// C118
async fn a_seek_to_a_publish_time_includes_that_message(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(|s| s.retain_acked_messages = true).await;
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.take(&subscription).await;
        seek(&api, &subscription, Target::Time(received.message.publish_time.unwrap())).await;
        assert_eq!(api.take(&subscription).await.id(), received.id());
        let mut after: Timestamp = received.message.publish_time.unwrap();
        after.nanos += 1;
        seek(&api, &subscription, Target::Time(after)).await;
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C119
async fn an_ack_from_before_a_seek_does_not_count_after_it(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(|s| s.retain_acked_messages = true).await;
        let before = timestamp(-3600);
        let state = snapshot(&api, "snap", &subscription).await;
        api.publish_texts(&topic, &["m1"]).await;
        for target in [Target::Time(before), Target::Snapshot(state.name)] {
            let received = api.pull(&subscription, 1).await;
            seek(&api, &subscription, target).await;
            api.ack(&subscription, &received).await;
            api.extend(&subscription, &received, 600).await;
            let again = api.pull(&subscription, 1).await;
            assert_eq!(again[0].id(), received[0].id());
            api.nack(&subscription, &again).await;
        }
    }
}

/// A snapshot holds what was unacked, and everything published after it.
async fn a_snapshot_restores_its_state(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["acked", "leased", "waiting"]).await;
        let received = api.pull(&subscription, 3).await;
        for r in received.iter().filter(|r| r.text() == "acked") {
            api.ack(&subscription, [r]).await;
        }
        let state = snapshot(&api, "snap", &subscription).await;
        assert_eq!(state.topic, topic);
        api.publish_texts(&topic, &["later"]).await;
        api.ack(&subscription, &received).await;
        assert_eq!(consume(&api, &subscription, 1).await, ["later"]);
        for _ in 0..2 {
            seek(&api, &subscription, Target::Snapshot(state.name.clone())).await;
            assert_eq!(consume(&api, &subscription, 3).await, ["later", "leased", "waiting"]);
            assert!(api.pull_now(&subscription, 10).await.is_empty());
        }
        // Another subscription of the topic may use it, also one made later.
        let other = api.create_subscription("other", &topic).await;
        seek(&api, &other, Target::Snapshot(state.name.clone())).await;
        assert_eq!(consume(&api, &other, 3).await, ["later", "leased", "waiting"]);
        let listed = api.ok(ListTopicSnapshotsRequest { topic: topic.clone(), ..Default::default() }).await.snapshots;
        assert_eq!(listed, std::slice::from_ref(&state.name));
        let listed = api.ok(ListSnapshotsRequest { project: api.parent(), ..Default::default() }).await.snapshots;
        assert_eq!(listed, std::slice::from_ref(&state));
        api.ok(DeleteSnapshotRequest { snapshot: state.name.clone() }).await;
        assert_eq!(api.fails(GetSnapshotRequest { snapshot: state.name.clone() }).await, Code::NotFound);
        let request = SeekRequest { subscription, target: Some(Target::Snapshot(state.name)) };
        assert_eq!(api.fails(request).await, Code::NotFound);
    }
}

/// C121
async fn bad_snapshots_and_seeks_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (_, subscription) = api.pair().await;
        let create = |name: &str, subscription: &str| CreateSnapshotRequest {
            name: name.to_owned(),
            subscription: subscription.to_owned(),
            ..Default::default()
        };
        if api.transport == crate::fixture::Transport::Grpc {
            assert_eq!(api.fails(create("snap1", &subscription)).await, Code::InvalidArgument);
        }
        let name = api.snapshot("snap");
        assert_eq!(api.fails(create(&name, &api.subscription("none"))).await, Code::NotFound);
        api.ok(create(&name, &subscription)).await;
        assert_eq!(api.fails(create(&name, &subscription)).await, Code::AlreadyExists);

        let other = api.create_topic("other").await;
        let stranger = api.create_subscription("stranger", &other).await;
        let seek = |subscription: &str, target| SeekRequest { subscription: subscription.to_owned(), target };
        let foreign = api.fails(seek(&stranger, Some(Target::Snapshot(name.clone())))).await;
        assert!([Code::FailedPrecondition, Code::InvalidArgument].contains(&foreign), "{foreign:?}");
        let missing = Some(Target::Snapshot(api.snapshot("none")));
        assert_eq!(api.fails(seek(&subscription, missing)).await, Code::NotFound);
        assert_eq!(api.fails(seek(&subscription, None)).await, Code::InvalidArgument);
        assert_eq!(api.fails(seek(&subscription, Some(Target::Snapshot("snap".into())))).await, Code::InvalidArgument);
        let time = Some(Target::Time(timestamp(0)));
        assert_eq!(api.fails(seek(&api.subscription("none"), time)).await, Code::NotFound);
        assert_eq!(api.fails(DeleteSnapshotRequest { snapshot: api.snapshot("none") }).await, Code::NotFound);
    }
}

/// C122, the part that needs no moved clock: the rest is checked where the clock is an argument.
async fn snapshots_have_expiry_and_labels(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (_, subscription) = api.pair().await;
        let labels = [("a".to_owned(), "1".to_owned())].into();
        let request = CreateSnapshotRequest { name: api.snapshot("snap"), subscription, labels, ..Default::default() };
        let created = api.ok(request.clone()).await;
        assert_eq!(created.labels, request.labels);
        let expected = timestamp(7 * 86_400).seconds;
        assert!((expected - 30..=expected).contains(&created.expire_time.unwrap().seconds), "{created:?}");
        let moved = Snapshot { expire_time: Some(timestamp(2 * 86_400)), ..created.clone() };
        let update_mask = Some(mask(&["expire_time"]));
        let updated = api.ok(UpdateSnapshotRequest { snapshot: Some(moved.clone()), update_mask }).await;
        assert_eq!(updated.expire_time.unwrap().seconds, moved.expire_time.unwrap().seconds);
        let update_mask = Some(mask(&["topic"]));
        assert_eq!(api.fails(UpdateSnapshotRequest { snapshot: Some(moved), update_mask }).await, Code::InvalidArgument);
    }
}

/// C125
async fn a_topic_that_retains_lets_new_subscriptions_look_back(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = Topic { name: api.topic("orders"), message_retention_duration: Some(seconds(3600)), ..Default::default() };
        let topic = api.ok(topic).await.name;
        api.publish_texts(&topic, &["m1", "m2", "m3"]).await;
        let subscription = api.create_subscription("late", &topic).await;
        let got = api.get_subscription(&subscription).await.unwrap();
        assert_eq!(got.topic_message_retention_duration, Some(seconds(3600)));
        assert!(api.pull_now(&subscription, 10).await.is_empty(), "nothing old without a seek");
        seek(&api, &subscription, Target::Time(timestamp(-3600))).await;
        assert_eq!(consume(&api, &subscription, 3).await, ["m1", "m2", "m3"]);
        // Acked messages come back too, without retain_acked_messages: the topic keeps them.
        seek(&api, &subscription, Target::Time(timestamp(-3600))).await;
        assert_eq!(consume(&api, &subscription, 3).await, ["m1", "m2", "m3"]);
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C115: delivery starts without a new stream.
async fn a_seek_serves_an_open_stream(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.retain_acked_messages = true).await;
    let mut stream = api.stream_with(&subscription, |r| r.max_outstanding_messages = 3).await;
    api.publish_texts(&topic, &["m1", "m2", "m3"]).await;
    // Two acked, one outstanding: the seek frees its slot as well.
    let received = stream.messages(3).await;
    api.ack(&subscription, &received[..2]).await;
    seek(&api, &subscription, Target::Time(timestamp(-3600))).await;
    let again = stream.messages(3).await;
    let mut got = texts(&again);
    got.sort_unstable();
    assert_eq!(got, ["m1", "m2", "m3"]);
}

/// C038. Also what was published before the subscription was there, or what another one's snapshot holds.
async fn a_seek_brings_back_nothing_that_the_filter_keeps_out(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let filtered = |s: &mut landline::api::proto::pubsub::Subscription| s.filter = r#"attributes.k = "1""#.into();
    for api in fixture.apis().await {
        for retention in [None, Some(seconds(3600))] {
            let id = format!("orders-{}", retention.is_some());
            let name = api.topic(&id);
            let topic = api.ok(Topic { name, message_retention_duration: retention, ..Default::default() }).await.name;
            let all = api.create_subscription(&format!("all-{id}"), &topic).await;
            let early = api.create_subscription_with(&format!("early-{id}"), &topic, filtered).await;
            // A few among many, before and after the snapshot, so that whole responses may be kept out.
            let mixed = |round: usize| {
                (0..30).map(move |n| {
                    let k = if n % 10 == 9 { "1" } else { "2" };
                    message(format!("{round}-{n:02}")).attribute("k", k)
                })
            };
            let expected = ["1-09", "1-19", "1-29", "2-09", "2-19", "2-29"];
            api.publish(&topic, mixed(1)).await;
            let held = snapshot(&api, &format!("snap-{id}"), &all).await.name;
            api.publish(&topic, mixed(2)).await;
            let late = api.create_subscription_with(&format!("late-{id}"), &topic, filtered).await;
            let mut targets = vec![(&early, Target::Snapshot(held.clone())), (&late, Target::Snapshot(held))];
            if retention.is_some() {
                targets.push((&late, Target::Time(timestamp(-600))));
            }
            for (subscription, target) in targets {
                seek(&api, subscription, target.clone()).await;
                let mut got = Vec::new();
                while got.len() < expected.len() {
                    got.push(api.take(subscription).await.text().to_owned());
                }
                got.sort_unstable();
                assert_eq!(got, expected, "{target:?}");
                eventually("the others are gone", SOON, async || api.pull_now(subscription, 10).await.is_empty()).await;
                seek(&api, subscription, target.clone()).await;
                let mut stream = api.stream(subscription).await;
                let mut got = Vec::new();
                for received in stream.messages(expected.len()).await {
                    stream.ack(&received);
                    got.push(received.text().to_owned());
                }
                got.sort_unstable();
                assert_eq!(got, expected, "{target:?}");
                assert!(stream.try_message(Duration::from_millis(300)).await.is_none(), "{target:?}");
            }
        }
    }
}

/// C124: what failed before a seek does not count after it.
async fn a_seek_begins_the_attempts_anew(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let policy = DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 5 };
    let (topic, subscription) = api.pair_with(|s| s.dead_letter_policy = Some(policy)).await;
    api.publish_texts(&topic, &["m1"]).await;
    let state = snapshot(&api, "snap", &subscription).await;
    for target in [Target::Time(timestamp(-3600)), Target::Snapshot(state.name)] {
        for attempt in 1..=4 {
            let received = api.pull(&subscription, 1).await;
            assert_eq!(received[0].delivery_attempt, attempt);
            api.nack(&subscription, &received).await;
        }
        seek(&api, &subscription, target).await;
    }
    let received = api.pull(&subscription, 1).await;
    assert_eq!(received[0].delivery_attempt, 1);
}

/// More than the steps that a move over a store is cut into, published one by one and in batches, partly acked, with messages
/// that come and are acked while it goes on.
async fn a_subscription_moves_back_and_forth_over_many_chunks(backend: Backend) {
    const SINGLE: usize = 700;
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.ack_deadline_seconds = 600;
            s.retain_acked_messages = true;
        })
        .await;
    let plain = api.create_subscription_with("plain", &topic, |s| s.ack_deadline_seconds = 600).await;
    let single: Vec<_> = (0..SINGLE).map(|n| format!("single-{n}")).collect();
    for part in single.chunks(50) {
        futures::future::join_all(part.iter().map(|text| api.publish(&topic, [message(text)]))).await;
    }
    let batch: Vec<_> = (0..900).map(|n| format!("batch-{n}")).collect();
    for part in batch.chunks(100) {
        api.publish(&topic, part.iter().map(message)).await;
    }
    let all: BTreeSet<String> = single.into_iter().chain(batch).collect();
    let take = async |subscription: &str, count: usize| -> BTreeSet<String> {
        let mut got = BTreeSet::new();
        while got.len() < count {
            let received = api.pull(subscription, (count - got.len()).min(500)).await;
            got.extend(received.iter().map(|r| r.text().to_owned()));
            api.ack(subscription, &received).await;
        }
        got
    };
    let acked = take(&subscription, 333).await;
    let state = snapshot(&api, "snap", &subscription).await;
    let left: BTreeSet<_> = all.difference(&acked).cloned().collect();
    assert_eq!(take(&subscription, left.len()).await, left);
    for other in [&subscription, &plain, &subscription] {
        // Both go on at the same time; what is published meanwhile comes in any case.
        let moving = seek(&api, other, Target::Snapshot(state.name.clone()));
        let busy = async {
            for n in 0..10 {
                api.publish_texts(&topic, &[&format!("later-{n}")]).await;
            }
        };
        tokio::join!(moving, busy);
        let got: BTreeSet<_> = take(other, left.len() + 10).await;
        let kept: BTreeSet<_> = got.iter().filter(|text| !text.starts_with("later")).cloned().collect();
        assert_eq!(kept, left);
        assert!(api.pull_now(other, 10).await.iter().all(|r| r.text().starts_with("later")));
    }
    seek(&api, &subscription, Target::Time(timestamp(-3600))).await;
    let mut got = BTreeSet::new();
    while !got.is_superset(&all) {
        let received = api.pull_once(&subscription, 500).await;
        got.extend(received.iter().map(|r| r.text().to_owned()));
        api.ack(&subscription, &received).await;
    }
}

/// Also where the acknowledged part lies between the others.
async fn a_seek_keeps_the_order_of_a_key_whose_publish_was_acknowledged_in_part(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let name = api.topic("orders");
        let retention = Some(seconds(3600));
        let topic = api.ok(Topic { name, message_retention_duration: retention, ..Default::default() }).await.name;
        let subscription = api.create_subscription_with("ordered", &topic, |s| {
            s.enable_message_ordering = true;
            s.ack_deadline_seconds = 600;
        });
        let subscription = subscription.await;
        let sent: Vec<String> = (0..40).map(|n| format!("{n:02}")).collect();
        let keyed = |text: &String| PubsubMessage { data: text.clone().into(), ordering_key: "k".into(), ..Default::default() };
        for batch in sent.chunks(10) {
            api.publish(&topic, batch.iter().map(keyed)).await;
        }
        for acked in [vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], vec![2, 5, 13, 14, 18]] {
            let received = api.pull(&subscription, 25).await;
            api.ack(&subscription, acked.iter().map(|at| &received[*at])).await;
            seek(&api, &subscription, Target::Time(timestamp(-600))).await;
            let mut got = Vec::new();
            while got.len() < sent.len() {
                let received = api.pull(&subscription, 1).await;
                got.extend(received.iter().map(|r| r.text().to_owned()));
                api.ack(&subscription, &received).await;
            }
            assert_eq!(got, sent, "after {acked:?}");
            seek(&api, &subscription, Target::Time(timestamp(-600))).await;
        }
    }
}
