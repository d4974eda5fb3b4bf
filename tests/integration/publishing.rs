//! Publish.

use std::collections::BTreeSet;

use landline::api::proto::pubsub::{PublishRequest, PublishResponse, PubsubMessage};
use prost::Message;
use serde_json::json;
use tonic::{Code, codec::CompressionEncoding};
use tonic_prost::ProstCodec;

use crate::{
    fixture::{
        Api, Backend, Fixture,
        api::{publish_request, pull},
        code, message,
        message::{Build, Received, texts},
        rest,
        rest::Answer,
    },
    for_every_backend, for_one_backend,
};

for_one_backend!(
    limits_count_bytes_and_are_inclusive,
    a_request_above_the_size_limit_gets_a_precise_answer,
    compressed_requests_and_answers_work,
    a_batch_has_one_to_a_thousand_messages,
    attributes_of_client_tracing_are_accepted,
    strings_must_be_utf8,
);
for_every_backend!(
    a_ten_megabyte_request_arrives_whole,
    one_bad_message_fails_the_batch,
    the_server_assigns_ids_and_times,
    a_key_means_nothing_without_ordering,
    each_subscription_gets_its_own_copy_from_its_creation_on,
    a_heavy_publisher_is_served,
);

async fn outcome(api: &Api, topic: &str, message: PubsubMessage) -> Code {
    code(&api.call(publish_request(topic, [message])).await)
}

/// C040
async fn limits_count_bytes_and_are_inclusive(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        let attributes = |count: usize| {
            let attributes = (0..count).map(|n| (format!("k{n}"), "v".to_owned())).collect();
            PubsubMessage { attributes, ..message("x") }
        };
        let (k256, k257, v1024, v1025) = ("k".repeat(256), "k".repeat(257), "v".repeat(1024), "v".repeat(1025));
        let pairs = [
            (attributes(100), attributes(101)),
            (message("x").attribute(&k256, ""), message("x").attribute(&k257, "")),
            (message("x").attribute("k", &v1024), message("x").attribute("k", &v1025)),
            (message("x").attribute("k", &"é".repeat(512)), message("x").attribute("k", &"é".repeat(600))),
            (message("x").key(&v1024), message("x").key(&v1025)),
            (message("x").key(&"é".repeat(512)), message("x").key(&"é".repeat(513))),
            (message("").attribute("k", ""), message("").key("only a key")),
        ];
        for (number, (legal, illegal)) in pairs.into_iter().enumerate() {
            assert_eq!(outcome(&api, &topic, illegal).await, Code::InvalidArgument, "the illegal one of pair {number}");
            assert_eq!(outcome(&api, &topic, legal.clone()).await, Code::Ok, "the legal one of pair {number}");
            let received = api.take(&subscription).await.message;
            assert_eq!(PubsubMessage { message_id: String::new(), publish_time: None, ..received }, legal, "pair {number}");
        }
        assert_eq!(outcome(&api, &api.topic("none"), message("x")).await, Code::NotFound);
    }
}

/// A request of exactly this many encoded bytes.
fn request_of(topic: &str, bytes: usize) -> PublishRequest {
    let mut data = bytes - 100;
    loop {
        let request = publish_request(topic, [message(vec![b'x'; data])]);
        match request.encoded_len() {
            length if length == bytes => return request,
            length => data = data + bytes - length,
        }
    }
}

/// C041
async fn a_ten_megabyte_request_arrives_whole(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.ok(request_of(&topic, 10_000_000)).await;
    let received = api.take(&subscription).await;
    assert!(received.message.data.len() > 9_999_000 && received.message.data.iter().all(|b| *b == b'x'));
    api.publish(&topic, (0..4).map(|n| message(vec![b'0' + n; 2 << 20]))).await;
    let mut stream = api.stream(&subscription).await;
    let received = stream.messages(4).await;
    assert_eq!(received.iter().map(|r| r.message.data[0]).collect::<BTreeSet<_>>(), BTreeSet::from([b'0', b'1', b'2', b'3']));
    assert!(received.iter().all(|r| r.message.data.len() == 2 << 20));

    let rest = fixture.api_over(crate::fixture::Transport::Rest).await;
    let (topic, subscription) = rest.pair().await;
    rest.publish(&topic, [message(vec![b'y'; 7_500_000])]).await;
    assert_eq!(rest.take(&subscription).await.message.data.len(), 7_500_000);
}

/// C041
async fn a_request_above_the_size_limit_gets_a_precise_answer(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    for bytes in [10_000_001, 10_485_760, 10_485_761, 12_000_000, 30_000_000] {
        let failure = api.failure(request_of(&topic, bytes)).await;
        assert_eq!(failure.code, Code::InvalidArgument, "{bytes}: {failure:?}");
    }
    let path = format!("/v1/{topic}:publish");
    for bytes in [10_485_761, 30_000_000] {
        let frame = json!({ "messages": [{ "data": "" }] }).to_string().len();
        let data = "A".repeat((bytes - frame) / 4 * 4 + 4);
        let answer = rest::json(api.address(), "POST", &path, json!({ "messages": [{ "data": data }] })).await;
        assert_eq!((answer.status.as_u16(), answer.error_status().as_str()), (400, "INVALID_ARGUMENT"), "{bytes}");
        let json = answer.json();
        assert!(json["error"]["message"].as_str().unwrap().contains("10485760"), "{json}");
    }
    // Nothing of it was stored, and the connection still serves.
    api.assert_drained(&topic, &subscription).await;
}

/// C041
async fn a_batch_has_one_to_a_thousand_messages(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        assert_eq!(api.fails(publish_request(&topic, [])).await, Code::InvalidArgument);
        let many = |count: usize| publish_request(&topic, (0..count).map(|n| message(n.to_string())));
        assert_eq!(api.fails(many(1001)).await, Code::InvalidArgument);
        let ids = api.ok(many(1000)).await.message_ids;
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 1000);
        let received = api.pull(&subscription, 1000).await;
        // The answer names the ids in the order of the request.
        for r in &received {
            assert_eq!(r.id(), ids[r.text().parse::<usize>().unwrap()]);
        }
    }
}

/// C043
async fn compressed_requests_and_answers_work(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let text = "compress me ".repeat(10_000);
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let mut grpc = tonic::client::Grpc::new(api.channel()).send_compressed(encoding).accept_compressed(encoding);
        grpc.ready().await.unwrap();
        let request = tonic::Request::new(publish_request(&topic, [message(&text)]));
        let path = http::uri::PathAndQuery::from_static("/google.pubsub.v1.Publisher/Publish");
        let answer = grpc.unary(request, path, ProstCodec::<PublishRequest, PublishResponse>::default()).await.unwrap();
        let accepted = answer.metadata().get("grpc-accept-encoding").map(|v| v.to_str().unwrap().to_owned());
        assert!(accepted.as_ref().is_some_and(|a| a.split(',').any(|e| e.trim() == "gzip")), "{accepted:?}");

        let mut grpc = tonic::client::Grpc::new(api.channel()).accept_compressed(encoding);
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/google.pubsub.v1.Subscriber/Pull");
        let answer = grpc.unary(tonic::Request::new(pull(&subscription, 1)), path, ProstCodec::default()).await.unwrap();
        let answer: landline::api::proto::pubsub::PullResponse = answer.into_inner();
        let received: Vec<_> = answer.received_messages.into_iter().map(Received::decode).collect();
        assert_eq!(texts(&received), [text.as_str()]);
        api.ack(&subscription, &received).await;
    }
}

/// C044
async fn one_bad_message_fails_the_batch(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        let batch = [message("first"), PubsubMessage::default(), message("third")];
        assert_eq!(api.fails(publish_request(&topic, batch)).await, Code::InvalidArgument);
        api.assert_drained(&topic, &subscription).await;
    }
}

/// C046
async fn the_server_assigns_ids_and_times(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        let old = prost_types::Timestamp { seconds: 978_307_200, nanos: 0 };
        let forged = |n: usize| PubsubMessage { message_id: "abc".into(), publish_time: Some(old), ..message(n.to_string()) };
        let before = crate::fixture::timestamp(-2).seconds;
        let ids = api.publish(&topic, (0..3).map(forged)).await;
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 3);
        for received in api.pull(&subscription, 3).await {
            assert_eq!(received.id(), ids[received.text().parse::<usize>().unwrap()]);
            let time = received.message.publish_time.unwrap().seconds;
            assert!((before..before + 60).contains(&time), "publish time {time}, expected from {before} on");
        }
    }
}

/// C047
async fn attributes_of_client_tracing_are_accepted(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        let traced = message("x").attribute("googclient_traceparent", "00-1");
        api.publish(&topic, [traced.clone()]).await;
        assert_eq!(api.take(&subscription).await.message.attributes, traced.attributes);
        for key in ["goog-foo", "goog", "googlike", ""] {
            assert_eq!(outcome(&api, &topic, message("x").attribute(key, "x")).await, Code::InvalidArgument, "{key:?}");
        }
        // Only the beginning is reserved.
        assert_eq!(outcome(&api, &topic, message("x").attribute("xgoog", "x")).await, Code::Ok);
    }
}

/// C049
async fn a_key_means_nothing_without_ordering(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair().await;
        api.publish(&topic, ["m1", "m2"].map(|m| message(m).key("k"))).await;
        let first = api.pull(&subscription, 1).await;
        let second = api.pull(&subscription, 1).await;
        assert_ne!(first[0].text(), second[0].text());
        assert_eq!((first[0].message.ordering_key.as_str(), second[0].message.ordering_key.as_str()), ("k", "k"));
    }
}

/// C050
async fn each_subscription_gets_its_own_copy_from_its_creation_on(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        api.publish_texts(&topic, &["m0"]).await;
        let first = api.create_subscription("sub1", &topic).await;
        let second = api.create_subscription("sub2", &topic).await;
        let ids = api.publish_texts(&topic, &["m1"]).await;
        for subscription in [&first, &second] {
            let received = api.take(subscription).await;
            assert_eq!((received.text(), received.id()), ("m1", ids[0].as_str()));
            assert!(api.pull_now(subscription, 10).await.is_empty());
        }
    }
}

/// Bytes that are no UTF-8 are refused as such, in attributes and keys; data may hold any bytes.
async fn strings_must_be_utf8(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    // Field 5 (ordering_key) and field 2 (attributes) with the byte 0xff, then bytes that are no message at all.
    let encodings: [&[u8]; 4] =
        [&[0x0a, 1, b'x', 0x2a, 1, 0xff], &[0x12, 6, 0x0a, 1, b'k', 0x12, 1, 0xff], &[0x0a, 5, 1], &[0xff]];
    for encoding in encodings {
        let request = PublishRequest { topic: topic.clone(), messages: vec![encoding.to_vec().into()] };
        assert_eq!(api.fails(request).await, Code::InvalidArgument, "{encoding:?}");
    }
    let all: Vec<u8> = (0..=255).collect();
    api.publish(&topic, [message(&all)]).await;
    assert_eq!(api.take(&subscription).await.message.data, all);
    let body = json!({ "messages": [{ "data": "//79+w==" }, { "data": "__79-w" }, { "data": "%%" }] });
    let answer: Answer = rest::json(api.address(), "POST", &format!("/v1/{topic}:publish"), body).await;
    assert_eq!(answer.error_status(), "INVALID_ARGUMENT");
    let body = json!({ "messages": [{ "data": "//79+w==" }, { "data": "__79-w" }] });
    rest::json(api.address(), "POST", &format!("/v1/{topic}:publish"), body).await.success();
    for received in api.pull(&subscription, 2).await {
        assert_eq!(&received.message.data[..], [0xff, 0xfe, 0xfd, 0xfb], "standard and URL-safe base64 mean the same");
    }
}

/// C172
async fn a_heavy_publisher_is_served(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let requests = (0..100).map(|_| publish_request(&topic, [message(vec![b'x'; 500_000])]));
    let answers = futures::future::join_all(requests.map(|request| api.call(request))).await;
    let ids: BTreeSet<_> = answers.into_iter().flat_map(|a| a.unwrap().message_ids).collect();
    assert_eq!(ids.len(), 100);
    let mut stream = api.stream(&subscription).await;
    let received: BTreeSet<_> = stream.messages(100).await.iter().map(|r| r.id().to_owned()).collect();
    assert_eq!(received, ids);
}
