//! Exactly-once delivery.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use landline::api::proto::pubsub::{AcknowledgeRequest, ModifyAckDeadlineRequest, StreamingPullRequest, Subscription};
use tonic::Code;

use crate::{
    fixture::{
        Backend, Failure, Fixture, Received,
        api::{acknowledge, modify},
        message,
        message::texts,
        stream::{acks, deadlines},
        wait::SOON,
    },
    for_durable_backends, for_every_backend, for_one_backend, for_two_nodes,
};

for_every_backend!(
    a_failed_ack_names_its_ids,
    the_good_ids_of_a_mixed_request_are_processed,
    every_delivery_has_its_own_ack_id,
    a_modify_right_after_delivery_succeeds,
    the_stream_confirms_acks,
    an_ack_out_of_order_is_no_permanent_failure,
    an_earlier_id_stays_invalid_once_the_message_is_acked,
    nothing_is_delivered_twice_while_leased,
);
for_one_backend!(a_failure_of_many_ids_fits_the_trailers, switching_exactly_once_changes_what_an_old_id_does);
for_durable_backends!(a_confirmed_ack_is_final_across_a_crash);
for_two_nodes!(the_node_scope_refuses_ids_of_other_nodes);

const PERMANENT: &str = "PERMANENT_FAILURE_INVALID_ACK_ID";

fn once(s: &mut Subscription) {
    s.enable_exactly_once_delivery = true;
}

fn once_in_order(s: &mut Subscription) {
    once(s);
    s.enable_message_ordering = true;
}

/// Checks the documented form of a failure and answers the failed ids with their failures.
fn failures(failure: &Failure) -> BTreeMap<String, String> {
    assert_eq!(failure.code, Code::FailedPrecondition, "{failure:?}");
    let info = failure.info.as_ref().unwrap_or_else(|| panic!("no ErrorInfo in {failure:?}"));
    assert_eq!((info.reason.as_str(), info.domain.as_str()), (PERMANENT, "pubsub.googleapis.com"));
    info.metadata.clone()
}

/// C085; the connector's rule makes it FAILED_PRECONDITION.
async fn a_failed_ack_names_its_ids(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(once).await;
        api.publish_texts(&topic, &["m1"]).await;
        // One that was given back, one that expired, and the one that is good.
        let nacked = api.pull(&subscription, 1).await.remove(0);
        api.nack(&subscription, [&nacked]).await;
        let expired = api.pull(&subscription, 1).await.remove(0);
        api.extend(&subscription, [&expired], 1).await;
        let good = api.pull(&subscription, 1).await.remove(0);
        for stale in [&nacked, &expired] {
            let expected = BTreeMap::from([(stale.ack_id.clone(), PERMANENT.to_owned())]);
            assert_eq!(failures(&api.failure(acknowledge(&subscription, [stale])).await), expected);
            assert_eq!(failures(&api.failure(modify(&subscription, [stale], 30)).await), expected);
            assert_eq!(failures(&api.failure(modify(&subscription, [stale], 0)).await), expected);
        }
        api.ack(&subscription, [&good]).await;
        // A repeated ack is no failure; moving the deadline of what is gone is one.
        api.ack(&subscription, [&good]).await;
        let expected = BTreeMap::from([(good.ack_id.clone(), PERMANENT.to_owned())]);
        assert_eq!(failures(&api.failure(modify(&subscription, [&good], 30)).await), expected);
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C086: unlisted or transient ids were processed, listed permanent ones were not.
async fn the_good_ids_of_a_mixed_request_are_processed(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api
            .pair_with(|s| {
                once(s);
                s.ack_deadline_seconds = 600;
            })
            .await;
        api.publish_texts(&topic, &["m1", "m2", "m3"]).await;
        let received = api.pull(&subscription, 3).await;
        api.nack(&subscription, &received[1..2]).await;
        let again = api.pull(&subscription, 1).await.remove(0);
        let listed = failures(&api.failure(acknowledge(&subscription, &received)).await);
        assert_eq!(listed.get(&received[1].ack_id).map(String::as_str), Some(PERMANENT));
        for good in [&received[0], &received[2]] {
            let value = listed.get(&good.ack_id);
            assert!(value.is_none_or(|v| v.starts_with("TRANSIENT_FAILURE_")), "{value:?}");
        }
        // A client that retries the transient ones is told that they are done.
        api.ack(&subscription, [&received[0], &received[2]]).await;
        assert!(api.pull_now(&subscription, 10).await.is_empty());
        api.nack(&subscription, [&again]).await;
        assert_eq!(api.take(&subscription).await.id(), again.id());
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C088
async fn every_delivery_has_its_own_ack_id(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(once).await;
    let mut stream = api.stream_with(&subscription, |r| r.max_outstanding_messages = 1).await;
    api.publish_texts(&topic, &["m1"]).await;
    let first = stream.message().await;
    stream.nack(&first);
    let second = stream.message().await;
    assert!(first.id() == second.id() && first.ack_id != second.ack_id);
    api.ack(&subscription, [&second]).await;
    failures(&api.failure(acknowledge(&subscription, [&first])).await);
    api.publish_texts(&topic, &["m2"]).await;
    assert_eq!(stream.message().await.text(), "m2");
}

/// C089: no race between the write to the stream and the lease.
async fn a_modify_right_after_delivery_succeeds(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(once).await;
    // Long leases: what is tested is the moment of delivery, however slow the machine.
    let long = |r: &mut StreamingPullRequest| r.stream_ack_deadline_seconds = 600;
    let mut streams = [api.stream_with(&subscription, long).await, api.stream_with(&subscription, long).await];
    let publish = async {
        for batch in 0..20 {
            api.publish(&topic, (0..25).map(|n| message(format!("{batch}-{n}")))).await;
        }
    };
    let consume = async {
        let mut seen = BTreeSet::new();
        while seen.len() < 500 {
            let [first, second] = &mut streams;
            let next = futures::future::select_all([Box::pin(first.message()), Box::pin(second.message())]);
            let (received, ..) = next.await;
            api.extend(&subscription, [&received], 60).await;
            api.ack(&subscription, [&received]).await;
            assert!(seen.insert(received.id().to_owned()), "{} came twice", received.text());
        }
    };
    tokio::join!(publish, consume);
    drop(streams);
    api.assert_drained(&topic, &subscription).await;
}

/// C092
async fn the_stream_confirms_acks(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(once).await;
    let mut stream = api.stream(&subscription).await;
    api.publish_texts(&topic, &["m1", "m2"]).await;
    let received = stream.messages(2).await;
    api.nack(&subscription, &received[..1]).await;
    let again = stream.message().await;
    let (stale, good) = (&received[0].ack_id, &received[1].ack_id);

    stream.send(deadlines(&[(stale, 30), (good, 30)]));
    let confirmation = loop {
        let response = stream.response(SOON).await.unwrap().unwrap();
        if let Some(confirmation) = response.modify_ack_deadline_confirmation {
            break confirmation;
        }
    };
    assert_eq!((&confirmation.ack_ids[..], &confirmation.invalid_ack_ids[..]), (&[good.clone()][..], &[stale.clone()][..]));
    stream.send(acks(&[stale, good]));
    let confirmation = loop {
        let response = stream.response(SOON).await.unwrap().unwrap();
        if let Some(confirmation) = response.acknowledge_confirmation {
            break confirmation;
        }
    };
    assert_eq!((&confirmation.ack_ids[..], &confirmation.invalid_ack_ids[..]), (&[good.clone()][..], &[stale.clone()][..]));
    assert!(confirmation.temporary_failed_ack_ids.is_empty() && confirmation.unordered_ack_ids.is_empty());
    api.ack(&subscription, [&again]).await;
    // The stream lives on.
    api.publish_texts(&topic, &["m3"]).await;
    assert_eq!(stream.message().await.text(), "m3");
}

/// C100
async fn an_ack_out_of_order_is_no_permanent_failure(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    use crate::fixture::message::Build;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(once_in_order).await;
        api.publish(&topic, ["m1", "m2"].map(|m| message(m).key("k"))).await;
        let received = api.pull(&subscription, 2).await;
        assert_eq!(texts(&received), ["m1", "m2"]);
        if let Err(failure) = api.call(acknowledge(&subscription, &received[1..])).await {
            let listed = failures(&failure);
            assert!(listed.values().all(|v| v.starts_with("TRANSIENT_FAILURE_")), "{listed:?}");
        }
        api.ack(&subscription, &received[..1]).await;
        api.ack(&subscription, &received[1..]).await;
        api.assert_drained(&topic, &subscription).await;
    }
}

/// Section 6.1 of the API: the id of an older delivery. What came back with its key was not counted as another attempt.
async fn an_earlier_id_stays_invalid_once_the_message_is_acked(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    use crate::fixture::message::Build;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(once_in_order).await;
        api.publish(&topic, ["m1", "m2"].map(|m| message(m).key("k"))).await;
        let first = api.pull(&subscription, 2).await;
        api.nack(&subscription, &first[..1]).await;
        let second = api.pull(&subscription, 2).await;
        assert_eq!(texts(&second), ["m1", "m2"]);
        api.ack(&subscription, &second).await;
        api.ack(&subscription, &second).await;
        let expected: BTreeMap<_, _> = first.iter().map(|r| (r.ack_id.clone(), PERMANENT.to_owned())).collect();
        assert_eq!(failures(&api.failure(acknowledge(&subscription, &first)).await), expected);
        api.assert_drained(&topic, &subscription).await;
    }
}

/// Many consumers, random nacks: no message is with two of them at a time, and none comes after its confirmed ack.
async fn nothing_is_delivered_twice_while_leased(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(once).await;
    api.publish(&topic, (0..300).map(|n| message(n.to_string()))).await;
    let held = std::sync::Mutex::new((BTreeSet::<String>::new(), BTreeSet::<String>::new()));
    let consumer = async |number: usize| {
        let mut count = number;
        loop {
            let received = api.pull_now(&subscription, 7).await;
            if received.is_empty() {
                let (leased, acked) = &*held.lock().unwrap();
                if leased.is_empty() && acked.len() == 300 {
                    return;
                }
            }
            for r in &received {
                let (leased, acked) = &mut *held.lock().unwrap();
                assert!(!acked.contains(r.id()), "{} came after its ack", r.text());
                assert!(leased.insert(r.id().to_owned()), "{} is with two consumers", r.text());
            }
            for r in &received {
                count += 1;
                // The books change before a nack, after an ack: between the two the message may be with anyone.
                if count.is_multiple_of(4) {
                    held.lock().unwrap().0.remove(r.id());
                    api.nack(&subscription, [r]).await;
                } else {
                    api.ack(&subscription, [r]).await;
                    let (leased, acked) = &mut *held.lock().unwrap();
                    leased.remove(r.id());
                    acked.insert(r.id().to_owned());
                }
            }
            tokio::task::yield_now().await;
        }
    };
    let all = futures::future::join_all((0..6).map(consumer));
    crate::fixture::within(Duration::from_secs(60), "300 messages acked", all).await;
}

/// The details of a thousand failed ids exceed what HTTP/2 stacks take as headers by default.
async fn a_failure_of_many_ids_fits_the_trailers(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(once).await;
    let mut stale: Vec<Received> = Vec::new();
    while stale.len() < 1000 {
        api.publish(&topic, (0..250).map(|n| message(n.to_string()))).await;
        let received = api.pull(&subscription, 250).await;
        api.nack(&subscription, &received).await;
        let again = api.pull(&subscription, 250).await;
        api.ack(&subscription, &again).await;
        stale.extend(received);
    }
    let ack_ids: Vec<_> = stale.iter().map(|r| r.ack_id.clone()).collect();
    let request = AcknowledgeRequest { subscription: subscription.clone(), ack_ids: ack_ids.clone() };
    let expected: BTreeSet<_> = ack_ids.iter().cloned().collect();
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", api.address()))
        .unwrap()
        .http2_max_header_list_size(16 << 20)
        .connect_lazy();
    let failure = crate::fixture::api::unary(channel.clone(), request, None).await.unwrap_err();
    assert_eq!(failures(&failure).into_keys().collect::<BTreeSet<_>>(), expected);
    let request = ModifyAckDeadlineRequest { subscription, ack_ids, ack_deadline_seconds: 60 };
    let failure = crate::fixture::api::unary(channel, request, None).await.unwrap_err();
    assert_eq!(failures(&failure).into_keys().collect::<BTreeSet<_>>(), expected);
}

/// The setting of the moment decides, not that of the delivery.
async fn switching_exactly_once_changes_what_an_old_id_does(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1"]).await;
        let first = api.pull(&subscription, 1).await;
        api.nack(&subscription, &first).await;
        let second = api.pull(&subscription, 1).await;
        let paths = ["enable_exactly_once_delivery"];
        api.update_subscription(&subscription, &paths, once).await.unwrap();
        failures(&api.failure(acknowledge(&subscription, &first)).await);
        api.update_subscription(&subscription, &paths, |_| {}).await.unwrap();
        api.ack(&subscription, &first).await;
        api.ack(&subscription, &second).await;
        api.assert_drained(&topic, &subscription).await;
    }
}

/// Rule of the connector: a confirmed ack is final.
async fn a_confirmed_ack_is_final_across_a_crash(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let mut api = fixture.api().await;
    let long = |s: &mut Subscription| {
        once(s);
        s.ack_deadline_seconds = 600;
    };
    let (topic, subscription) = api.pair_with(long).await;
    for round in 0..3 {
        let sent: Vec<_> = (0..50).map(|n| format!("{round}-{n}")).collect();
        api.publish(&topic, sent.iter().map(message)).await;
        let received = api.pull(&subscription, 50).await;
        api.ack(&subscription, &received[..25]).await;
        fixture.crash_and_restart();
        api = fixture.api_of_node(0, &api).await;
        assert!(api.pull_now(&subscription, 100).await.is_empty(), "acked or leased messages came again");
        // Leases given before the crash are still good after it.
        api.ack(&subscription, &received).await;
        api.assert_drained(&topic, &subscription).await;
    }
}

/// CONNECTORS_GCP_EXACTLY_ONCE_SCOPE=node
async fn the_node_scope_refuses_ids_of_other_nodes(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("EXACTLY_ONCE_SCOPE", "node")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(once).await;
    let (here, there) = (fixture.api_of_node(0, &api).await, fixture.api_of_node(1, &api).await);
    api.publish_texts(&topic, &["m1"]).await;
    let received = here.pull(&subscription, 1).await;
    failures(&there.failure(acknowledge(&subscription, &received)).await);
    failures(&there.failure(modify(&subscription, &received, 30)).await);
    here.extend(&subscription, &received, 30).await;
    here.ack(&subscription, &received).await;
}
