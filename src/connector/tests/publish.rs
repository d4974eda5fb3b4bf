use super::*;
use crate::broker::{Effect, Expect, Kind};

fn with_attribute(data: &str, key: &str) -> Bytes {
    EncodedMessage::encode(data.as_bytes(), [(key, "")], "").wire().clone()
}

#[tokio::test]
async fn messages_reach_the_subscriptions_there_are_at_that_moment() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    rig.publish("t11", "m0").await;
    let s1 = rig.subscription("s11", "t11").await;
    rig.publish("t11", "m1").await;
    let s2 = rig.subscription("s12", "t11").await;
    rig.publish("t11", "m2").await;
    rig.connector.delete_subscription(&s1.name).await.unwrap();
    let s1_again = rig.subscription("s11", "t11").await;
    rig.publish("t11", "m3").await;
    assert_eq!(rig.pulled(&s2).await, ["m2", "m3"]);
    assert_eq!(rig.pulled(&s1_again).await, ["m3"]);
}

#[tokio::test]
async fn ids_are_unique_and_in_the_order_of_the_messages() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let subscription = rig.subscription("s11", "t11").await;
    let batch = ["a", "b", "c"].map(message).to_vec();
    let ids = rig.connector.publish(&topic_name("t11"), batch).await.unwrap();
    assert!(ids.len() == 3 && ids.windows(2).all(|pair| pair[0] < pair[1]));
    assert_eq!(rig.pulled(&subscription).await, ["a", "b", "c"]);
}

#[tokio::test]
async fn a_filter_keeps_messages_out_of_its_queue_alone() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let draft = SubscriptionDraft { filter: "attributes:keep".into(), ..subscription_draft("s11", "t11") };
    let filtered = rig.connector.create_subscription(draft).await.unwrap().subscription;
    let all = rig.subscription("s12", "t11").await;
    let batch = vec![with_attribute("a", "keep"), with_attribute("b", "other"), message("c"), with_attribute("d", "keep")];
    rig.connector.publish(&topic_name("t11"), batch).await.unwrap();
    assert_eq!(rig.broker.stats(&super::super::catalog::queue_ref(&filtered)).await.unwrap().undelivered_messages, 2);
    assert_eq!(rig.pulled(&filtered).await, ["a", "d"]);
    assert_eq!(rig.pulled(&all).await, ["a", "b", "c", "d"]);
}

#[tokio::test]
async fn one_bad_message_fails_its_batch_and_nothing_is_stored() {
    let clock = Clock::System;
    let broker = Embedded::memory_with_clock(clock);
    let options = Options { max_message_bytes: 100, ..Options::default() };
    let connector = Connector::open(broker.clone(), options).await.unwrap();
    connector.create_topic(topic_draft("t11")).await.unwrap();
    let subscription = connector.create_subscription(subscription_draft("s11", "t11")).await.unwrap().subscription;
    let long = message(&"x".repeat(101));
    let error = connector.publish(&topic_name("t11"), vec![message("ok"), long]).await.unwrap_err().to_string();
    let expected = "The value for message_size is too large. You passed 101 in the request, but the maximum value is 100.";
    assert_eq!(error, expected);
    for (batch, expected) in [
        (vec![message("ok"), Bytes::new(), message("ok")], "is empty"),
        (vec![], "message_count"),
        (vec![message("ok"); 1001], "1001"),
        (vec![Bytes::from_static(&[0x0a, 0x05, 0x01])], "not a valid protocol buffer"),
    ] {
        let error = connector.publish(&topic_name("t11"), batch).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let queue = super::super::catalog::queue_ref(&subscription);
    assert_eq!(broker.stats(&queue).await.unwrap().undelivered_messages, 0);
    assert_eq!(connector.publish(&topic_name("t11"), vec![message("ok"); 1000]).await.unwrap().len(), 1000);
    assert_eq!(broker.stats(&queue).await.unwrap().undelivered_messages, 1000);
}

#[tokio::test]
async fn the_size_of_a_message_is_that_of_its_data() {
    let options = Options { max_message_bytes: 100, ..Options::default() };
    let connector = Connector::open(Embedded::memory(), options).await.unwrap();
    connector.create_topic(topic_draft("t11")).await.unwrap();
    let sized = |bytes: usize| {
        let (data, value) = ("x".repeat(bytes), "v".repeat(1024));
        EncodedMessage::encode(data.as_bytes(), [("a", value.as_str()), ("b", &value)], &"k".repeat(1024)).wire().clone()
    };
    connector.publish(&topic_name("t11"), vec![sized(100)]).await.unwrap();
    let error = connector.publish(&topic_name("t11"), vec![sized(101)]).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { field: "message_size", .. }), "{error}");
}

#[tokio::test]
async fn a_node_that_hears_of_no_change_still_loses_no_message() {
    let rig = Rig::new().await;
    let other = rig.second_node().await;
    // No events reach it: what it remembers is corrected by the broker alone.
    for task in other.tasks.lock().drain(..) {
        task.abort();
    }
    rig.topic("t11").await;
    // The other node remembers the topic without subscriptions.
    other.publish(&topic_name("t11"), vec![message("m0")]).await.unwrap();
    let subscription = rig.subscription("s11", "t11").await;
    other.publish(&topic_name("t11"), vec![message("m1")]).await.unwrap();
    assert_eq!(rig.pulled(&subscription).await, ["m1"]);

    // The same name with a filter: the remembered subscription without one must not be used.
    rig.connector.delete_subscription(&subscription.name).await.unwrap();
    let draft = SubscriptionDraft { filter: "attributes:keep".into(), ..subscription_draft("s11", "t11") };
    let filtered = rig.connector.create_subscription(draft).await.unwrap().subscription;
    other.publish(&topic_name("t11"), vec![message("m2"), with_attribute("m3", "keep")]).await.unwrap();
    assert_eq!(rig.pulled(&filtered).await, ["m3"]);

    // The same topic name again: the remembered incarnation is gone.
    rig.connector.delete_topic(&topic_name("t11")).await.unwrap();
    rig.topic("t11").await;
    let fresh = rig.subscription("s12", "t11").await;
    other.publish(&topic_name("t11"), vec![message("m4")]).await.unwrap();
    assert_eq!((rig.pulled(&fresh).await, rig.pulled(&filtered).await), (vec!["m4".to_owned()], vec![]));
    rig.connector.delete_topic(&topic_name("t11")).await.unwrap();
    let error = other.publish(&topic_name("t11"), vec![message("m5")]).await;
    assert_eq!(error, Err(Error::NotFound("t11".into())));
}

#[tokio::test]
async fn no_message_is_lost_while_subscriptions_are_created() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let other = rig.second_node().await;
    let publisher = tokio::spawn(async move {
        for i in 0..200 {
            other.publish(&topic_name("t11"), vec![message(&format!("m{i:03}"))]).await.unwrap();
        }
    });
    let mut subscriptions = Vec::new();
    for i in 0..20 {
        subscriptions.push(rig.subscription(&format!("s{i:02}"), "t11").await);
    }
    publisher.await.unwrap();
    rig.publish("t11", "m200").await;
    for subscription in &subscriptions {
        // Whatever came first, from there on nothing is missing.
        let mut pulled = Vec::new();
        loop {
            let more = rig.pulled(subscription).await;
            if more.is_empty() {
                break;
            }
            pulled.extend(more);
        }
        let first: usize = pulled[0][1..].parse().unwrap();
        let expected: Vec<_> = (first..=200).map(|i| format!("m{i:03}")).collect();
        assert_eq!(pulled, expected, "{}", subscription.name);
    }
}

#[tokio::test]
async fn a_damaged_subscription_record_stops_publishing_rather_than_losing_its_messages() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let subscription = rig.subscription("s11", "t11").await;
    let (kind, name) = (Kind::Subscription, subscription.name.to_string());
    let version = rig.broker.get(kind, &name).await.unwrap().unwrap().version;
    let body = Some(Bytes::from_static(b"{\"format\":9}"));
    let change = crate::broker::Change { kind, name, expect: Expect::Version(version), body, effect: Effect::None };
    rig.broker.change(change).await.unwrap();
    rig.connector.forget_subscription(&subscription.name);
    let Err(Error::Internal(text)) = rig.connector.publish(&topic_name("t11"), vec![message("a")]).await else {
        panic!("published")
    };
    assert!(text.contains("format 9"), "{text}");
}
