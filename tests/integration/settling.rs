//! Pull, Acknowledge and ModifyAckDeadline.

use std::time::{Duration, Instant};

use landline::api::proto::pubsub::{AcknowledgeRequest, ModifyAckDeadlineRequest};
use serde_json::json;
use tonic::Code;

use crate::{
    fixture::{
        Api, Backend, Fixture, Received,
        api::{acknowledge, channel, modify, pull, unary},
        code, message, rest,
        wait::{SOON, assert_took},
        within,
    },
    for_every_backend, for_one_backend,
};

for_one_backend!(
    deadlines_have_a_range,
    a_lower_floor_allows_short_extensions,
    malformed_ack_requests_are_refused,
    an_ack_request_has_a_size_limit,
    a_long_poll_ends_before_its_client_gives_up,
    pull_on_a_missing_subscription_answers_at_once,
);
for_every_backend!(
    a_modified_deadline_counts_from_its_receipt,
    an_immediate_pull_of_nothing_answers_nothing,
    one_pull_answers_as_many_as_there_are,
    cancelled_pulls_swallow_nothing,
    a_nacked_message_comes_again_and_an_acked_one_does_not,
    an_expired_lease_can_still_be_acked,
    a_waiting_pull_gets_the_next_message,
    an_ack_id_of_another_subscription_is_refused,
);

/// C076; the connector's rule raises the floor: 1 to 9 s are refused unless the setting lowers it.
async fn deadlines_have_a_range(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.pull(&subscription, 1).await;
        for (seconds, legal) in
            [(10, true), (600, true), (1, false), (5, false), (9, false), (601, false), (715, false), (-1, false)]
        {
            let outcome = api.call(modify(&subscription, &received, seconds)).await;
            assert_eq!(code(&outcome), if legal { Code::Ok } else { Code::InvalidArgument }, "{seconds}");
        }
        // The lease of 600 s stands: nothing comes before the nack.
        assert!(api.pull_now(&subscription, 1).await.is_empty());
        api.nack(&subscription, &received).await;
        assert_eq!(api.take(&subscription).await.text(), "m1");
    }
}

/// C076 with CONNECTORS_GCP_MIN_ACK_EXTENSION_SECONDS
async fn a_lower_floor_allows_short_extensions(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "2")]).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.pull(&subscription, 1).await;
        assert_eq!(api.fails(modify(&subscription, &received, 1)).await, Code::InvalidArgument);
        api.extend(&subscription, &received, 9).await;
        let since = Instant::now();
        api.extend(&subscription, &received, 2).await;
        assert_eq!(api.take(&subscription).await.text(), "m1");
        assert_took(since, 1.95, 1.5, "the redelivery after a 2 s extension");
    }
}

/// C077
async fn a_modified_deadline_counts_from_its_receipt(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let shortened = async {
        let topic = api.create_topic("topic1").await;
        let subscription = api.create_subscription_with("sub1", &topic, |s| s.ack_deadline_seconds = 600).await;
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.pull(&subscription, 1).await;
        let since = Instant::now();
        api.extend(&subscription, &received, 10).await;
        let again = within(SOON, "m1 again", api.pull(&subscription, 1)).await;
        assert_took(since, 9.9, 2.0, "a lease of 600 s shortened to 10 s");
        assert_eq!(again[0].id(), received[0].id());
        assert_eq!(api.get_subscription(&subscription).await.unwrap().ack_deadline_seconds, 600);
    };
    let lengthened = async {
        let topic = api.create_topic("topic2").await;
        let subscription = api.create_subscription("sub2", &topic).await;
        let given = Instant::now();
        api.publish_texts(&topic, &["m2"]).await;
        let received = api.pull(&subscription, 1).await;
        tokio::time::sleep_until((given + Duration::from_secs(3)).into()).await;
        let since = Instant::now();
        api.extend(&subscription, &received, 12).await;
        let again = within(SOON, "m2 again", api.pull(&subscription, 1)).await;
        assert_took(since, 11.9, 2.0, "a lease of 10 s extended after 3 s by 12 s");
        assert_eq!(again[0].id(), received[0].id());
    };
    tokio::join!(shortened, lengthened);
}

/// C079
async fn a_long_poll_ends_before_its_client_gives_up(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (_, subscription) = api.pair().await;
    let empty = async |deadline: u64, latest: u64| {
        let since = Instant::now();
        let answer = unary(api.channel(), pull(&subscription, 2), Some(Duration::from_secs(deadline))).await;
        assert!(answer.unwrap_or_else(|e| panic!("with a deadline of {deadline} s: {e:?}")).received_messages.is_empty());
        assert!(since.elapsed() < Duration::from_secs(latest), "{:?}", since.elapsed());
        since.elapsed()
    };
    let over_rest = async {
        let path = format!("/v1/{subscription}:pull");
        let since = Instant::now();
        let headers = [("content-type", "application/json"), ("x-server-timeout", "4")];
        let answer = rest::send(api.address(), "POST", &path, &headers, json!({ "maxMessages": 1 }).to_string()).await;
        assert_eq!(answer.success(), json!({}));
        assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
    };
    let (long, short, ()) = tokio::join!(empty(60, 31), empty(5, 5), over_rest);
    assert!(long > Duration::from_secs(3) && short > Duration::from_millis(500), "no long poll: {long:?} {short:?}");
}

/// C080
async fn an_immediate_pull_of_nothing_answers_nothing(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (_, subscription) = api.pair().await;
        let since = Instant::now();
        assert!(api.pull_now(&subscription, 10).await.is_empty());
        assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
        let body = json!({ "returnImmediately": true, "maxMessages": 10 });
        let answer = rest::json(api.address(), "POST", &format!("/v1/{subscription}:pull"), body).await;
        assert_eq!(answer.success(), json!({}));
    }
}

/// C082
async fn one_pull_answers_as_many_as_there_are(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        for count in [0, -1] {
            assert_eq!(api.fails(pull(&subscription, count)).await, Code::InvalidArgument);
        }
        api.publish_texts(&topic, &["m1", "m2", "m3"]).await;
        let received = api.pull_once(&subscription, 3).await;
        assert_eq!(received.len(), 3);
        api.ack(&subscription, &received).await;
        api.publish(&topic, (0..50).map(|n| message(n.to_string()))).await;
        let received = api.pull_once(&subscription, 10_000).await;
        assert_eq!(received.len(), 50);
        api.ack(&subscription, &received).await;
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C083: a message goes to a live call only; the healthy consumer never waits for the 600 s leases of dead ones.
async fn cancelled_pulls_swallow_nothing(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    for round in 0..10 {
        let calls: Vec<_> = (0..20)
            .map(|n| {
                // Half of them on connections of their own, which end with their call.
                let connection = if n % 2 == 0 { api.channel() } else { channel(api.address()) };
                tokio::spawn(unary(connection, pull(&subscription, 5), None))
            })
            .collect();
        // Cancelled at different moments: before the call left, on its way, and while it waits on the server.
        for (n, call) in calls.into_iter().enumerate() {
            if n % 4 == round % 4 {
                api.get_topic(&topic).await.unwrap();
            }
            call.abort();
            let _ = call.await;
        }
        // What was sent before this on the same connection has been read by the server after it.
        for _ in 0..fixture.nodes.len() {
            api.get_topic(&topic).await.unwrap();
        }
        let sent: Vec<_> = (0..20).map(|n| format!("{round}-{n}")).collect();
        api.publish(&topic, sent.iter().map(message)).await;
        let received = api.pull(&subscription, 20).await;
        let mut got: Vec<_> = received.iter().map(|r| r.text().to_owned()).collect();
        got.sort_by_key(|t| sent.iter().position(|s| s == t));
        assert_eq!(got, sent);
        api.ack(&subscription, &received).await;
    }
}

/// C074, C103
async fn a_nacked_message_comes_again_and_an_acked_one_does_not(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1"]).await;
        let first = api.pull(&subscription, 1).await;
        let since = Instant::now();
        api.nack(&subscription, &first).await;
        let second = api.pull(&subscription, 1).await;
        assert!(since.elapsed() < Duration::from_secs(3), "at once, not {:?}", since.elapsed());
        assert_eq!(first[0].id(), second[0].id());
        assert_ne!(first[0].ack_id, second[0].ack_id);
        api.extend(&subscription, &second, 1).await;
        api.ack(&subscription, &second).await;
        assert_silent(&api, &subscription, Duration::from_millis(2500)).await;
    }
}

/// Nothing comes for a while, longer than the leases in the test last.
async fn assert_silent(api: &Api, subscription: &str, time: Duration) {
    let answer = tokio::time::timeout(time, api.pull(subscription, 1)).await;
    assert!(answer.is_err(), "{:?}", answer.map(|r| r.iter().map(|r| r.text().to_owned()).collect::<Vec<_>>()));
}

/// Without exactly-once an old ack id still acknowledges, as long as nobody else has the message.
async fn an_expired_lease_can_still_be_acked(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1"]).await;
        let first = api.pull(&subscription, 1).await;
        api.extend(&subscription, &first, 1).await;
        let second = api.pull(&subscription, 1).await;
        assert_eq!(first[0].id(), second[0].id());
        api.ack(&subscription, &first).await;
        // An old, unknown or repeated id in a well-formed request is no error.
        api.ack(&subscription, &first).await;
        api.ack(&subscription, &second).await;
        api.extend(&subscription, &second, 30).await;
        api.nack(&subscription, &first).await;
        api.assert_drained(&topic, &subscription).await;
    }
}

/// Ack ids that no server made.
async fn malformed_ack_requests_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.pull(&subscription, 1).await;
        let good = &received[0].ack_id;
        let mut forged = good.clone().into_bytes();
        let middle = forged.len() / 2;
        forged[middle] = if forged[middle] == b'A' { b'B' } else { b'A' };
        let forged = String::from_utf8(forged).unwrap();
        for bad in [vec![], vec![String::new()], vec!["nonsense".into()], vec![forged], vec![good.clone(), "x".into()]] {
            let name = subscription.clone();
            let request = AcknowledgeRequest { subscription: name.clone(), ack_ids: bad.clone() };
            assert_eq!(api.fails(request).await, Code::InvalidArgument, "acknowledge {bad:?}");
            let request = ModifyAckDeadlineRequest { subscription: name, ack_ids: bad.clone(), ack_deadline_seconds: 10 };
            assert_eq!(api.fails(request).await, Code::InvalidArgument, "modify {bad:?}");
        }
        let absent = api.subscription("none");
        assert_eq!(api.fails(acknowledge(&absent, &received)).await, Code::NotFound);
        assert_eq!(api.fails(modify(&absent, &received, 10)).await, Code::NotFound);
        assert_eq!(api.fails(pull(&absent, 1)).await, Code::NotFound);
        if api.transport == crate::fixture::Transport::Rest {
            // Such names are other paths there.
            continue;
        }
        for name in ["", "billing", "projects/p1/topics/t11"] {
            assert_eq!(api.fails(acknowledge(name, &received)).await, Code::InvalidArgument);
        }
    }
}

/// Clients send up to 3,000 ids at once, and the API allows 512 KiB a request.
async fn an_ack_request_has_a_size_limit(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    for _ in 0..3 {
        api.publish(&topic, (0..1000).map(|n| message(n.to_string()))).await;
    }
    let received = api.pull(&subscription, 3000).await;
    let (most, rest) = received.split_at(2500);
    api.extend(&subscription, most, 60).await;
    api.ack(&subscription, most).await;
    api.ack(&subscription, rest).await;
    let many: Vec<&Received> = received.iter().cycle().take(9000).collect();
    assert_eq!(api.fails(acknowledge(&subscription, many.iter().copied())).await, Code::InvalidArgument);
    api.assert_drained(&topic, &subscription).await;
}

/// C181
async fn pull_on_a_missing_subscription_answers_at_once(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let since = Instant::now();
        let name = api.subscription("spring-cloud-gcp-healthcheck-4b2e2b0e");
        assert_eq!(api.fails(pull(&name, 1)).await, Code::NotFound);
        assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
    }
}

/// A Pull that waits is answered by the publish that comes meanwhile.
async fn a_waiting_pull_gets_the_next_message(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        for round in ["m1", "m2", "m3"] {
            let (received, ()) = tokio::join!(api.pull(&subscription, 1), async {
                // Let the Pull reach the server first; the order does not matter for the outcome.
                api.get_topic(&topic).await.unwrap();
                api.publish_texts(&topic, &[round]).await;
            });
            assert_eq!(received[0].text(), round);
            api.ack(&subscription, &received).await;
        }
    }
}

/// C065
async fn an_ack_id_of_another_subscription_is_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let first = api.create_subscription_with("sub1", &topic, |s| s.ack_deadline_seconds = 600).await;
        let second = api.create_subscription("sub2", &topic).await;
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.pull(&first, 1).await;
        assert_eq!(api.fails(acknowledge(&second, &received)).await, Code::InvalidArgument);
        assert_eq!(api.fails(modify(&second, &received, 0)).await, Code::InvalidArgument);
        assert!(api.pull_now(&first, 1).await.is_empty(), "still leased");
        assert_eq!(api.take(&second).await.text(), "m1");
        api.nack(&first, &received).await;
        assert_eq!(api.take(&first).await.text(), "m1");
    }
}
