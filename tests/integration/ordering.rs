//! Ordered delivery.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::{DeadLetterPolicy, RetryPolicy, SeekRequest, Subscription, seek_request::Target};

use crate::{
    fixture::{
        Backend, Fixture, message,
        message::{Build, texts},
        seconds, timestamp,
        wait::{SOON, assert_took},
        within,
    },
    for_durable_backends, for_every_backend,
};

for_every_backend!(
    later_messages_wait_while_an_earlier_one_is_out,
    a_nacked_message_comes_before_its_successors,
    an_expired_message_comes_before_its_successors,
    a_dead_letter_frees_its_key,
    a_backoff_holds_only_its_key,
    a_key_moves_to_another_stream_in_order,
    a_seek_replays_in_order,
    a_nack_in_the_middle_leaves_what_came_before_it_alone,
    a_failing_message_takes_its_key_with_it_and_is_counted_alone,
    each_key_arrives_in_order_under_load,
);
for_durable_backends!(order_survives_a_crash, a_key_waits_for_what_a_dead_session_holds);

fn ordered(s: &mut Subscription) {
    s.enable_message_ordering = true;
}

/// C094
async fn later_messages_wait_while_an_earlier_one_is_out(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(ordered).await;
        api.publish(&topic, ["k1", "k2", "k3"].map(|m| message(m).key("k"))).await;
        api.publish(&topic, [message("j1").key("j")]).await;
        let first = api.pull(&subscription, 1).await;
        let mut received = api.pull(&subscription, 1).await;
        received.extend(api.pull_now(&subscription, 10).await);
        let mut got = [texts(&first), texts(&received)].concat();
        got.sort_unstable();
        assert_eq!(got, ["j1", "k1"], "k2 and k3 are not for another caller while k1 is out");
        api.ack(&subscription, first.iter().chain(&received)).await;
        let rest = api.pull(&subscription, 2).await;
        assert_eq!(texts(&rest), ["k2", "k3"]);
        api.ack(&subscription, &rest).await;
        api.assert_drained(&topic, &subscription).await;
        // In one answer the messages of a key come together and in order.
        api.publish(&topic, (0..50).map(|n| message(n.to_string()).key("k"))).await;
        let received = api.pull_once(&subscription, 50).await;
        let numbers: Vec<_> = received.iter().map(|r| r.text().parse::<usize>().unwrap()).collect();
        assert_eq!(numbers, (0..received.len()).collect::<Vec<_>>());
    }
}

/// C095; the answer to an ack of a later message stands, so only unacked ones come again.
async fn a_nacked_message_comes_before_its_successors(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(ordered).await;
    let mut stream = api.stream(&subscription).await;
    api.publish(&topic, ["m1", "m2", "m3", "m4"].map(|m| message(m).key("k"))).await;
    let first = stream.messages(4).await;
    assert_eq!(texts(&first), ["m1", "m2", "m3", "m4"]);
    stream.ack(&first[1]);
    stream.nack(&first[0]);
    let mut seen = Vec::new();
    while seen.last().map(String::as_str) != Some("m4") {
        let received = stream.message().await;
        seen.push(received.text().to_owned());
        stream.ack(&received);
    }
    assert!(seen == ["m1", "m3", "m4"] || seen == ["m1", "m2", "m3", "m4"], "{seen:?}");
    // The key goes on.
    api.publish(&topic, [message("m5").key("k")]).await;
    assert_eq!(stream.message().await.text(), "m5");
}

/// C095, by expiry
async fn an_expired_message_comes_before_its_successors(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(ordered).await;
    let mut stream = api.stream_with(&subscription, |r| r.stream_ack_deadline_seconds = 600).await;
    api.publish(&topic, ["m1", "m2", "m3"].map(|m| message(m).key("k"))).await;
    let first = stream.messages(3).await;
    api.extend(&subscription, &first[..1], 1).await;
    for expected in ["m1", "m2", "m3"] {
        let received = stream.message().await;
        assert_eq!(received.text(), expected);
        stream.ack(&received);
    }
}

/// C097
async fn a_dead_letter_frees_its_key(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let graveyard = api.create_subscription("graveyard", &dead).await;
    let (topic, subscription) = api
        .pair_with(|s| {
            ordered(s);
            s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 5 });
        })
        .await;
    let mut stream = api.stream(&subscription).await;
    for (text, key) in [("a1", "a"), ("b1", "b")] {
        api.publish(&topic, [message(text).key(key)]).await;
        for attempt in 1..=5 {
            let received = stream.message().await;
            assert_eq!((received.text(), received.delivery_attempt), (text, attempt));
            stream.nack(&received);
        }
        let buried = api.take(&graveyard).await;
        assert_eq!((buried.text(), buried.message.ordering_key.as_str()), (text, key));
    }
    for (text, key) in [("a2", "a"), ("b2", "b"), ("c1", "c")] {
        api.publish(&topic, [message(text).key(key)]).await;
        let received = stream.message().await;
        assert_eq!((received.text(), received.delivery_attempt), (text, 1));
        stream.ack(&received);
    }
}

/// C098
async fn a_backoff_holds_only_its_key(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            ordered(s);
            s.retry_policy = Some(RetryPolicy { minimum_backoff: Some(seconds(3)), maximum_backoff: Some(seconds(3)) });
        })
        .await;
    let mut stream = api.stream(&subscription).await;
    api.publish(&topic, [message("k1").key("k")]).await;
    let first = stream.message().await;
    let since = Instant::now();
    stream.nack(&first);
    api.publish(&topic, [message("k2").key("k")]).await;
    api.publish(&topic, [message("j1").key("j")]).await;
    api.publish(&topic, [message("free")]).await;
    let others = stream.messages(2).await;
    let mut got = texts(&others);
    got.sort_unstable();
    assert_eq!(got, ["free", "j1"]);
    assert!(since.elapsed() < Duration::from_secs(3), "they waited for the other key");
    let again = stream.message().await;
    assert_eq!(again.text(), "k1");
    assert_took(since, 2.9, 1.5, "the backoff of 3 s");
    stream.ack(&again);
    assert_eq!(stream.message().await.text(), "k2");
}

/// C101
async fn a_key_moves_to_another_stream_in_order(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(ordered).await;
    let mut first = api.stream(&subscription).await;
    api.publish(&topic, [message("m1").key("k")]).await;
    let out = first.message().await;
    let mut second = api.stream(&subscription).await;
    // While m1 is out on the first stream the key stays there.
    api.publish(&topic, ["m2", "m3"].map(|m| message(m).key("k"))).await;
    assert_eq!(texts(&first.messages(2).await), ["m2", "m3"]);
    let since = Instant::now();
    drop(first);
    for expected in ["m1", "m2", "m3"] {
        let received = second.message_within(Duration::from_secs(20)).await;
        assert_eq!(received.text(), expected);
        second.ack(&received);
    }
    assert!(since.elapsed() > Duration::from_secs(8), "the leases of the first stream were not kept");
    assert_ne!(out.ack_id, "");
}

/// C124
async fn a_seek_replays_in_order(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            ordered(s);
            s.retain_acked_messages = true;
            s.ack_deadline_seconds = 600;
        })
        .await;
    let before = timestamp(-3600);
    api.publish(&topic, (1..=5).map(|n| message(format!("m{n}")).key("k"))).await;
    let received = api.pull(&subscription, 5).await;
    api.ack(&subscription, &received[..3]).await;
    // m4 and m5 are leased and block their key; the seek ends that.
    for _ in 0..2 {
        api.ok(SeekRequest { subscription: subscription.clone(), target: Some(Target::Time(before)) }).await;
        let again = api.pull(&subscription, 5).await;
        assert_eq!(texts(&again), ["m1", "m2", "m3", "m4", "m5"]);
    }
}

/// Exactly-once with order: what comes back behind a nacked message is settled by its new delivery alone.
async fn a_nack_in_the_middle_leaves_what_came_before_it_alone(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            ordered(s);
            s.enable_exactly_once_delivery = true;
            s.ack_deadline_seconds = 600;
        })
        .await;
    api.publish(&topic, ["m1", "m2", "m3", "m4"].map(|m| message(m).key("k"))).await;
    let first = api.pull(&subscription, 4).await;
    assert_eq!(texts(&first), ["m1", "m2", "m3", "m4"]);
    api.nack(&subscription, &first[1..2]).await;
    // m1 is still out with its consumer; m2 to m4 wait for it or come to the same one, but their first delivery is over.
    for over in &first[2..] {
        let refused = api.call(crate::fixture::api::acknowledge(&subscription, [over])).await;
        assert_eq!(refused.map(drop).map_err(|f| f.code), Err(tonic::Code::FailedPrecondition), "{}", over.text());
    }
    api.ack(&subscription, &first[..1]).await;
    let second = api.pull(&subscription, 3).await;
    assert_eq!(texts(&second), ["m2", "m3", "m4"]);
    api.ack(&subscription, &second).await;
    api.assert_drained(&topic, &subscription).await;
}

/// Order, retry policy and dead letters together: a failing head is delivered five times, its followers come back each time
/// without an attempt counted, and go on when the head is gone.
async fn a_failing_message_takes_its_key_with_it_and_is_counted_alone(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let graveyard = api.create_subscription("graveyard", &dead).await;
    let backoff = prost_types::Duration { seconds: 0, nanos: 100_000_000 };
    let (topic, subscription) = api
        .pair_with(|s| {
            ordered(s);
            s.ack_deadline_seconds = 600;
            s.retry_policy = Some(RetryPolicy { minimum_backoff: Some(backoff), maximum_backoff: Some(backoff) });
            s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 5 });
        })
        .await;
    api.publish(&topic, ["bad", "good1", "good2"].map(|m| message(m).key("k"))).await;
    let mut stream = api.stream_with(&subscription, |r| r.stream_ack_deadline_seconds = 600).await;
    for attempt in 1..=5 {
        let received = stream.messages(3).await;
        let got: Vec<_> = received.iter().map(|r| (r.text(), r.delivery_attempt)).collect();
        assert_eq!(got, [("bad", attempt), ("good1", 1), ("good2", 1)]);
        if attempt == 5 {
            api.ack(&subscription, &received[1..]).await;
        }
        api.nack(&subscription, &received[..1]).await;
    }
    drop(stream);
    let buried = api.take(&graveyard).await;
    assert_eq!((buried.text(), buried.message.ordering_key.as_str()), ("bad", "k"));
    api.assert_drained(&topic, &subscription).await;
}

/// Several keys, several streams, random nacks: what is acked of a key is acked in order.
async fn each_key_arrives_in_order_under_load(backend: Backend) {
    const KEYS: usize = 12;
    const EACH: usize = 30;
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(ordered).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        streams.push(api.stream_with(&subscription, |r| r.max_outstanding_messages = 8).await);
    }
    let publish = async {
        for n in 0..EACH {
            for key in 0..KEYS {
                api.publish(&topic, [message(n.to_string()).key(&format!("key-{key}"))]).await;
            }
        }
    };
    let consume = async {
        let mut next = BTreeMap::<String, usize>::new();
        let mut count = 0;
        while next.values().sum::<usize>() < KEYS * EACH {
            let waiting = streams.iter_mut().map(|s| Box::pin(s.message()));
            let (received, number, _) = futures::future::select_all(waiting).await;
            let expected = next.entry(received.message.ordering_key.clone()).or_default();
            let got = received.text().parse::<usize>().unwrap();
            count += 1;
            if got < *expected {
                // An at-least-once redelivery of what was acked: legal.
                streams[number].ack(&received);
            } else if got == *expected && count % 7 == 0 {
                streams[number].nack(&received);
            } else if got == *expected {
                *expected += 1;
                streams[number].ack(&received);
            } else {
                // Its predecessor was nacked after this one had been sent; it comes again behind it.
                streams[number].nack(&received);
            }
        }
    };
    within(Duration::from_secs(60), "all keys", async { tokio::join!(publish, consume) }).await;
}

/// A crash forgets neither the order nor which message holds its key.
async fn order_survives_a_crash(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let mut api = fixture.api().await;
    let (topic, subscription) = api.pair_with(ordered).await;
    api.publish(&topic, (0..20).map(|n| message(n.to_string()).key("k"))).await;
    for n in 0..5 {
        let received = within(SOON, "the next of the key", api.pull(&subscription, 1)).await;
        assert_eq!(received[0].text(), n.to_string());
        fixture.crash_and_restart();
        api = fixture.api_of_node(0, &api).await;
        api.ack(&subscription, &received).await;
    }
    let received = api.pull(&subscription, 15).await;
    let expected: Vec<_> = (5..20).map(|n| n.to_string()).collect();
    assert_eq!(texts(&received), expected);
}

/// Sessions of a new process are not those of the one before, whatever their numbers: a key goes on when the lease of the
/// session that had it is over, and with the message that was leased.
async fn a_key_waits_for_what_a_dead_session_holds(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(ordered).await;
    let mut first = api.stream_with(&subscription, |r| r.max_outstanding_messages = 1).await;
    api.publish(&topic, ["m1", "m2", "m3"].map(|m| message(m).key("k"))).await;
    assert_eq!(first.message().await.text(), "m1");
    fixture.crash_and_restart();
    let api = fixture.api_of_node(0, &api).await;
    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(api.stream(&subscription).await);
    }
    for expected in ["m1", "m2", "m3"] {
        let next = streams.iter_mut().map(|s| Box::pin(s.message_within(Duration::from_secs(25))));
        let (received, number, _) = futures::future::select_all(next).await;
        assert_eq!(received.text(), expected);
        streams[number].ack(&received);
    }
}
