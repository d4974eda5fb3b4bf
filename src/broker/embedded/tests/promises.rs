//! One promise of the port a test.

use super::*;

#[tokio::test]
async fn every_queue_gets_every_message_in_order() {
    let mut rig = Rig::new().await;
    rig.publish(&["lost"]).await;
    let (a, b) = (rig.queue(1, |_| {}).await, rig.queue(2, |_| {}).await);
    let ids = rig.publish(&["one", "two"]).await;
    assert_eq!(ids[1], ids[0] + 1);
    assert_eq!(rig.texts(&a, 10).await, ["one", "two"]);
    assert_eq!(rig.texts(&b, 1).await, ["one"]);
    assert_eq!(rig.texts(&b, 10).await, ["two"]);
}

#[tokio::test]
async fn an_expired_lease_is_redelivered_with_the_next_attempt() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.max_delivery_attempts = Some(5)).await;
    rig.publish(&["m"]).await;
    let first = rig.pull(&queue, 1).await;
    assert_eq!((first[0].token.attempt, first[0].delivery_attempt), (1, 1));
    rig.pass(9_999);
    assert!(rig.pull(&queue, 1).await.is_empty());
    rig.pass(51);
    let second = rig.pull(&queue, 1).await;
    assert_eq!((second[0].token.attempt, second[0].delivery_attempt), (2, 2));
}

#[tokio::test]
async fn leases_that_run_out_are_counted() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["a", "b", "c"]).await;
    let leased = rig.pull(&queue, 3).await;
    rig.modify(&queue, &leased[..1], 0).await;
    let expired = async || rig.broker.stats(&queue).await.unwrap().expired_leases;
    assert_eq!(expired().await, Some(0), "a nack is no expiry");
    rig.pass(10_050);
    assert_eq!(expired().await, Some(2));
    assert_eq!(expired().await, Some(2));
}

#[tokio::test]
async fn a_nack_without_policy_is_redelivered_at_once_and_does_not_starve_the_rest() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["bad", "good1", "good2"]).await;
    let mut seen = Vec::new();
    for _ in 0..6 {
        let leased = rig.pull(&queue, 1).await;
        seen.push(text(&leased[0]));
        if seen.last().unwrap() == "bad" {
            rig.modify(&queue, &leased, 0).await;
        } else {
            rig.ack(&queue, &leased).await;
        }
    }
    assert!(seen.contains(&"good1".into()) && seen.contains(&"good2".into()), "{seen:?}");
    assert_eq!(rig.texts(&queue, 1).await, ["bad"]);
}

#[tokio::test]
async fn backoff_grows_and_holds_only_its_message() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.retry = retry(1000, 3000)).await;
    rig.publish(&["bad", "good"]).await;
    for wait in [1000, 2000, 3000, 3000] {
        let leased = rig.pull(&queue, 1).await;
        assert_eq!(text(&leased[0]), "bad");
        rig.modify(&queue, &leased, 0).await;
        if wait == 1000 {
            let good = rig.pull(&queue, 5).await;
            assert_eq!(good.iter().map(text).collect::<Vec<_>>(), ["good"]);
            rig.ack(&queue, &good).await;
        }
        rig.pass(wait - 1);
        assert!(rig.pull(&queue, 1).await.is_empty(), "{wait}");
        rig.pass(1);
    }
}

#[tokio::test]
async fn extensions_move_the_deadline_both_ways() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["m"]).await;
    let leased = rig.pull(&queue, 1).await;
    rig.pass(8_000);
    assert_eq!(rig.modify(&queue, &leased, 30_000).await, [Outcome::Done]);
    rig.pass(29_999);
    assert!(rig.pull(&queue, 1).await.is_empty());
    assert_eq!(rig.modify(&queue, &leased, 10_000).await, [Outcome::Done]);
    rig.pass(10_050);
    assert_eq!(rig.texts(&queue, 1).await, ["m"]);
}

#[tokio::test]
async fn a_late_ack_counts_on_an_ordinary_queue_and_not_on_an_exactly_once_queue() {
    let mut rig = Rig::new().await;
    let (plain, strict) = (rig.queue(1, |_| {}).await, rig.queue(2, |c| c.exactly_once = true).await);
    rig.publish(&["m"]).await;
    let (old_plain, old_strict) = (rig.pull(&plain, 1).await, rig.pull(&strict, 1).await);
    rig.pass(10_050);
    let new_strict = rig.pull(&strict, 1).await;
    assert_eq!(rig.ack(&plain, &old_plain).await, [Outcome::Done]);
    assert_eq!(rig.ack(&strict, &old_strict).await, [Outcome::Invalid]);
    assert!(rig.pull(&plain, 1).await.is_empty());
    assert_eq!(rig.ack(&strict, &new_strict).await, [Outcome::Done]);
    assert_eq!(rig.ack(&strict, &new_strict).await, [Outcome::Done], "a repeat");
    assert_eq!(rig.ack(&strict, &old_strict).await, [Outcome::Invalid]);
    assert_eq!(rig.modify(&strict, &new_strict, 10_000).await, [Outcome::Invalid]);
    rig.pass(3_600_000);
    assert!(rig.pull(&plain, 1).await.is_empty() && rig.pull(&strict, 1).await.is_empty());
}

#[tokio::test]
async fn a_returned_message_comes_again_uncounted() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.max_delivery_attempts = Some(5)).await;
    rig.publish(&["a", "b"]).await;
    let leased = rig.pull(&queue, 2).await;
    rig.broker.release(&queue, &[leased[0].token]).await.unwrap();
    let again = rig.pull(&queue, 2).await;
    assert_eq!((text(&again[0]).as_str(), again[0].delivery_attempt, again.len()), ("a", 1, 1));
}

#[tokio::test]
async fn the_last_attempt_makes_a_dead_letter() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.max_delivery_attempts = Some(2)).await;
    let mut events = rig.broker.events();
    rig.publish(&["m"]).await;
    let first = rig.pull(&queue, 1).await;
    rig.modify(&queue, &first, 0).await;
    let second = rig.pull(&queue, 1).await;
    assert_eq!(second[0].delivery_attempt, 2);
    rig.pass(10_050);
    assert!(rig.pull(&queue, 1).await.is_empty());
    while events.recv().await.unwrap() != Event::DeadLetters(queue.clone()) {}
    let hold = Duration::from_secs(30);
    let dead = rig.broker.take_dead_letters(&queue, 10, hold).await.unwrap();
    assert_eq!((dead.len(), dead[0].attempts), (1, 2));
    assert!(rig.broker.take_dead_letters(&queue, 10, hold).await.unwrap().is_empty());
    rig.broker.settle_dead_letters(&queue, &[dead[0].token], false).await.unwrap();
    let third = rig.pull(&queue, 1).await;
    assert_eq!(third[0].delivery_attempt, 3);
    rig.modify(&queue, &third, 0).await;
    let dead = rig.broker.take_dead_letters(&queue, 10, hold).await.unwrap();
    rig.broker.settle_dead_letters(&queue, &[dead[0].token], true).await.unwrap();
    assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 0);
}

#[tokio::test]
async fn attempts_count_only_under_a_dead_letter_policy() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["m"]).await;
    let leased = rig.pull(&queue, 1).await;
    assert_eq!(leased[0].delivery_attempt, 0);
    rig.modify(&queue, &leased, 0).await;
    rig.queue(1, |c| c.max_delivery_attempts = Some(5)).await;
    let leased = rig.pull(&queue, 1).await;
    assert_eq!(leased[0].delivery_attempt, 1);
}

#[tokio::test]
async fn a_key_stays_with_its_session_and_in_order() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.ordered = true).await;
    rig.publish_keyed(&[("k1", "k"), ("k2", "k"), ("j1", "j"), ("free", "")]).await;
    let (a, b) = (rig.session(&queue), rig.session(&queue));
    let first = rig.lease(&queue, &a, 1).await;
    assert_eq!(text(&first[0]), "k1");
    let others = rig.lease(&queue, &b, 10).await;
    assert_eq!(others.iter().map(text).collect::<Vec<_>>(), ["j1", "free"]);
    let more = rig.lease(&queue, &a, 10).await;
    assert_eq!(more.iter().map(text).collect::<Vec<_>>(), ["k2"]);
    rig.ack(&queue, &first).await;
    rig.ack(&queue, &more).await;
    rig.publish_keyed(&[("k3", "k")]).await;
    assert_eq!(rig.lease(&queue, &b, 10).await.iter().map(text).collect::<Vec<_>>(), ["k3"]);
}

#[tokio::test]
async fn a_nack_brings_the_keys_later_messages_back_behind_it() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| {
        c.ordered = true;
        c.retry = retry(1000, 1000);
    });
    let queue = queue.await;
    rig.publish_keyed(&[("k1", "k"), ("k2", "k"), ("k3", "k"), ("j1", "j")]).await;
    let session = rig.session(&queue);
    let leased = rig.lease(&queue, &session, 10).await;
    assert_eq!(leased.len(), 4);
    rig.ack(&queue, &leased[1..2]).await;
    rig.modify(&queue, &leased[..1], 0).await;
    rig.publish_keyed(&[("k4", "k"), ("j2", "j")]).await;
    let other = rig.session(&queue);
    assert_eq!(rig.lease(&queue, &session, 10).await.iter().map(text).collect::<Vec<_>>(), ["j2"]);
    rig.pass(1000);
    let again = rig.lease(&queue, &other, 10).await;
    assert_eq!(again.iter().map(text).collect::<Vec<_>>(), ["k1", "k3", "k4"]);
    assert_eq!(again.iter().map(|l| l.token.attempt).collect::<Vec<_>>(), [2, 1, 1]);
}

#[tokio::test]
async fn a_dead_letter_frees_its_key() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| {
        c.ordered = true;
        c.max_delivery_attempts = Some(1);
    });
    let queue = queue.await;
    rig.publish_keyed(&[("k1", "k"), ("k2", "k")]).await;
    let leased = rig.pull(&queue, 1).await;
    rig.modify(&queue, &leased, 0).await;
    assert_eq!(rig.texts(&queue, 5).await, ["k2"]);
}

#[tokio::test]
async fn filtered_messages_are_not_backlog() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.retain_acked = true).await;
    let target = Target { queue: queue.clone(), filtered: vec![0, 2] };
    rig.publish_filtered(&[("no", ""), ("yes", ""), ("no", "")], vec![target]).await;
    assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 1);
    let leased = rig.pull(&queue, 5).await;
    assert_eq!(leased.iter().map(text).collect::<Vec<_>>(), ["yes"]);
    rig.ack(&queue, &leased).await;
    rig.broker.seek(&queue, SeekTarget::Time(0)).await.unwrap();
    assert_eq!(rig.texts(&queue, 5).await, ["yes"]);
}

#[tokio::test]
async fn a_seek_back_replays_what_is_retained_and_voids_old_leases() {
    let mut rig = Rig::new().await;
    let kept = rig.queue(1, |c| c.retain_acked = true).await;
    let bare = rig.queue(2, |_| {}).await;
    rig.publish(&["a"]).await;
    rig.pass(10);
    let at = rig.now_ms();
    rig.publish(&["b", "c"]).await;
    for queue in [&kept, &bare] {
        let leased = rig.pull(queue, 2).await;
        rig.ack(queue, &leased).await;
        let open = rig.pull(queue, 1).await;
        rig.broker.seek(queue, SeekTarget::Time(at)).await.unwrap();
        rig.ack(queue, &open).await;
    }
    assert_eq!(rig.texts(&kept, 5).await, ["b", "c"]);
    assert_eq!(rig.texts(&bare, 5).await, ["c"]);
}

#[tokio::test]
async fn a_seek_into_the_future_purges_what_comes_before() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["old"]).await;
    rig.broker.seek(&queue, SeekTarget::Time(START_MS + 5000)).await.unwrap();
    rig.publish(&["early"]).await;
    rig.pass(5000);
    rig.publish(&["late"]).await;
    assert_eq!(rig.texts(&queue, 5).await, ["late"]);
}

#[tokio::test]
async fn a_snapshot_brings_back_exactly_what_was_unacked_and_came_later() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["a", "b", "c"]).await;
    let leased = rig.pull(&queue, 3).await;
    rig.ack(&queue, &leased[1..2]).await;
    rig.snapshot(77, &queue).await;
    rig.ack(&queue, &leased).await;
    let texts: Vec<String> = (0..3000).map(|n| n.to_string()).collect();
    rig.publish(&texts.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let later = rig.pull(&queue, 5000).await;
    assert_eq!(later.len(), 3000);
    rig.ack(&queue, &later).await;
    rig.broker.seek(&queue, SeekTarget::Snapshot(77)).await.unwrap();
    let back = rig.texts(&queue, 5000).await;
    assert_eq!(back[..2], ["a", "c"]);
    assert_eq!(back[2..], texts);
    assert_eq!(rig.broker.seek(&queue, SeekTarget::Snapshot(78)).await, Err(BrokerError::Gone));
}

#[tokio::test]
async fn topic_retention_lets_a_new_queue_look_back() {
    let mut rig = Rig::with_topic_retention(Some(3_600_000)).await;
    rig.publish(&["a", "b"]).await;
    let queue = rig.queue(1, |_| {}).await;
    assert!(rig.pull(&queue, 5).await.is_empty());
    rig.broker.seek(&queue, SeekTarget::Time(START_MS)).await.unwrap();
    assert_eq!(rig.texts(&queue, 5).await, ["a", "b"]);
}

#[tokio::test]
async fn messages_beyond_retention_vanish_even_under_lease() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.retention_ms = 600_000).await;
    rig.publish(&["a", "b"]).await;
    let session = rig.session(&queue);
    assert_eq!(rig.lease(&queue, &session, 1).await.len(), 1);
    rig.pass(600_001);
    assert!(rig.pull(&queue, 5).await.is_empty());
    assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 0);
    assert_eq!(session.outstanding_messages(), 0);
}

#[tokio::test]
async fn budgets_and_the_inflight_cap_bound_a_lease() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["aaaaaaaaaa", "b", "c", "d"]).await;
    let session = rig.session(&queue);
    let request = LeaseRequest {
        queue: queue.clone(),
        session: session.clone(),
        max_messages: 10,
        max_bytes: 1,
        deadline_ms: 10_000,
        max_inflight: 3,
        record_version: 0,
    };
    assert_eq!(rig.broker.lease(request.clone()).await.unwrap().len(), 1);
    let request = LeaseRequest { max_bytes: u64::MAX, ..request };
    assert_eq!(rig.broker.lease(request.clone()).await.unwrap().len(), 2);
    assert!(rig.broker.lease(request).await.unwrap().is_empty());
    assert_eq!(session.outstanding_messages(), 3);
}

#[tokio::test]
async fn waiting_sessions_are_woken_and_budgets_freed_by_any_caller() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    let session = rig.session(&queue);
    session.woken().await;
    assert!(rig.lease(&queue, &session, 5).await.is_empty());
    rig.publish(&["a"]).await;
    tokio::time::timeout(Duration::from_secs(5), session.woken()).await.unwrap();
    let leased = rig.lease(&queue, &session, 5).await;
    assert_eq!(session.outstanding_messages(), 1);
    rig.ack(&queue, &leased).await;
    assert_eq!(session.outstanding_messages(), 0);
    tokio::time::timeout(Duration::from_secs(5), session.woken()).await.unwrap();
}

#[tokio::test]
async fn a_stale_route_is_refused_and_a_closed_queue_is_gone() {
    let mut rig = Rig::new().await;
    let version = rig.broker.route(&rig.topic).await.unwrap().version;
    let queue = rig.queue(1, |_| {}).await;
    let append = Append {
        topic: rig.topic.clone(),
        messages: vec![EncodedMessage::encode(b"x", [], "")],
        targets: Vec::new(),
        route_version: version,
    };
    assert_eq!(rig.broker.append(append).await, Err(BrokerError::Stale));
    let record = rig.broker.get(Kind::Subscription, "s1").await.unwrap().unwrap();
    let close = change(Kind::Subscription, "s1", Expect::Version(record.version), false, Effect::CloseQueue(queue.clone()));
    rig.broker.change(close).await.unwrap();
    assert_eq!(rig.broker.stats(&queue).await, Err(BrokerError::Gone));
    assert_eq!(rig.broker.get(Kind::Subscription, "s1").await.unwrap(), None);
}

#[tokio::test]
async fn use_of_a_queue_is_noted_and_looking_at_it_is_not_use() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    let active = async |rig: &Rig| rig.broker.stats(&queue).await.unwrap().last_active_ms - START_MS;
    rig.pass(1000);
    assert_eq!(active(&rig).await, 0);
    rig.pull(&queue, 1).await;
    assert_eq!(active(&rig).await, 1000);
    let session = rig.session(&queue);
    rig.pass(1000);
    assert_eq!(active(&rig).await, 2000);
    rig.broker.detach(&queue, &session);
    rig.pass(1000);
    assert_eq!(active(&rig).await, 2000);
    rig.broker.touch(&queue).await.unwrap();
    assert_eq!(active(&rig).await, 3000);
}

#[tokio::test]
async fn what_was_acknowledged_does_not_come_back_once_it_is_retained_no_longer() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.retain_acked = true).await;
    rig.publish(&["a", "b", "c"]).await;
    // More publishes than are looked at in one go.
    for n in 0..1100 {
        rig.publish(&[&format!("m{n}")]).await;
    }
    let leased = rig.pull(&queue, 2000).await;
    assert_eq!(leased.len(), 1103);
    let (kept, rest): (Vec<_>, Vec<_>) = leased.into_iter().partition(|l| ["b", "m500", "m1099"].contains(&text(l).as_str()));
    rig.ack(&queue, &rest).await;
    rig.broker.seek(&queue, SeekTarget::Time(1)).await.unwrap();
    let leased = rig.pull(&queue, 2000).await;
    assert_eq!(leased.len(), 1103);
    let rest: Vec<_> = leased.into_iter().filter(|l| !kept.iter().any(|k| text(k) == text(l))).collect();
    rig.ack(&queue, &rest).await;

    rig.queue(1, |c| c.retain_acked = false).await;
    rig.broker.seek(&queue, SeekTarget::Time(1)).await.unwrap();
    assert_eq!(rig.texts(&queue, 2000).await, ["b", "m500", "m1099"]);
}
