use std::time::Duration;

use super::*;
use crate::connector::{
    AckFailure,
    rig::{Rig, ids},
};

#[tokio::test]
async fn an_acknowledged_message_does_not_come_back() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a", "b"]).await;
    let pulled = rig.pull(&sub, 10).await;
    rig.connector.acknowledge(&sub, &ids(&pulled)[..1]).await.unwrap();
    rig.pass(Duration::from_secs(11));
    assert_eq!(rig.texts(&sub).await, ["b"]);
}

#[tokio::test]
async fn a_nack_brings_the_message_back_at_once() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let pulled = rig.pull(&sub, 10).await;
    assert!(rig.texts(&sub).await.is_empty());
    rig.connector.modify_ack_deadline(&sub, &ids(&pulled), 0).await.unwrap();
    assert_eq!(rig.texts(&sub).await, ["a"]);
}

#[tokio::test]
async fn a_nack_waits_for_the_backoff_unless_the_setting_bypasses_it() {
    for (bypasses, expected) in [(false, 0), (true, 1)] {
        let rig = Rig::with(|options| options.nack_bypasses_backoff = bypasses).await;
        let retry = crate::model::RetryPolicy { minimum_backoff_ms: 30_000, maximum_backoff_ms: 60_000 };
        let sub = rig.subscription("sub", |s| s.retry_policy = Some(retry)).await;
        rig.publish(&["a"]).await;
        let pulled = rig.pull(&sub, 10).await;
        rig.connector.modify_ack_deadline(&sub, &ids(&pulled), 0).await.unwrap();
        assert_eq!(rig.texts(&sub).await.len(), expected);
    }
}

#[tokio::test]
async fn a_deadline_moves_both_ways() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.ack_deadline_seconds = 60).await;
    rig.publish(&["short", "long"]).await;
    let pulled = rig.pull(&sub, 10).await;
    rig.connector.modify_ack_deadline(&sub, &ids(&pulled)[..1], 10).await.unwrap();
    rig.connector.modify_ack_deadline(&sub, &ids(&pulled)[1..], 600).await.unwrap();
    rig.pass(Duration::from_secs(11));
    assert_eq!(rig.texts(&sub).await, ["short"]);
    rig.pass(Duration::from_secs(500));
    assert_eq!(rig.texts(&sub).await, ["short"]);
    rig.pass(Duration::from_secs(100));
    assert_eq!(rig.texts(&sub).await.len(), 2);
}

#[tokio::test]
async fn extensions_stop_at_the_longest_life() {
    let rig = Rig::with(|options| options.max_ack_extension_seconds = 30).await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let pulled = rig.pull(&sub, 10).await;
    rig.connector.modify_ack_deadline(&sub, &ids(&pulled), 600).await.unwrap();
    rig.pass(Duration::from_secs(29));
    assert!(rig.texts(&sub).await.is_empty());
    rig.pass(Duration::from_secs(2));
    assert_eq!(rig.texts(&sub).await, ["a"]);
}

#[tokio::test]
async fn deadlines_out_of_range_are_refused_and_the_floor_is_a_setting() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let ids = ids(&rig.pull(&sub, 10).await);
    for (seconds, text) in [
        (9, "Invalid ack deadline given (ack_deadline=9). The ack deadline must be between 10 and 600 seconds."),
        (601, "Invalid ack deadline given (ack_deadline=601). The ack deadline must be between 0 and 600 seconds."),
        (-1, "Invalid ack deadline given (ack_deadline=-1). The ack deadline must be between 0 and 600 seconds."),
    ] {
        assert_eq!(rig.connector.modify_ack_deadline(&sub, &ids, seconds).await.unwrap_err().to_string(), text);
    }
    let lenient = rig.node("n2", |options| options.min_ack_extension_seconds = 0).await;
    lenient.modify_ack_deadline(&sub, &ids, 1).await.unwrap();
}

#[tokio::test]
async fn a_request_without_ids_is_refused() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    assert_eq!(rig.connector.acknowledge(&sub, &[]).await, Err(Error::NoAckIds));
    assert_eq!(rig.connector.modify_ack_deadline(&sub, &[], 10).await, Err(Error::NoAckIds));
}

#[tokio::test]
async fn a_malformed_id_stops_the_whole_request() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let mut mixed = ids(&rig.pull(&sub, 10).await);
    mixed.push("bogus".into());
    let error = rig.connector.acknowledge(&sub, &mixed).await.unwrap_err();
    assert_eq!(error.to_string(), "You have passed an invalid ack ID to the service (ack_id=bogus).");
    assert_eq!(rig.backlog(&sub).await, 1);
    let huge = rig.connector.acknowledge(&sub, &["ü".repeat(5000)]).await.unwrap_err().to_string();
    assert!(huge.len() < 1000, "{huge}");
}

#[tokio::test]
async fn an_id_of_another_subscription_is_refused_and_settles_nothing() {
    let rig = Rig::new().await;
    let (one, two) = (rig.subscription("one", |_| {}).await, rig.subscription("two", |_| {}).await);
    rig.publish(&["a"]).await;
    let ids = ids(&rig.pull(&one, 10).await);
    assert_eq!(rig.connector.acknowledge(&two, &ids).await, Err(Error::ForeignAckId(ids[0].clone())));
    assert_eq!((rig.backlog(&one).await, rig.backlog(&two).await), (1, 1));
}

#[tokio::test]
async fn an_id_of_an_earlier_subscription_of_the_same_name_is_refused() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let ids = ids(&rig.pull(&sub, 10).await);
    rig.delete(&sub).await;
    assert!(matches!(rig.connector.acknowledge(&sub, &ids).await, Err(Error::NotFound(_))));
    rig.subscription("sub", |_| {}).await;
    rig.publish(&["b"]).await;
    assert_eq!(rig.connector.acknowledge(&sub, &ids).await, Err(Error::ForeignAckId(ids[0].clone())));
    assert_eq!(rig.texts(&sub).await, ["b"]);
}

#[tokio::test]
async fn a_late_id_still_acknowledges_without_exactly_once() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let ids = ids(&rig.pull(&sub, 10).await);
    rig.pass(Duration::from_secs(11));
    rig.connector.modify_ack_deadline(&sub, &ids, 10).await.unwrap();
    rig.connector.acknowledge(&sub, &ids).await.unwrap();
    rig.connector.acknowledge(&sub, &ids).await.unwrap();
    assert_eq!(rig.backlog(&sub).await, 0);
}

#[tokio::test]
async fn exactly_once_lists_the_ids_that_failed_and_carries_out_the_others() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.enable_exactly_once_delivery = true).await;
    rig.publish(&["stale"]).await;
    let stale = ids(&rig.pull(&sub, 10).await);
    rig.pass(Duration::from_secs(11));
    rig.publish(&["good1", "good2"]).await;
    let good = ids(&rig.pull(&sub, 10).await);
    let mixed = [good[1].clone(), stale[0].clone(), "bogus".into(), good[2].clone()];
    let expected = vec![(stale[0].clone(), AckFailure::Permanent), ("bogus".into(), AckFailure::Permanent)];
    assert_eq!(rig.connector.acknowledge(&sub, &mixed).await, Err(Error::AckIds(expected.clone())));
    assert_eq!(rig.connector.modify_ack_deadline(&sub, &mixed[1..3], 10).await, Err(Error::AckIds(expected)));
    assert_eq!(rig.backlog(&sub).await, 1);
    // A repeat of what was done is done.
    rig.connector.acknowledge(&sub, &[good[1].clone(), good[2].clone()]).await.unwrap();
}

#[tokio::test]
async fn exactly_once_deadlines_go_to_the_ids_they_were_given_for() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.enable_exactly_once_delivery = true).await;
    rig.publish(&["a", "b"]).await;
    let good = ids(&rig.pull(&sub, 10).await);
    let entry = rig.connector.subscription(&sub).await.unwrap();
    let channel = rig.connector.delivery.channel(&entry.queue);
    let mixed = ["x".into(), good[0].clone(), "y".into(), good[1].clone()];
    let deadlines = [1_000, 600_000, 2_000, 20_000];
    let outcomes = rig.connector.modify_on(&entry, &channel, &mixed, |index| deadlines[index]).await.unwrap();
    assert_eq!(outcomes, [Outcome::Invalid, Outcome::Done, Outcome::Invalid, Outcome::Done]);
    rig.pass(Duration::from_secs(21));
    assert_eq!(rig.texts(&sub).await, ["b"]);
}

#[tokio::test]
async fn any_node_settles_unless_the_scope_is_the_node() {
    let rig = Rig::new().await;
    let once = rig.subscription("once", |s| s.enable_exactly_once_delivery = true).await;
    let plain = rig.subscription("plain", |_| {}).await;
    rig.publish(&["a"]).await;
    let once_ids = ids(&rig.pull(&once, 10).await);
    let sticky = rig.node("n2", |options| options.exactly_once_scope = Scope::Node).await;
    let expected = Error::AckIds(vec![(once_ids[0].clone(), AckFailure::Permanent)]);
    assert_eq!(sticky.acknowledge(&once, &once_ids).await, Err(expected));
    sticky.acknowledge(&plain, &ids(&rig.pull(&plain, 10).await)).await.unwrap();
    rig.node("n3", |_| {}).await.acknowledge(&once, &once_ids).await.unwrap();
    assert_eq!((rig.backlog(&once).await, rig.backlog(&plain).await), (0, 0));
}

#[tokio::test]
async fn an_unknown_subscription_is_not_found() {
    let rig = Rig::new().await;
    let missing = SubscriptionName::new("p1", "missing").unwrap();
    assert_eq!(rig.connector.acknowledge(&missing, &["x".into()]).await, Err(Error::NotFound("missing".into())));
}

#[test]
fn outcomes_of_invalid_ids_take_their_places() {
    use Outcome::{Done, Invalid, Retry};
    assert_eq!(merge(vec![Done, Retry], &[0, 2, 4]), [Invalid, Done, Invalid, Retry, Invalid]);
    assert_eq!(merge(vec![], &[0, 1]), [Invalid, Invalid]);
    assert_eq!(merge(vec![Done], &[]), [Done]);
}
