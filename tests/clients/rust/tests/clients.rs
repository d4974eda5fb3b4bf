//! Publishing, streaming and settling with Google's client for Rust.

use std::collections::{BTreeMap, BTreeSet};

use google_cloud_pubsub::{
    model::{DeadLetterPolicy, Message},
    subscriber::{ShutdownBehavior, handler::Handler},
};
use landline_rust_client_tests::{SOON, Server, next, text};

#[tokio::test(flavor = "multi_thread")]
async fn published_messages_arrive_once_each() {
    let server = Server::start();
    let clients = server.clients().await;
    clients.pair(|s| s).await;
    let mut stream = clients.subscriber.subscribe(&clients.subscription).set_max_outstanding_messages(10).build();
    let texts: Vec<_> = (0..300).map(|n| n.to_string()).collect();
    let ids = clients.publish(&texts.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut seen = BTreeSet::new();
    for _ in 0..300 {
        let (message, handler) = next(&mut stream).await;
        assert_eq!(handler.delivery_attempt(), None);
        handler.ack();
        assert!(seen.insert(message.message_id.clone()), "{} came twice", message.message_id);
    }
    assert_eq!(seen, ids.into_iter().collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nacked_message_comes_again() {
    let server = Server::start();
    let clients = server.clients().await;
    clients.pair(|s| s).await;
    let mut stream = clients.subscriber.subscribe(&clients.subscription).build();
    let ids = clients.publish(&["m1"]).await;
    for _ in 0..3 {
        let (message, handler) = next(&mut stream).await;
        assert_eq!(message.message_id, ids[0]);
        handler.nack();
    }
    next(&mut stream).await.1.ack();
}

#[tokio::test(flavor = "multi_thread")]
async fn ordered_messages_arrive_in_order() {
    let server = Server::start();
    let clients = server.clients().await;
    clients.pair(|s| s.set_enable_message_ordering(true)).await;
    let publisher = clients.publisher().await;
    let mut futures = Vec::new();
    for n in 0..30 {
        for key in ["a", "b", "c"] {
            futures.push(publisher.publish(Message::new().set_data(n.to_string()).set_ordering_key(key)));
        }
    }
    for future in futures {
        future.await.expect("a published message");
    }
    let mut stream = clients.subscriber.subscribe(&clients.subscription).build();
    let mut got = BTreeMap::<String, Vec<usize>>::new();
    for _ in 0..90 {
        let (message, handler) = next(&mut stream).await;
        got.entry(message.ordering_key.clone()).or_default().push(text(&message).parse().expect("a number"));
        handler.ack();
    }
    let all: Vec<_> = (0..30).collect();
    assert_eq!(got, ["a", "b", "c"].map(|k| (k.to_owned(), all.clone())).into());
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_acks_are_confirmed_and_lost_leases_fail() {
    let server = Server::start();
    let clients = server.clients().await;
    clients.pair(|s| s.set_enable_exactly_once_delivery(true).set_retain_acked_messages(true)).await;
    let mut stream = clients.subscriber.subscribe(&clients.subscription).build();
    clients.publish(&["m1", "m2"]).await;
    let mut handlers = Vec::new();
    for _ in 0..2 {
        let (_, handler) = next(&mut stream).await;
        let Handler::ExactlyOnce(handler) = handler else { panic!("not exactly-once: {handler:?}") };
        handlers.push(handler);
    }
    let second = handlers.pop().expect("two handlers");
    let first = handlers.pop().expect("two handlers");
    tokio::time::timeout(SOON, first.confirmed_ack()).await.expect("an answer").expect("a confirmed ack");
    // A seek ends every lease behind the client's back.
    let past = google_cloud_wkt::Timestamp::clamp(1_700_000_000, 0);
    clients.subscriptions.seek().set_subscription(&clients.subscription).set_time(past).send().await.expect("a seek");
    let lost = tokio::time::timeout(SOON, second.confirmed_ack()).await.expect("an answer");
    assert!(lost.is_err(), "the ack of a lost lease was confirmed");
    let mut again = BTreeSet::new();
    while again.len() < 2 {
        let (message, handler) = next(&mut stream).await;
        let Handler::ExactlyOnce(handler) = handler else { panic!("not exactly-once") };
        tokio::time::timeout(SOON, handler.confirmed_ack()).await.expect("an answer").expect("a confirmed ack");
        assert!(again.insert(text(&message)), "{} came after its confirmed ack", text(&message));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_are_counted_and_the_last_is_followed_by_the_dead_letter_topic() {
    let server = Server::start();
    let clients = server.clients().await;
    let dead = format!("projects/{}/topics/dead", clients.project);
    let graveyard = format!("projects/{}/subscriptions/graveyard", clients.project);
    clients.topics.create_topic().set_name(&dead).send().await.expect("a topic");
    clients.subscriptions.create_subscription().set_name(&graveyard).set_topic(&dead).send().await.expect("a subscription");
    let policy = DeadLetterPolicy::new().set_dead_letter_topic(&dead).set_max_delivery_attempts(5);
    clients.pair(|s| s.set_dead_letter_policy(policy)).await;
    clients.publish(&["m1"]).await;
    let mut stream = clients.subscriber.subscribe(&clients.subscription).build();
    for attempt in 1..=5 {
        let (_, handler) = next(&mut stream).await;
        assert_eq!(handler.delivery_attempt(), Some(attempt));
        handler.nack();
    }
    let mut stream = clients.subscriber.subscribe(&graveyard).build();
    let (message, handler) = next(&mut stream).await;
    assert_eq!(text(&message), "m1");
    handler.ack();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_the_server_is_killed() {
    let mut server = Server::start();
    let clients = server.clients().await;
    clients.pair(|s| s).await;
    let subscribe = || {
        let builder = clients.subscriber.subscribe(&clients.subscription);
        builder.set_shutdown_behavior(ShutdownBehavior::NackImmediately).build()
    };
    let mut stream = subscribe();
    let publisher = clients.publisher().await;
    let mut confirmed = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for round in 0..3 {
        // Sent before the kill, answered before or after it: the client retries by itself.
        let futures: Vec<_> = (0..100).map(|n| publisher.publish(Message::new().set_data(format!("{round}-{n}")))).collect();
        let (message, handler) = next(&mut stream).await;
        seen.insert(message.message_id);
        handler.ack();
        server.crash_and_restart();
        for future in futures {
            confirmed.insert(tokio::time::timeout(2 * SOON, future).await.expect("an answer").expect("a published message"));
        }
    }
    while !confirmed.is_subset(&seen) {
        let next = tokio::time::timeout(3 * SOON, stream.next()).await;
        let next = next.unwrap_or_else(|_| panic!("{} confirmed messages never came", confirmed.difference(&seen).count()));
        let (message, handler) = next.expect("the client reopens its stream").expect("a message");
        seen.insert(message.message_id);
        handler.ack();
    }
}
