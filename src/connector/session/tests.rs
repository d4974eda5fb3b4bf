use std::time::Duration;

use futures::StreamExt;

use super::*;
use crate::{
    connector::rig::{Rig, eventually, ids, texts},
    model::{DeadLetterPolicy, EncodedMessage, RetryPolicy},
};

fn counted() -> Option<DeadLetterPolicy> {
    Some(DeadLetterPolicy { dead_letter_topic: None, max_delivery_attempts: 5 })
}

#[tokio::test]
async fn a_stream_delivers_what_is_there_and_what_comes() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let response = client.next().await;
    assert_eq!((texts(&response.messages), response.messages[0].delivery_attempt), (vec!["a".to_owned()], 0));
    assert!(client.ready().is_none());
    rig.publish(&["b"]).await;
    assert_eq!(texts(&client.next().await.messages), ["b"]);
}

#[tokio::test]
async fn acknowledgements_on_the_stream_settle() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a", "b"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let messages = client.next().await.messages;
    client.ack(&messages[..1]).await;
    eventually(|| async { rig.backlog(&sub).await == 1 }).await;
    client.modify(&messages[1..], 0).await;
    assert_eq!(texts(&client.next().await.messages), ["b"]);
}

#[tokio::test]
async fn what_the_first_request_asks_for_is_carried_out() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let pulled = rig.pull(&sub, 1).await;
    let _client = rig.open(&sub, |opening| opening.request.ack_ids = ids(&pulled)).await;
    eventually(|| async { rig.backlog(&sub).await == 0 }).await;
}

#[tokio::test]
async fn a_first_request_out_of_bounds_is_refused() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    for seconds in [0, 9, 601] {
        let error = rig.try_open(&sub, |opening| opening.stream_ack_deadline_seconds = seconds).await.err().unwrap();
        assert_eq!(
            error.to_string(),
            format!("Invalid ack deadline given (ack_deadline={seconds}). The ack deadline must be between 10 and 600 seconds.")
        );
    }
    let push = rig.subscription("push", |s| s.push_config.endpoint = "http://localhost:1/".into()).await;
    assert_eq!(rig.try_open(&push, |_| {}).await.err(), Some(Error::NotPullable));
    let detached = rig.subscription("detached", |s| s.detached = true).await;
    assert_eq!(rig.try_open(&detached, |_| {}).await.err(), Some(Error::Detached("detached".into())));
    let missing = SubscriptionName::new("p1", "missing").unwrap();
    assert_eq!(rig.try_open(&missing, |_| {}).await.err(), Some(Error::NotFound("missing".into())));
}

#[tokio::test]
async fn requests_that_make_no_sense_end_the_stream() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let id = rig.pull(&sub, 1).await.remove(0).ack_id;
    let modify = |ids: &[&str], seconds: &[i32]| StreamRequest {
        modify_deadline_ack_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        modify_deadline_seconds: seconds.to_vec(),
        ..Default::default()
    };
    for request in [
        modify(&[&id, &id], &[10]),
        modify(&[&id], &[-1]),
        modify(&[&id], &[601]),
        modify(&[&id], &[5]),
        modify(&["bogus"], &[10]),
        StreamRequest { ack_ids: vec!["bogus".into()], ..Default::default() },
        StreamRequest { stream_ack_deadline_seconds: 9, ..Default::default() },
    ] {
        let mut client = rig.open(&sub, |_| {}).await;
        client.send(request.clone()).await;
        let error = client.end().await.unwrap();
        let known = matches!(error, Error::Argument(_) | Error::AckDeadline { .. } | Error::AckId(_));
        assert!(known, "{request:?} ended the stream with {error:?}");
    }
}

#[tokio::test]
async fn well_formed_ids_that_are_over_do_not_end_the_stream() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let messages = client.next().await.messages;
    client.ack(&messages).await;
    client.ack(&messages).await;
    client.modify(&messages, 30).await;
    client.modify(&messages, 0).await;
    eventually(|| async { rig.backlog(&sub).await == 0 }).await;
    rig.publish(&["b"]).await;
    assert_eq!(texts(&client.next().await.messages), ["b"]);
    rig.pass(Duration::from_secs(60));
    assert_eq!(texts(&client.next().await.messages), ["b"]);
}

#[tokio::test]
async fn an_id_in_both_lists_is_acknowledged() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let ids = ids(&client.next().await.messages);
    client
        .send(StreamRequest {
            ack_ids: ids.clone(),
            modify_deadline_ack_ids: ids,
            modify_deadline_seconds: vec![0],
            stream_ack_deadline_seconds: 0,
        })
        .await;
    eventually(|| async { rig.backlog(&sub).await == 0 }).await;
    assert!(client.ready().is_none());
}

#[tokio::test]
async fn the_streams_deadline_counts_for_what_is_delivered_after_it() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.ack_deadline_seconds = 300).await;
    rig.publish(&["ten"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    assert_eq!(texts(&client.next().await.messages), ["ten"]);
    // A ping behind the change, so that the answer tells that the change was read.
    let mut other = rig.open(&sub, |opening| opening.protocol_version = 1).await;
    other.send(StreamRequest { stream_ack_deadline_seconds: 60, ..Default::default() }).await;
    assert!(other.next().await.messages.is_empty());
    drop(client);
    rig.publish(&["sixty"]).await;
    assert_eq!(texts(&other.next().await.messages), ["sixty"]);
    rig.pass(Duration::from_secs(11));
    assert_eq!(texts(&other.next().await.messages), ["ten"]);
    rig.pass(Duration::from_secs(50));
    let again: Vec<_> = texts(&other.next().await.messages);
    assert_eq!(again, ["sixty"]);
}

#[tokio::test]
async fn pings_are_answered_with_the_properties_also_at_full_flow_control() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| (s.enable_exactly_once_delivery, s.enable_message_ordering) = (true, true)).await;
    rig.publish(&["a", "b"]).await;
    let mut client = rig.open(&sub, |opening| (opening.protocol_version, opening.max_outstanding_messages) = (1, 1)).await;
    assert_eq!(client.next().await.messages.len(), 1);
    for _ in 0..3 {
        client.send(StreamRequest::default()).await;
        let pong = client.next().await;
        assert_eq!(pong, StreamResponse { exactly_once: true, ordered: true, ..Default::default() });
    }
}

#[tokio::test]
async fn clients_of_protocol_version_0_get_no_empty_responses() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let mut client = rig.open(&sub, |_| {}).await;
    client.send(StreamRequest::default()).await;
    client.send(StreamRequest { stream_ack_deadline_seconds: 60, ..Default::default() }).await;
    drop(client.requests);
    assert_eq!(client.responses.next().await, None);
}

#[tokio::test]
async fn a_changed_setting_shows_in_the_next_response() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let mut client = rig.open(&sub, |_| {}).await;
    for exactly_once in [true, false] {
        rig.update(&sub, |s| s.enable_exactly_once_delivery = exactly_once).await;
        // Both halves of the stream run on this thread: the incoming one has looked it up once it had its turn.
        tokio::task::yield_now().await;
        rig.publish(&["x"]).await;
        assert_eq!(client.next().await.exactly_once, exactly_once);
    }
}

#[tokio::test]
async fn outstanding_messages_are_limited_and_every_kind_of_end_frees_the_limit() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a", "b", "c", "d"]).await;
    let mut client = rig.open(&sub, |opening| opening.max_outstanding_messages = 1).await;
    let first = client.next().await.messages;
    assert_eq!(texts(&first), ["a"]);
    assert!(client.ready().is_none());
    // An acknowledgement by another way.
    rig.connector.acknowledge(&sub, &ids(&first)).await.unwrap();
    let second = client.next().await.messages;
    assert_eq!(texts(&second), ["b"]);
    client.modify(&second, 0).await;
    let third = client.next().await.messages;
    assert_eq!(third.len(), 1);
    rig.pass(Duration::from_secs(11));
    assert_eq!(client.next().await.messages.len(), 1);
}

#[tokio::test]
async fn outstanding_bytes_are_limited_and_a_larger_message_still_passes() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let large = |text: &str| EncodedMessage::encode(text.repeat(50_000).as_bytes(), [], "");
    rig.publish_to("topic", vec![large("a"), large("b")]).await;
    let mut client = rig.open(&sub, |opening| opening.max_outstanding_bytes = 100).await;
    let first = client.next().await.messages;
    assert_eq!(first.len(), 1);
    assert!(client.ready().is_none());
    client.ack(&first).await;
    assert_eq!(client.next().await.messages.len(), 1);
}

#[tokio::test]
async fn a_response_stays_below_its_size_and_what_is_too_much_comes_next() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = counted()).await;
    rig.publish_to("topic", (0..3).map(|_| EncodedMessage::encode(&[b'x'; 700_000], [], "")).collect()).await;
    let mut client = rig.open(&sub, |_| {}).await;
    for _ in 0..3 {
        let messages = client.next().await.messages;
        assert_eq!((messages.len(), messages[0].delivery_attempt), (1, 1));
    }
    assert!(client.ready().is_none());
    assert_eq!(rig.outstanding(&sub).await, 3);
}

#[tokio::test]
async fn a_poison_message_in_backoff_does_not_block_the_others() {
    let rig = Rig::new().await;
    let retry = RetryPolicy { minimum_backoff_ms: 30_000, maximum_backoff_ms: 60_000 };
    let sub = rig.subscription("sub", |s| s.retry_policy = Some(retry)).await;
    rig.publish(&["poison", "a", "b"]).await;
    let mut client = rig.open(&sub, |opening| opening.max_outstanding_messages = 1).await;
    let poison = client.next().await.messages;
    client.modify(&poison, 0).await;
    for expected in ["a", "b"] {
        let messages = client.next().await.messages;
        assert_eq!(texts(&messages), [expected]);
        client.ack(&messages).await;
    }
}

#[tokio::test]
async fn exactly_once_confirms_on_the_stream() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.enable_exactly_once_delivery = true).await;
    rig.publish(&["a"]).await;
    let stale = ids(&rig.pull(&sub, 1).await);
    rig.pass(Duration::from_secs(11));
    let mut client = rig.open(&sub, |_| {}).await;
    let good = ids(&client.next().await.messages);
    client
        .send(StreamRequest {
            ack_ids: vec![stale[0].clone(), good[0].clone()],
            modify_deadline_ack_ids: vec![good[0].clone(), "bogus".into()],
            modify_deadline_seconds: vec![10, 10],
            stream_ack_deadline_seconds: 0,
        })
        .await;
    let mut response = client.next().await;
    if response.modified.is_empty() {
        response.modified = client.next().await.modified;
    }
    assert_eq!(response.acknowledged, Confirmation { done: good.clone(), invalid: stale, failed: vec![] });
    let modified = Confirmation { done: vec![], invalid: vec![good[0].clone(), "bogus".into()], failed: vec![] };
    assert_eq!(response.modified, modified);
    assert_eq!(rig.backlog(&sub).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_no_confirmations_is_not_read_for_ever() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.enable_exactly_once_delivery = true).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let request = StreamRequest { ack_ids: vec!["bogus".into(); 1000], ..Default::default() };
    let sent = async {
        loop {
            client.send(request.clone()).await;
        }
    };
    // The channel between holds 100 requests; everything beyond it is read only up to the bound.
    assert!(tokio::time::timeout(Duration::from_secs(1), sent).await.is_err());
    let mut confirmed = 0;
    while let Some(response) = client.ready() {
        confirmed += response.acknowledged.invalid.len();
        if confirmed > 4000 {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert_eq!(confirmed % 1000, 0);
    assert!(confirmed >= 4000);
}

#[tokio::test]
async fn half_close_settles_what_was_sent_and_ends_well() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a", "b", "c"]).await;
    let mut client = rig.open(&sub, |opening| opening.max_outstanding_messages = 2).await;
    let messages = client.next().await.messages;
    client.ack(&messages).await;
    drop(client.requests);
    let mut after = 0;
    while let Some(response) = client.responses.next().await {
        after += response.unwrap().messages.len();
    }
    assert_eq!(rig.backlog(&sub).await, 1);
    assert_eq!(after, 0, "leased for a client that is going away");
}

#[tokio::test]
async fn confirmations_come_before_the_end() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.enable_exactly_once_delivery = true).await;
    rig.publish(&["a"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let messages = client.next().await.messages;
    client.ack(&messages).await;
    drop(client.requests);
    assert_eq!(client.responses.next().await.unwrap().unwrap().acknowledged.done, ids(&messages));
    assert_eq!(client.responses.next().await, None);
}

#[tokio::test]
async fn deletion_ends_the_stream_even_if_the_name_comes_back() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let mut idle = rig.open(&sub, |_| {}).await;
    let mut client = rig.open(&sub, |_| {}).await;
    rig.publish(&["a"]).await;
    let _ = client.ready();
    rig.delete(&sub).await;
    rig.subscription("sub", |_| {}).await;
    for client in [&mut idle, &mut client] {
        let error = loop {
            match client.try_next().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => break error,
                None => panic!("ended well"),
            }
        };
        assert_eq!(error, Error::NotFound("sub".into()));
    }
}

#[tokio::test]
async fn a_stream_ends_when_its_subscription_can_no_longer_be_pulled() {
    let rig = Rig::new().await;
    let (push, detached) = (rig.subscription("push", |_| {}).await, rig.subscription("detached", |_| {}).await);
    let mut on_push = rig.open(&push, |_| {}).await;
    let mut on_detached = rig.open(&detached, |_| {}).await;
    rig.update(&push, |s| s.push_config.endpoint = "http://localhost:1/".into()).await;
    rig.update(&detached, |s| s.detached = true).await;
    assert_eq!(on_push.end().await, Some(Error::NotPullable));
    assert_eq!(on_detached.end().await, Some(Error::Detached("detached".into())));
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_after_its_time_give_or_take_a_tenth() {
    let rig = Rig::with(|options| options.stream_close_seconds = 100).await;
    let sub = rig.subscription("sub", |_| {}).await;
    let mut lives = Vec::new();
    for _ in 0..8 {
        let start = Instant::now();
        let mut client = rig.open(&sub, |_| {}).await;
        assert_eq!(client.responses.next().await, Some(Err(Error::Closing)));
        assert_eq!(client.responses.next().await, None);
        lives.push(start.elapsed().as_millis());
    }
    assert!(lives.iter().all(|life| (90_000..=110_001).contains(life)), "{lives:?}");
    lives.dedup();
    assert!(lives.len() > 1);
}

#[tokio::test]
async fn a_drain_ends_streams_after_settling_what_was_sent() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["a", "b"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let messages = client.next().await.messages;
    client.ack(&messages[..1]).await;
    client.ack(&messages[1..]).await;
    rig.connector.drain().await;
    assert_eq!(rig.backlog(&sub).await, 0);
    assert_eq!(client.end().await, Some(Error::Closing));
    assert_eq!(rig.try_open(&sub, |_| {}).await.err(), Some(Error::Closing));
}

#[tokio::test]
async fn what_a_client_did_not_read_goes_back_uncounted_when_it_leaves() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = counted()).await;
    rig.publish_to("topic", (0..4).map(|_| EncodedMessage::encode(&[b'x'; 600_000], [], "")).collect()).await;
    let mut client = rig.open(&sub, |_| {}).await;
    // Asking for the second says that the first is on its way; the second itself is not read.
    assert_eq!(client.next().await.messages.len(), 1);
    assert_eq!(client.next().await.messages.len(), 1);
    drop(client);
    eventually(|| async { rig.outstanding(&sub).await == 1 }).await;
    let pulled = rig.pull(&sub, 10).await;
    assert_eq!(pulled.iter().map(|m| m.delivery_attempt).collect::<Vec<_>>(), [1, 1, 1]);
}

#[tokio::test]
async fn what_a_client_received_keeps_its_lease_when_it_leaves() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = counted()).await;
    rig.publish(&["a"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let messages = client.next().await.messages;
    assert!(client.ready().is_none());
    drop(client);
    rig.connector.drain().await;
    assert_eq!(rig.outstanding(&sub).await, 1);
    rig.connector.acknowledge(&sub, &ids(&messages)).await.unwrap();
    assert_eq!(rig.backlog(&sub).await, 0);
}

#[tokio::test]
async fn a_client_that_stops_reading_holds_one_response_and_others_go_on() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = counted()).await;
    let mut stalled = rig.open(&sub, |_| {}).await;
    // It waits, gets a message, and is never asked for more.
    assert!(stalled.ready().is_none());
    rig.publish(&["held"]).await;
    assert_eq!(stalled.next().await.messages.len(), 1);
    let mut reader = rig.open(&sub, |_| {}).await;
    for text in ["a", "b", "c"] {
        rig.publish(&[text]).await;
        let messages = reader.next().await.messages;
        assert_eq!(texts(&messages), [text]);
        reader.ack(&messages).await;
    }
    eventually(|| async { rig.outstanding(&sub).await == 1 }).await;
}

#[tokio::test(start_paused = true)]
async fn what_a_stalled_client_does_not_read_goes_back_uncounted_before_its_lease_ends() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.dead_letter_policy = counted()).await;
    rig.publish(&["held"]).await;
    let mut stalled = rig.open(&sub, |_| {}).await;
    let held = stalled.next().await.messages;
    let mut reader = rig.open(&sub, |_| {}).await;
    let start = Instant::now();
    let messages = reader.next().await.messages;
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!((texts(&messages), messages[0].delivery_attempt), (vec!["held".to_owned()], 1));
    assert_ne!(messages[0].ack_id, held[0].ack_id);
}

#[tokio::test(start_paused = true)]
async fn what_a_client_read_is_not_taken_back_however_quiet_it_is() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    rig.publish(&["read"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    assert_eq!(client.next().await.messages.len(), 1);
    assert!(client.ready().is_none());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(rig.outstanding(&sub).await, 1);
}

#[tokio::test]
async fn a_client_that_stops_reading_at_a_ping_does_not_hold_up_messages() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let mut stalled = rig.open(&sub, |opening| opening.protocol_version = 1).await;
    assert!(stalled.ready().is_none());
    stalled.send(StreamRequest::default()).await;
    assert!(stalled.next().await.messages.is_empty());
    let mut reader = rig.open(&sub, |_| {}).await;
    assert!(reader.ready().is_none());
    rig.publish(&["a"]).await;
    assert_eq!(texts(&reader.next().await.messages), ["a"]);
}

#[tokio::test]
async fn streams_of_one_client_share_the_messages() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |_| {}).await;
    let mut clients = Vec::new();
    for _ in 0..5 {
        let mut client = rig.open(&sub, |opening| opening.max_outstanding_messages = 2).await;
        assert!(client.ready().is_none());
        clients.push(client);
    }
    let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    rig.publish(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for client in &mut clients {
        let mut count = 0;
        while count < 2 {
            count += client.next().await.messages.len();
        }
        assert_eq!(count, 2);
    }
}
