//! StreamingPull: the protocol of one stream.

use std::time::{Duration, Instant};

use landline::api::proto::pubsub::{
    DetachSubscriptionRequest, PushConfig, StreamingPullRequest, streaming_pull_response::SubscriptionProperties,
};
use tonic::Code;

use crate::{
    fixture::{
        Backend, Fixture, Stream,
        stream::{acks, deadlines, first},
        wait::{SOON, assert_took},
    },
    for_every_backend, for_one_backend,
};

for_one_backend!(
    a_ping_is_answered_with_the_subscription_properties,
    a_stream_without_pings_stays_silent,
    empty_follow_up_requests_change_nothing,
    first_only_fields_on_a_later_request_end_the_stream,
    a_first_request_has_required_fields,
    bad_deadline_lists_end_the_stream,
    the_properties_follow_an_update_of_exactly_once,
    streams_of_what_can_not_be_pulled_are_refused,
    streams_of_one_client_id_live_side_by_side,
);
for_every_backend!(
    the_stream_deadline_is_the_lease_of_its_messages,
    an_ack_before_a_modify_is_final,
    a_message_is_delivered_until_it_is_acked,
    acks_sent_before_a_half_close_count,
);

const EMPTY: StreamingPullRequest = StreamingPullRequest {
    subscription: String::new(),
    ack_ids: Vec::new(),
    modify_deadline_seconds: Vec::new(),
    modify_deadline_ack_ids: Vec::new(),
    stream_ack_deadline_seconds: 0,
    client_id: String::new(),
    max_outstanding_messages: 0,
    max_outstanding_bytes: 0,
    protocol_version: 0,
};

/// The next response, which has to come well before a client's 15 s watchdog.
async fn pong(stream: &mut Stream) -> (usize, Option<SubscriptionProperties>) {
    let response = stream.response(Duration::from_secs(5)).await.unwrap_or_else(|e| panic!("no answer to a ping: {e:?}"));
    let response = response.expect("an open stream");
    (response.received_messages.len(), response.subscription_properties)
}

/// C052, C053
async fn a_ping_is_answered_with_the_subscription_properties(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.enable_message_ordering = true;
            s.enable_exactly_once_delivery = true;
        })
        .await;
    let truth = Some(SubscriptionProperties { exactly_once_delivery_enabled: true, message_ordering_enabled: true });
    let mut stream = api
        .stream_with(&subscription, |r| {
            r.protocol_version = 1;
            r.max_outstanding_messages = 1;
        })
        .await;
    // With an empty backlog; a greeting of the server may come before the first answer.
    for _ in 0..5 {
        stream.send(EMPTY);
        assert_eq!(pong(&mut stream).await, (0, truth));
    }
    api.publish_texts(&topic, &["m1", "m2"]).await;
    let received = stream.message().await;
    // While the flow control is exhausted.
    for _ in 0..5 {
        stream.send(EMPTY);
        assert_eq!(pong(&mut stream).await, (0, truth));
    }
    stream.ack(&received);
    loop {
        let response = stream.response(SOON).await.unwrap().unwrap();
        assert_eq!(response.subscription_properties, truth, "{response:?}");
        if !response.received_messages.is_empty() {
            break;
        }
    }
}

/// C052: clients of protocol version 0 are not ready for empty responses.
async fn a_stream_without_pings_stays_silent(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream(&subscription).await;
    stream.send(EMPTY);
    stream.send(StreamingPullRequest { stream_ack_deadline_seconds: 20, ..EMPTY });
    assert!(matches!(stream.response(Duration::from_secs(1)).await, Err(None)), "{:?}", stream.log);
    api.publish_texts(&topic, &["m1"]).await;
    let response = stream.response(SOON).await.unwrap().unwrap();
    assert_eq!(response.received_messages.len(), 1);
    assert_eq!(response.subscription_properties, Some(SubscriptionProperties::default()));
}

/// C055
async fn empty_follow_up_requests_change_nothing(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream(&subscription).await;
    api.publish_texts(&topic, &["m1", "m2"]).await;
    let received = stream.messages(2).await;
    stream.send(EMPTY);
    stream.send(acks(&[&received[0].ack_id]));
    stream.send(EMPTY);
    stream.send(acks(&[&received[1].ack_id]));
    api.publish_texts(&topic, &["m3"]).await;
    assert_eq!(stream.message().await.text(), "m3");
}

/// C056
async fn first_only_fields_on_a_later_request_end_the_stream(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let later = [
        StreamingPullRequest { subscription: subscription.clone(), ..EMPTY },
        StreamingPullRequest { max_outstanding_messages: 5, ..EMPTY },
        StreamingPullRequest { max_outstanding_bytes: 5, ..EMPTY },
        StreamingPullRequest { protocol_version: 1, ..EMPTY },
    ];
    for request in later {
        let mut stream = api.stream(&subscription).await;
        stream.send(request.clone());
        assert_eq!(stream.end_code().await, Code::InvalidArgument, "{request:?}");
    }
    let mut stream = api.stream(&subscription).await;
    stream.send(StreamingPullRequest { client_id: "c1".into(), ..EMPTY });
    api.publish_texts(&topic, &["m1"]).await;
    assert_eq!(stream.message().await.text(), "m1");
}

/// The first request names the subscription and a deadline of 10 to 600 s.
async fn a_first_request_has_required_fields(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    for seconds in [0, 1, 9, 601, -1] {
        let request = StreamingPullRequest { stream_ack_deadline_seconds: seconds, ..first(&subscription) };
        assert_eq!(api.refused_stream(request).await, Code::InvalidArgument, "{seconds} s");
    }
    assert_eq!(api.refused_stream(EMPTY).await, Code::InvalidArgument);
    assert_eq!(api.refused_stream(first("")).await, Code::InvalidArgument);
    assert_eq!(api.refused_stream(first(&api.subscription("none"))).await, Code::NotFound);
    for seconds in [1, 9, 601, -1] {
        let mut stream = api.stream(&subscription).await;
        stream.send(StreamingPullRequest { stream_ack_deadline_seconds: seconds, ..EMPTY });
        assert_eq!(stream.end_code().await, Code::InvalidArgument, "{seconds} s later");
    }
    // The first request may settle what another stream delivered.
    api.publish_texts(&topic, &["m1"]).await;
    let received = api.pull(&subscription, 1).await;
    let mut stream = api.stream_with(&subscription, |r| r.ack_ids = vec![received[0].ack_id.clone()]).await;
    api.publish_texts(&topic, &["m2"]).await;
    assert_eq!(stream.message().await.text(), "m2");
}

/// C059
async fn bad_deadline_lists_end_the_stream(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish_texts(&topic, &["m1"]).await;
    let received = api.pull(&subscription, 1).await.remove(0);
    let id = received.ack_id.as_str();
    let uneven = StreamingPullRequest { modify_deadline_seconds: vec![20], ..deadlines(&[(id, 20), (id, 20)]) };
    let bad = [uneven, deadlines(&[(id, -1)]), deadlines(&[(id, 601)]), acks(&["nonsense"]), deadlines(&[("nonsense", 20)])];
    for request in bad {
        let mut stream = api.stream(&subscription).await;
        stream.send(request.clone());
        assert_eq!(stream.end_code().await, Code::InvalidArgument, "{request:?}");
    }
    // Ids that are well-formed and over are no error.
    api.ack(&subscription, [&received]).await;
    let mut stream = api.stream(&subscription).await;
    stream.send(acks(&[id]));
    stream.send(deadlines(&[(id, 20), (id, 0)]));
    api.publish_texts(&topic, &["m2"]).await;
    assert_eq!(stream.message().await.text(), "m2");
}

/// C058: neither the subscription's own deadline nor a later change of the stream's touches a lease that was given.
async fn the_stream_deadline_is_the_lease_of_its_messages(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let mut stream = api.stream(&subscription).await;
    let since_first = Instant::now();
    api.publish_texts(&topic, &["m1"]).await;
    let first = stream.message().await;
    stream.send(StreamingPullRequest { stream_ack_deadline_seconds: 17, ..EMPTY });
    // The change is in force once a request after it has had its effect.
    stream.nack(&first);
    let first = stream.message().await;
    assert_eq!(first.text(), "m1");
    let since = Instant::now();
    api.publish_texts(&topic, &["m2"]).await;
    let second = stream.message().await;
    assert_eq!(second.text(), "m2");
    stream.ack(&first);
    let again = stream.message_within(Duration::from_secs(25)).await;
    assert_eq!(again.id(), second.id());
    assert_took(since, 16.9, 2.0, "the lease of a stream with 17 s");
    assert!(since_first.elapsed() > Duration::from_secs(16));
    stream.ack(&again);
    drop(stream);

    let mut stream = api.stream(&subscription).await;
    let since = Instant::now();
    api.publish_texts(&topic, &["m3"]).await;
    let third = stream.message().await;
    stream.send(StreamingPullRequest { stream_ack_deadline_seconds: 600, ..EMPTY });
    let again = stream.message_within(Duration::from_secs(20)).await;
    assert_eq!(again.id(), third.id());
    assert_took(since, 9.9, 2.0, "the lease of a stream with 10 s");
}

/// C073
async fn an_ack_before_a_modify_is_final(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream(&subscription).await;
    api.publish_texts(&topic, &["m1", "m2", "m3"]).await;
    let received = stream.messages(3).await;
    stream.ack(&received[0]);
    stream.send(deadlines(&[(&received[0].ack_id, 1)]));
    let both = StreamingPullRequest { ack_ids: vec![received[1].ack_id.clone()], ..deadlines(&[(&received[1].ack_id, 1)]) };
    stream.send(both);
    // Over the unary calls, on another connection.
    api.ack(&subscription, [&received[2]]).await;
    api.extend(&subscription, [&received[2]], 1).await;
    let resurrected = stream.try_message(Duration::from_millis(2500)).await;
    assert!(resurrected.is_none(), "{resurrected:?}");
}

/// C074, on a stream
async fn a_message_is_delivered_until_it_is_acked(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream(&subscription).await;
    api.publish_texts(&topic, &["m1"]).await;
    let first = stream.message().await;
    stream.nack(&first);
    let second = stream.message().await;
    stream.send(deadlines(&[(&second.ack_id, 1)]));
    let third = stream.message().await;
    assert!(first.id() == second.id() && second.id() == third.id());
    assert!(first.ack_id != second.ack_id && second.ack_id != third.ack_id);
    stream.send(StreamingPullRequest { ack_ids: vec![third.ack_id.clone()], ..EMPTY });
    let again = stream.try_message(Duration::from_millis(1500)).await;
    assert!(again.is_none(), "{again:?}");
}

/// C068
async fn acks_sent_before_a_half_close_count(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    for round in 0..10 {
        let mut stream = api.stream(&subscription).await;
        let texts: Vec<_> = (0..20).map(|n| format!("{round}-{n}")).collect();
        api.publish(&topic, texts.iter().map(crate::fixture::message)).await;
        let received = stream.messages(20).await;
        stream.send(acks(&received.iter().map(|r| r.ack_id.as_str()).collect::<Vec<_>>()));
        stream.half_close();
        assert_eq!(stream.end_code().await, Code::Ok);
        // Nothing is leased to the closed stream any more.
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C070
async fn streams_of_one_client_id_live_side_by_side(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.enable_message_ordering = true;
            s.enable_exactly_once_delivery = true;
        })
        .await;
    let mut streams = Vec::new();
    for _ in 0..5 {
        let set = |r: &mut StreamingPullRequest| {
            r.client_id = "3b241101-e2bb-4255-8caf-4136c566a962".into();
            r.max_outstanding_messages = 1;
        };
        streams.push(api.stream_with(&subscription, set).await);
    }
    // One message a stream: each of the five gets one, so none was put out.
    api.publish_texts(&topic, &["m1", "m2", "m3", "m4", "m5"]).await;
    for stream in &mut streams {
        stream.message().await;
    }
}

/// C091
async fn the_properties_follow_an_update_of_exactly_once(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream_with(&subscription, |r| r.protocol_version = 1).await;
    for wanted in [true, false, true] {
        let paths = ["enable_exactly_once_delivery"];
        api.update_subscription(&subscription, &paths, |s| s.enable_exactly_once_delivery = wanted).await.unwrap();
        let until = Instant::now() + SOON;
        loop {
            stream.send(EMPTY);
            if pong(&mut stream).await.1.unwrap().exactly_once_delivery_enabled == wanted {
                break;
            }
            assert!(Instant::now() < until, "the stream still shows {}", !wanted);
        }
        api.publish_texts(&topic, &["m1"]).await;
        let received = stream.message().await;
        api.ack(&subscription, [&received]).await;
    }
}

/// Streams of push and detached subscriptions; what was open when the subscription changed ends the same way.
async fn streams_of_what_can_not_be_pulled_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let push = || Some(PushConfig { push_endpoint: "http://127.0.0.1:9/".into(), ..Default::default() });
    let mut open = api.stream(&subscription).await;
    api.update_subscription(&subscription, &["push_config"], |s| s.push_config = push()).await.unwrap();
    assert_eq!(open.end_code().await, Code::FailedPrecondition);
    assert_eq!(api.refused_stream(first(&subscription)).await, Code::FailedPrecondition);
    let detached = api.create_subscription("detached", &topic).await;
    let mut open = api.stream(&detached).await;
    api.ok(DetachSubscriptionRequest { subscription: detached.clone() }).await;
    assert_eq!(open.end_code().await, Code::FailedPrecondition);
    assert_eq!(api.refused_stream(first(&detached)).await, Code::FailedPrecondition);
    assert_eq!(api.fails(crate::fixture::api::pull(&detached, 1)).await, Code::FailedPrecondition);
}
