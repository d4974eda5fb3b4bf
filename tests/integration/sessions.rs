//! StreamingPull: flow control, the end of streams, and many of them.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::StreamingPullRequest;
use tonic::Code;

use crate::{
    fixture::{
        Backend, Fixture,
        api::{acknowledge, channel, modify},
        message,
        message::texts,
        stream::{acks, deadlines},
        wait::SOON,
    },
    for_durable_backends, for_every_backend, for_one_backend,
};

for_every_backend!(
    an_expired_or_nacked_message_frees_its_slot,
    a_unary_ack_frees_the_slot_of_the_stream,
    a_message_larger_than_the_byte_limit_is_delivered,
    a_deleted_subscription_ends_its_streams_and_old_ids,
    what_a_dead_stream_never_received_goes_to_others_at_once,
    a_stalled_reader_does_not_hold_up_others,
    a_burst_of_tiny_ack_requests_is_applied,
    messages_are_shared_between_streams,
);
for_one_backend!(many_streams_fit_on_one_connection, a_stream_is_closed_with_unavailable_after_its_time, inflight_is_capped);
for_durable_backends!(a_server_that_stops_ends_streams_with_unavailable_and_keeps_acks);

/// C061
async fn an_expired_or_nacked_message_frees_its_slot(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream_with(&subscription, |r| r.max_outstanding_messages = 1).await;
    api.publish_texts(&topic, &["m1", "m2"]).await;
    for round in 0..3 {
        let received = stream.message().await;
        assert!(stream.try_message(Duration::from_millis(300)).await.is_none(), "above the limit of one");
        match round {
            0 => stream.send(deadlines(&[(&received.ack_id, 1)])),
            1 => stream.nack(&received),
            _ => stream.ack(&received),
        }
    }
    stream.message().await;
}

/// Rule of the connector: the budget is released whatever path an ack comes by.
async fn a_unary_ack_frees_the_slot_of_the_stream(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let set = |r: &mut StreamingPullRequest| {
        r.max_outstanding_messages = 2;
        r.stream_ack_deadline_seconds = 600;
    };
    let mut stream = api.stream_with(&subscription, set).await;
    api.publish(&topic, (0..60).map(|n| message(n.to_string()))).await;
    let mut seen = BTreeSet::new();
    let mut outstanding = stream.messages(2).await;
    for round in 0..58 {
        let done = outstanding.remove(0);
        seen.insert(done.text().to_owned());
        match round % 3 {
            // On another connection, and with two nodes in turn on each of them.
            0 => crate::fixture::api::unary(channel(api.address()), acknowledge(&subscription, [&done]), None).await.unwrap(),
            1 => api.ack(&subscription, [&done]).await,
            _ => stream.ack(&done),
        }
        outstanding.push(stream.message().await);
    }
    assert_eq!(seen.len(), 58);
}

/// C062
async fn a_message_larger_than_the_byte_limit_is_delivered(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream_with(&subscription, |r| r.max_outstanding_bytes = 100).await;
    api.publish(&topic, [message(vec![b'x'; 1 << 20])]).await;
    api.publish(&topic, [message("small")]).await;
    let first = stream.message().await;
    assert!(stream.try_message(Duration::from_millis(300)).await.is_none(), "above the byte limit");
    stream.ack(&first);
    stream.message().await;
    let mut stream = api.stream_with(&subscription, |r| r.max_outstanding_bytes = -1).await;
    api.publish(&topic, (0..5).map(|_| message(vec![b'x'; 1 << 20]))).await;
    stream.messages(5).await;
}

/// C064
async fn a_deleted_subscription_ends_its_streams_and_old_ids(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream(&subscription).await;
    api.publish_texts(&topic, &["m1"]).await;
    let old = stream.message().await;
    api.delete_subscription(&subscription).await;
    assert_eq!(stream.end_code().await, Code::NotFound);
    api.create_subscription("billing", &topic).await;
    api.publish_texts(&topic, &["m2"]).await;
    let mut stream = api.stream(&subscription).await;
    let received = stream.message().await;
    assert_eq!(received.text(), "m2");
    // The old id settles nothing of the new subscription, whatever the answer.
    for outcome in [api.call(acknowledge(&subscription, [&old])).await, api.call(modify(&subscription, [&old], 0)).await] {
        assert!(outcome.is_ok() || outcome.unwrap_err().code == Code::InvalidArgument);
    }
    stream.nack(&received);
    let again = stream.message().await;
    assert_eq!(again.text(), "m2");
    stream.ack(&again);
    api.publish_texts(&topic, &["m3"]).await;
    assert_eq!(stream.message().await.text(), "m3");
}

/// Rule of the connector: the undelivered prefetch goes back at once; what the client got keeps its lease.
async fn what_a_dead_stream_never_received_goes_to_others_at_once(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.ack_deadline_seconds = 600;
            s.dead_letter_policy =
                Some(landline::api::proto::pubsub::DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 5 });
        })
        .await;
    let set = |r: &mut StreamingPullRequest| {
        r.max_outstanding_messages = 3;
        r.stream_ack_deadline_seconds = 600;
    };
    let mut stream = api.stream_with(&subscription, set).await;
    api.publish(&topic, (0..20).map(|n| message(n.to_string()))).await;
    let kept: BTreeSet<_> = stream.messages(3).await.iter().map(|r| r.text().to_owned()).collect();
    drop(stream);
    let others = api.pull(&subscription, 17).await;
    assert!(others.iter().all(|r| !kept.contains(r.text())), "a message that is leased to the dead stream");
    assert!(others.iter().all(|r| r.delivery_attempt == 1), "the prefetch was counted as an attempt");
    assert!(api.pull_now(&subscription, 20).await.is_empty());
}

/// C176: the reader's window is closed; others go on, and nothing it did not read is lost or counted.
async fn a_stalled_reader_does_not_hold_up_others(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.dead_letter_policy =
                Some(landline::api::proto::pubsub::DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 5 });
        })
        .await;
    let before = fixture.nodes.iter().map(|n| n.resident_bytes()).max().unwrap();
    let narrow = tonic::transport::Endpoint::from_shared(format!("http://{}", api.address()))
        .unwrap()
        .initial_stream_window_size(65_535)
        .initial_connection_window_size(65_535)
        .connect_lazy();
    let set = StreamingPullRequest { stream_ack_deadline_seconds: 600, ..crate::fixture::stream::first(&subscription) };
    let stalled = crate::fixture::Stream::open(narrow, set).await.unwrap();
    // 100 MB; what the stalled stream takes is bounded by its window and the server's own buffer.
    for _ in 0..50 {
        api.publish(&topic, (0..4).map(|_| message(vec![b'x'; 500_000]))).await;
    }
    let mut healthy = api.stream_with(&subscription, |r| r.max_outstanding_messages = 10).await;
    let mut count = 0;
    let until = Instant::now() + Duration::from_secs(60);
    while count < 150 {
        let received = healthy.message_within(until.saturating_duration_since(Instant::now())).await;
        assert_eq!(received.delivery_attempt, 1);
        healthy.ack(&received);
        count += 1;
    }
    let grown = fixture.nodes.iter().map(|n| n.resident_bytes()).max().unwrap().saturating_sub(before);
    if matches!(backend, Backend::Redis | Backend::TwoNodes | Backend::RedisCluster) {
        assert!(grown < 80 << 20, "the server grew by {} MB", grown >> 20);
    }
    // Once the stalled stream ends, what it had not been sent is there for others without an attempt counted.
    drop(stalled);
    while let Some(received) = healthy.try_message(Duration::from_secs(2)).await {
        assert_eq!(received.delivery_attempt, 1);
        healthy.ack(&received);
        count += 1;
    }
    // The rest is what fits the stalled stream's windows and the sockets' buffers, leased for 600 s.
    assert!(count >= 180, "only {count} of 200");
}

/// Clients send one ack a request when they are slow.
async fn a_burst_of_tiny_ack_requests_is_applied(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let set = |r: &mut StreamingPullRequest| {
        r.max_outstanding_messages = 200;
        r.stream_ack_deadline_seconds = 600;
    };
    let mut stream = api.stream_with(&subscription, set).await;
    let mut ids = BTreeSet::new();
    ids.extend(api.publish(&topic, (0..1000).map(|n| message(n.to_string()))).await);
    for _ in 0..1000 {
        let received = stream.message().await;
        assert!(ids.remove(received.id()), "{} came twice", received.id());
        stream.send(deadlines(&[(&received.ack_id, 600)]));
        stream.ack(&received);
    }
    stream.half_close();
    assert_eq!(stream.end_code().await, Code::Ok);
    api.assert_drained(&topic, &subscription).await;
}

/// Messages go to every stream that has room, not to the first alone.
async fn messages_are_shared_between_streams(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        streams.push(api.stream_with(&subscription, |r| r.max_outstanding_messages = 10).await);
    }
    api.publish(&topic, (0..40).map(|n| message(n.to_string()))).await;
    let mut seen = BTreeSet::new();
    for stream in &mut streams {
        let received = stream.messages(10).await;
        seen.extend(texts(&received).into_iter().map(str::to_owned));
    }
    assert_eq!(seen.len(), 40);
}

/// C071
async fn many_streams_fit_on_one_connection(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut streams = Vec::new();
    for _ in 0..300 {
        streams.push(api.stream(&subscription).await);
    }
    api.publish_texts(&topic, &["m1"]).await;
    let (received, ..) = futures::future::select_all(streams.iter_mut().map(|s| Box::pin(s.message()))).await;
    api.ack(&subscription, [&received]).await;
    assert_eq!(received.text(), "m1");
}

/// CONNECTORS_GCP_STREAM_CLOSE_SECONDS, with its jitter of a tenth.
async fn a_stream_is_closed_with_unavailable_after_its_time(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("STREAM_CLOSE_SECONDS", "2")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream(&subscription).await;
    let since = Instant::now();
    api.publish_texts(&topic, &["m1"]).await;
    let received = stream.message().await;
    let failure = stream.end(SOON).await.unwrap();
    assert_eq!(failure.code, Code::Unavailable);
    assert!(!failure.message.contains("shutdownNow"), "{failure:?}");
    let took = since.elapsed().as_secs_f64();
    assert!((1.7..3.5).contains(&took), "{took} s");
    // The lease outlives the stream.
    assert!(api.pull_now(&subscription, 1).await.is_empty());
    api.ack(&subscription, [&received]).await;
}

/// CONNECTORS_GCP_MAX_INFLIGHT_PER_SUBSCRIPTION
async fn inflight_is_capped(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MAX_INFLIGHT_PER_SUBSCRIPTION", "5")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish(&topic, (0..20).map(|n| message(n.to_string()))).await;
    let mut first = api.stream(&subscription).await;
    let mut second = api.stream(&subscription).await;
    let mut received = Vec::new();
    for _ in 0..5 {
        let (message, ..) = futures::future::select_all([Box::pin(first.message()), Box::pin(second.message())]).await;
        received.push(message);
    }
    assert!(api.pull_now(&subscription, 10).await.is_empty());
    assert!(first.try_message(Duration::from_millis(300)).await.is_none());
    assert!(second.try_message(Duration::from_millis(300)).await.is_none());
    api.ack(&subscription, &received[..2]).await;
    for _ in 0..2 {
        futures::future::select_all([Box::pin(first.message()), Box::pin(second.message())]).await;
    }
}

/// C067
async fn a_server_that_stops_ends_streams_with_unavailable_and_keeps_acks(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let mut stream = api.stream_with(&subscription, |r| r.stream_ack_deadline_seconds = 600).await;
    api.publish(&topic, (0..100).map(|n| message(n.to_string()))).await;
    let received = stream.messages(100).await;
    stream.send(acks(&received.iter().map(|r| r.ack_id.as_str()).collect::<Vec<_>>()));
    // The acks above have been read once a later request on the same stream has its effect.
    api.publish_texts(&topic, &["last"]).await;
    let last = stream.message().await;
    stream.nack(&last);
    stream.message().await;
    fixture.nodes[0].terminate();
    assert_eq!(stream.end_code().await, Code::Unavailable);
    let status = fixture.nodes[0].wait(SOON).expect("the end of the process");
    assert!(status.success(), "{status}");
    fixture.nodes[0].restart();
    let api = fixture.api_of_node(0, &api).await;
    api.assert_drained(&topic, &subscription).await;
}
