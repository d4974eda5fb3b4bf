//! Push subscriptions.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use futures::stream::{FuturesUnordered, StreamExt};
use landline::api::proto::pubsub::{
    DeadLetterPolicy, ModifyPushConfigRequest, PubsubMessage, PushConfig, RetryPolicy, Subscription,
    push_config::{NoWrapper, Wrapper},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::Code;

use crate::{
    fixture::{
        Api, Backend, Fixture, code, message,
        message::Build,
        seconds,
        sink::{Pushed, Sink},
        stream::first,
        wait::SOON,
    },
    for_every_backend, for_one_backend, tests_on,
};

for_every_backend!(
    a_wrapped_push_has_the_documented_body,
    the_answer_decides_whether_a_push_is_an_ack,
    pushes_of_a_key_come_one_by_one_in_order,
    a_push_backlog_survives_an_outage_of_the_endpoint,
    exhausted_pushes_become_dead_letters,
);
// Each server pauses for itself, and another may try meanwhile.
tests_on! {
    [embedded Embedded, redis Redis, redis_cluster RedisCluster]
    a_failed_push_is_repeated_after_a_pause_that_grows
}
for_one_backend!(
    redirects_are_not_followed,
    an_unwrapped_push_is_the_payload_itself,
    an_empty_unwrapped_push_says_that_it_is_empty,
    attributes_that_are_no_headers_do_no_harm,
    endpoints_are_kept_to_the_byte_and_checked,
    a_push_subscription_can_not_be_pulled,
    odd_endpoints_are_judged_by_their_status,
    a_changed_endpoint_gets_what_follows,
);

async fn pushing(api: &Api, endpoint: &str, set: impl FnOnce(&mut Subscription)) -> (String, String) {
    let config = PushConfig { push_endpoint: endpoint.to_owned(), ..Default::default() };
    api.pair_with(|s| {
        s.push_config = Some(config);
        set(s);
    })
    .await
}

/// C140
async fn a_wrapped_push_has_the_documented_body(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let sink = Sink::start().await;
        let (topic, subscription) = pushing(&api, &sink.url("/push"), |_| {}).await;
        let ids = api.publish(&topic, [message(b"\xfb\xff?").attribute("color", "red").key("k")]).await;
        let pushed = sink.next().await;
        assert_eq!((pushed.method.as_str(), pushed.target.as_str()), ("POST", "/push"));
        assert_eq!(pushed.header("content-type"), Some("application/json"));
        assert_eq!(pushed.header("user-agent"), Some("CloudPubSub-Google"));
        let json = pushed.json();
        let body = &json["message"];
        assert_eq!(body["data"], "+/8/");
        assert_eq!(body["attributes"], serde_json::json!({ "color": "red" }));
        assert_eq!(body["orderingKey"], "k");
        assert_eq!((&body["messageId"], &body["message_id"]), (&ids[0].as_str().into(), &ids[0].as_str().into()));
        assert!(body["publishTime"].as_str().unwrap().ends_with('Z'), "{json}");
        assert_eq!(body["publishTime"], body["publish_time"]);
        assert_eq!(json["subscription"], subscription);
        assert_eq!(json.get("deliveryAttempt"), None);
        api.publish(&topic, [message("plain")]).await;
        let json = sink.next().await.json();
        assert_eq!(json["message"].get("orderingKey"), None);
    }
}

/// C142; a 102 is an interim answer that no HTTP library sends as a final one, see the test with odd endpoints.
async fn the_answer_decides_whether_a_push_is_an_ack(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    let (topic, _) = pushing(&api, &sink.url("/"), |_| {}).await;
    for status in [200, 201, 202, 204] {
        sink.next_answers(&[status]);
        let text = status.to_string();
        api.publish_texts(&topic, &[&text]).await;
        assert_eq!(sink.next().await.text(), text);
    }
    for status in [203, 206, 301, 302, 307, 400, 404, 429, 500, 503] {
        sink.next_answers(&[status]);
        let text = status.to_string();
        api.publish_texts(&topic, &[&text]).await;
        assert_eq!(sink.next().await.text(), text);
        assert_eq!(sink.next().await.text(), text, "{status} is no ack");
    }
    // Nothing that was acked comes again: the next push is the next message.
    api.publish_texts(&topic, &["last"]).await;
    assert_eq!(sink.next().await.text(), "last");
}

/// Without a retry policy: 100 ms at first, and twice as long each time.
async fn a_failed_push_is_repeated_after_a_pause_that_grows(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    let (topic, _) = pushing(&api, &sink.url("/"), |_| {}).await;
    sink.next_answers(&[500, 500, 500]);
    api.publish_texts(&topic, &["m1"]).await;
    let mut before = sink.next().await.at;
    for least_ms in [100, 200, 400] {
        let at = sink.next().await.at;
        let pause = at - before;
        // The first push was answered after it was noted.
        assert!(pause >= Duration::from_millis(least_ms), "{pause:?} where {least_ms} ms are due");
        before = at;
    }
}

/// C143
async fn redirects_are_not_followed(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    let (topic, _) = pushing(&api, &sink.url("/here"), |_| {}).await;
    sink.next_answers(&[302, 307, 308]);
    api.publish_texts(&topic, &["m1"]).await;
    for _ in 0..4 {
        assert_eq!(sink.next().await.target, "/here");
    }
}

async fn unwrapped(api: &Api, sink: &Sink, write_metadata: bool, sent: PubsubMessage) -> (Pushed, String, String) {
    let wrapper = Some(Wrapper::NoWrapper(NoWrapper { write_metadata }));
    let name = if write_metadata { "with-metadata" } else { "without-metadata" };
    let topic = api.create_topic(name).await;
    let config = PushConfig { push_endpoint: sink.url("/"), wrapper, ..Default::default() };
    let subscription = api.create_subscription_with(name, &topic, |s| s.push_config = Some(config)).await;
    let ids = api.publish(&topic, [sent]).await;
    (sink.next().await, subscription, ids[0].clone())
}

/// C145
async fn an_unwrapped_push_is_the_payload_itself(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let sink = Sink::start().await;
        let sent = || message("{\"a\":1}").attribute("Content-Type", "application/json").attribute("ce-type", "x").key("k");
        let (pushed, subscription, id) = unwrapped(&api, &sink, true, sent()).await;
        assert_eq!(&pushed.body[..], b"{\"a\":1}");
        assert_eq!(pushed.header("x-goog-pubsub-subscription-name"), Some(subscription.as_str()));
        assert_eq!(pushed.header("x-goog-pubsub-message-id"), Some(id.as_str()));
        assert_eq!(pushed.header("x-goog-pubsub-ordering-key"), Some("k"));
        assert!(pushed.header("x-goog-pubsub-publish-time").is_some_and(|t| t.ends_with('Z')));
        assert_eq!((pushed.header("content-type"), pushed.header("ce-type")), (Some("application/json"), Some("x")));
        let (pushed, ..) = unwrapped(&api, &sink, false, sent()).await;
        assert_eq!(&pushed.body[..], b"{\"a\":1}");
        assert!(pushed.headers.keys().all(|k| !k.as_str().starts_with("x-goog")), "{:?}", pushed.headers);
        assert_eq!(pushed.header("ce-type"), None);
    }
}

/// Some servers answer 411 to a POST that does not say how long it is.
async fn an_empty_unwrapped_push_says_that_it_is_empty(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    for write_metadata in [false, true] {
        let (pushed, ..) = unwrapped(&api, &sink, write_metadata, message("").attribute("a", "b")).await;
        assert_eq!((pushed.header("content-length"), pushed.body.len()), (Some("0"), 0));
    }
}

/// C146, C190
async fn attributes_that_are_no_headers_do_no_harm(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    let mut sent = message("body")
        .attribute("a b", "x")
        .attribute("ключ", "x")
        .attribute("Host", "evil")
        .attribute("Content-Length", "1")
        .attribute("Transfer-Encoding", "chunked")
        .attribute("Connection", "close")
        .attribute("line", "one\r\ntwo: three")
        .attribute("x-goog-pubsub-message-id", "forged")
        .attribute("fine", "yes");
    for n in 0..50 {
        sent = sent.attribute(&format!("big-{n}"), &"v".repeat(1024));
    }
    let (pushed, _, id) = unwrapped(&api, &sink, true, sent).await;
    assert_eq!(&pushed.body[..], b"body");
    assert_eq!(pushed.header("content-length"), Some("4"));
    assert!(pushed.header("host").unwrap().starts_with("127.0.0.1:"), "{:?}", pushed.headers);
    assert_eq!((pushed.header("transfer-encoding"), pushed.header("two")), (None, None));
    assert_eq!(pushed.header("fine"), Some("yes"));
    assert!(pushed.headers.get_all("x-goog-pubsub-message-id").iter().any(|v| v == id.as_str()), "{:?}", pushed.headers);
    // Wrapped, an attribute that is named like a field stays an attribute.
    let (topic, _) = pushing(&api, &sink.url("/wrapped"), |_| {}).await;
    let ids = api.publish(&topic, [message("x").attribute("messageId", "a").attribute("data", "b")]).await;
    let json = sink.next().await.json();
    assert_eq!(json["message"]["attributes"], serde_json::json!({ "messageId": "a", "data": "b" }));
    assert_eq!(json["message"]["messageId"], ids[0].as_str());
}

/// C148
async fn endpoints_are_kept_to_the_byte_and_checked(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let sink = Sink::start().await;
        let endpoint = sink.url("/p/a%20b?token=a%2Bb&x=%E4#fragment");
        let (topic, subscription) = pushing(&api, &endpoint, |_| {}).await;
        let got = api.get_subscription(&subscription).await.unwrap().push_config.unwrap();
        assert_eq!(got.push_endpoint, endpoint);
        api.publish_texts(&topic, &["m1"]).await;
        assert_eq!(sink.next().await.target, "/p/a%20b?token=a%2Bb&x=%E4");
        for bad in ["ftp://127.0.0.1/", "nonsense", "http://", "//127.0.0.1/", "http:///path", "https//x"] {
            let config = PushConfig { push_endpoint: bad.into(), ..Default::default() };
            let request = ModifyPushConfigRequest { subscription: subscription.clone(), push_config: Some(config.clone()) };
            assert_eq!(api.fails(request).await, Code::InvalidArgument, "{bad}");
            let name = api.subscription("bad");
            let request = Subscription { name, topic: topic.clone(), push_config: Some(config), ..Default::default() };
            assert_eq!(api.fails(request).await, Code::InvalidArgument, "{bad}");
        }
        for (id, legal) in [("host", "https://host.invalid:9000/p"), ("six", "http://[::1]:9/"), ("plain", "http://host.invalid")]
        {
            let config = PushConfig { push_endpoint: legal.into(), ..Default::default() };
            api.create_subscription_with(&format!("sub-{id}"), &topic, |s| s.push_config = Some(config)).await;
        }
    }
}

/// C151
async fn a_push_subscription_can_not_be_pulled(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let sink = Sink::start().await;
        let (_, subscription) = pushing(&api, &sink.url("/"), |_| {}).await;
        assert_eq!(code(&api.call(crate::fixture::api::pull(&subscription, 1)).await), Code::FailedPrecondition);
        assert_eq!(api.refused_stream(first(&subscription)).await, Code::FailedPrecondition);
    }
}

/// One message of a key at a time, in order, whatever the answers are.
async fn pushes_of_a_key_come_one_by_one_in_order(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    sink.next_answers(&[500, 200, 200, 500, 500, 200]);
    let (topic, _) = pushing(&api, &sink.url("/"), |s| s.enable_message_ordering = true).await;
    api.publish(&topic, (0..10).map(|n| message(n.to_string()).key("k"))).await;
    let mut next = 0;
    while next < 10 {
        let got: usize = sink.next().await.text().parse().unwrap();
        // The same one again after a failure, the next one after a success.
        assert!(got == next || got + 1 == next, "{got} instead of {next}");
        next = next.max(got + 1);
    }
}

/// C149: the rate falls while the endpoint fails, and all is delivered once it is well again.
async fn a_push_backlog_survives_an_outage_of_the_endpoint(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    sink.answer_all(500);
    let (topic, _) = pushing(&api, &sink.url("/"), |_| {}).await;
    let sent: BTreeSet<_> = (0..50).map(|n| n.to_string()).collect();
    api.publish(&topic, sent.iter().map(message)).await;
    let since = Instant::now();
    let mut failed = Vec::new();
    while since.elapsed() < Duration::from_secs(5) {
        if sink.count() > 0 {
            failed.push(sink.next().await.at.duration_since(since));
        } else {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let late = failed.iter().filter(|at| **at > Duration::from_secs(3)).count();
    assert!(!failed.is_empty() && late < 100, "{late} pushes in two seconds of {} altogether", failed.len());
    sink.answer_all(200);
    let mut got = BTreeSet::new();
    let until = Instant::now() + Duration::from_secs(60);
    while got.len() < sent.len() {
        got.insert(sink.next_within(until.saturating_duration_since(Instant::now())).await.text());
    }
    assert_eq!(got, sent);
}

/// Attempts are counted and shown with a dead-letter policy, for pushes as for pulls.
async fn exhausted_pushes_become_dead_letters(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let graveyard = api.create_subscription("graveyard", &dead).await;
    let sink = Sink::start().await;
    sink.answer_all(500);
    let (topic, _) = pushing(&api, &sink.url("/"), |s| {
        s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 5 });
        s.retry_policy = Some(RetryPolicy { minimum_backoff: Some(seconds(0)), maximum_backoff: Some(seconds(0)) });
    })
    .await;
    api.publish_texts(&topic, &["m1"]).await;
    for attempt in 1..=5 {
        assert_eq!(sink.next_within(2 * SOON).await.json()["deliveryAttempt"], attempt);
    }
    assert_eq!(api.take(&graveyard).await.text(), "m1");
    assert_eq!(sink.count(), 0);
}

/// C017, with endpoints that answer.
async fn a_changed_endpoint_gets_what_follows(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (old, new) = (Sink::start().await, Sink::start().await);
        let (topic, subscription) = pushing(&api, &old.url("/"), |_| {}).await;
        api.publish_texts(&topic, &["m1"]).await;
        assert_eq!(old.next().await.text(), "m1");
        let modify = |push_config| ModifyPushConfigRequest { subscription: subscription.clone(), push_config: Some(push_config) };
        api.ok(modify(PushConfig::default())).await;
        api.publish_texts(&topic, &["m2"]).await;
        assert_eq!(api.take(&subscription).await.text(), "m2");
        api.ok(modify(PushConfig { push_endpoint: new.url("/"), ..Default::default() })).await;
        api.publish_texts(&topic, &["m3"]).await;
        assert_eq!(new.next().await.text(), "m3");
        assert_eq!(old.count(), 0);
    }
}

/// Accepts connections until a request has come on one of them as far as `until`. HTTP clients open connections ahead of
/// need, so one may stay silent.
async fn next_request(listener: &TcpListener, until: &str) -> (TcpStream, Vec<u8>) {
    let read = async |mut socket: TcpStream| {
        let mut request = Vec::new();
        while !String::from_utf8_lossy(&request).contains(until) {
            let mut part = [0; 4096];
            match socket.read(&mut part).await {
                Ok(count @ 1..) => request.extend_from_slice(&part[..count]),
                _ => return None,
            }
        }
        Some((socket, request))
    };
    let mut open = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => open.push(read(accepted.unwrap().0)),
            Some(Some(found)) = open.next() => return found,
        }
    }
}

/// C142, C152: answers of servers that are not well behaved, one a connection.
async fn odd_endpoints_are_judged_by_their_status(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let large = format!("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{}", "x".repeat(1_000_000));
    // The answer, whether the whole request is read first and not only its head, and whether it is an ack.
    let answers: [(&str, bool, bool); 9] = [
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", true, true),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", true, true),
        (&large, true, true),
        ("HTTP/1.0 204 No Content\r\n\r\n", true, true),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false, true),
        ("HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", true, true),
        ("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", true, false),
        ("", true, false),
        ("nonsense\r\n\r\n", true, false),
    ];
    for (number, (answer, read_first, ack)) in answers.into_iter().enumerate() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}/", listener.local_addr().unwrap());
        let topic = api.create_topic(&format!("topic-{number}")).await;
        let config = PushConfig { push_endpoint: endpoint, ..Default::default() };
        let set = |s: &mut Subscription| {
            s.push_config = Some(config);
            s.retry_policy = Some(RetryPolicy { minimum_backoff: Some(seconds(0)), maximum_backoff: Some(seconds(0)) });
        };
        api.create_subscription_with(&format!("sub-{number}"), &topic, set).await;
        api.publish_texts(&topic, &["m1"]).await;
        let serve = async |answer: &str, read_first: bool| {
            let (mut socket, mut request) =
                next_request(&listener, if read_first { "subscription\":" } else { "\r\n\r\n" }).await;
            let _ = socket.write_all(answer.as_bytes()).await;
            let _ = socket.shutdown().await;
            // Reads on until the peer is done, so that no reset eats the answer.
            let _ = tokio::time::timeout(Duration::from_secs(1), socket.read_to_end(&mut request)).await;
            String::from_utf8_lossy(&request).into_owned()
        };
        let ok = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        let first = crate::fixture::within(SOON, "a push", serve(answer, read_first)).await;
        assert!(first.contains("subscription"), "{number}: {first}");
        if !ack {
            crate::fixture::within(SOON, "a second push", serve(ok, true)).await;
        }
        // After an ack the next push is the next message.
        api.publish_texts(&topic, &["m2"]).await;
        let next = crate::fixture::within(SOON, "the next push", serve(ok, true)).await;
        assert!(next.contains("\"bTI=\""), "{number}: {next}");
    }
}
