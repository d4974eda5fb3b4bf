//! The JSON form of the API.

use std::io::{Read, Write};

use http::StatusCode;
use serde_json::{Value, json};

use crate::{
    fixture::{
        Backend, Fixture, Transport,
        rest::{self, Answer, get, send},
    },
    for_one_backend,
};

for_one_backend!(
    fields_have_two_spellings_in_and_one_out,
    unknown_fields_and_broken_json_are_refused,
    system_parameters_are_accepted,
    compressed_and_chunked_bodies_are_read,
    query_fields_work_in_both_spellings,
    a_tool_can_probe_a_topic,
    keep_alive_connections_serve_many_requests,
    answers_are_json_with_a_content_type,
    pages_of_listed_origins_may_call_and_no_others,
);

async fn put(address: std::net::SocketAddr, path: &str, body: &str) -> Answer {
    send(address, "PUT", path, &[("content-type", "application/json")], body.to_owned()).await
}

/// C154
async fn fields_have_two_spellings_in_and_one_out(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    let topic = api.create_topic("orders").await;
    let bodies = [
        json!({ "topic": topic, "ack_deadline_seconds": 20, "push_config": {}, "enable_message_ordering": true }),
        json!({ "topic": topic, "ackDeadlineSeconds": 20, "pushConfig": {}, "enableMessageOrdering": true }),
        json!({ "topic": topic, "ackDeadlineSeconds": "20", "pushConfig": null, "enableMessageOrdering": true, "filter": null,
                "labels": null, "retryPolicy": null, "expirationPolicy": null, "deadLetterPolicy": null }),
    ];
    for (number, body) in bodies.into_iter().enumerate() {
        let path = format!("/v1/{}", api.subscription(&format!("sub{number}")));
        let answer = put(api.address(), &path, &body.to_string()).await.success();
        assert_eq!(answer["ackDeadlineSeconds"], 20, "{body}");
        assert_eq!(answer["enableMessageOrdering"], true, "{body}");
        assert_eq!(answer["pushConfig"], json!({}), "{body}");
        assert_eq!(answer["messageRetentionDuration"], "604800s");
        assert_eq!(answer["expirationPolicy"], json!({ "ttl": "2678400s" }));
        assert_eq!(answer["state"], "ACTIVE");
        let keys: Vec<_> = answer.as_object().unwrap().keys().collect();
        assert!(keys.iter().all(|k| !k.contains('_')), "{keys:?}");
        for absent in ["filter", "labels", "retryPolicy", "deadLetterPolicy", "detached"] {
            assert_eq!(answer.get(absent), None, "{absent} of {body}");
        }
    }
    let body = json!({ "messages": [{ "data": "eA==", "attributes": null, "orderingKey": null }] });
    let answer = rest::json(api.address(), "POST", &format!("/v1/{topic}:publish"), body).await.success();
    assert_eq!(answer["messageIds"].as_array().unwrap().len(), 1);
    let path = format!("/v1/{}:pull", api.subscription("sub0"));
    let received = &rest::json(api.address(), "POST", &path, json!({ "maxMessages": 1 })).await.success()["receivedMessages"][0];
    let message = &received["message"];
    assert_eq!(message["data"], "eA==");
    assert!(message["messageId"].is_string() && message["publishTime"].as_str().unwrap().ends_with('Z'), "{message}");
    assert_eq!((message.get("attributes"), message.get("orderingKey"), received.get("deliveryAttempt")), (None, None, None));
}

/// C155
async fn unknown_fields_and_broken_json_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    let topic = api.create_topic("orders").await;
    let path = format!("/v1/{}", api.subscription("billing"));
    let broken = [
        "{\"topik\":\"x\"}",
        "[]",
        "{",
        "\"text\"",
        "{\"topic\":5}",
        "{\"topic\":[]}",
        "{\"ackDeadlineSeconds\":\"ten\"}",
        "{\"ackDeadlineSeconds\":1.5}",
        "{\"ackDeadlineSeconds\":99999999999}",
        "{} {}",
        "nonsense",
    ];
    for body in broken {
        let answer = put(api.address(), &path, body).await;
        assert_eq!((answer.status, answer.error_status().as_str()), (StatusCode::BAD_REQUEST, "INVALID_ARGUMENT"), "{body}");
    }
    let answer = put(api.address(), &path, "{\"noSuchField\":1}").await.json();
    assert!(answer["error"]["message"].as_str().unwrap().contains("noSuchField"), "{answer}");
    let binary = send(api.address(), "PUT", &path, &[], vec![0xff, 0xfe]).await;
    assert_eq!(binary.status, StatusCode::BAD_REQUEST);

    // An empty body means an empty message, and the content type is not looked at.
    for (id, headers) in [
        ("topic-1", &[][..]),
        ("topic-2", &[("content-type", "text/plain")]),
        ("topic-3", &[("content-type", "application/json; charset=utf-8")]),
    ] {
        let name = api.topic(id);
        assert_eq!(send(api.address(), "PUT", &format!("/v1/{name}"), headers, "").await.success()["name"], name);
        let body = json!({ "topic": topic }).to_string();
        assert_eq!(send(api.address(), "PUT", &format!("{path}-{id}"), headers, body).await.status, 200);
    }
}

/// C157
async fn system_parameters_are_accepted(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    let (topic, subscription) = api.pair().await;
    let parameters = [
        "alt=json",
        "$alt=json",
        "%24alt=json",
        "prettyPrint=false",
        "key=abc",
        "quotaUser=x",
        "$.xgafv=1",
        "$.xgafv=2",
        "access_token=x",
        "uploadType=media",
        "callback=",
        "alt=json&prettyPrint=true&key=x",
    ];
    for parameter in parameters {
        let answer = get(api.address(), &format!("/v1/{subscription}?{parameter}")).await;
        assert_eq!(answer.status, 200, "{parameter}: {:?}", answer.body);
        assert_eq!(answer.json()["state"], "ACTIVE", "{parameter}");
    }
    for parameter in ["$alt=json;enum-encoding=int", "$alt=json%3Benum-encoding%3Dint", "%24alt=json%3Benum-encoding%3Dint"] {
        let answer = get(api.address(), &format!("/v1/{subscription}?{parameter}")).await;
        assert_eq!(answer.status, 200, "{parameter}: {:?}", answer.body);
        assert_eq!(answer.json()["state"], 1, "{parameter}");
    }
    // `fields` may narrow the answer or be ignored; the call works.
    let answer = get(api.address(), &format!("/v1/{topic}?fields=name")).await;
    assert_eq!(answer.success()["name"], topic);
    // On calls with a body too.
    let path = format!("/v1/{topic}:publish?$alt=json;enum-encoding=int&alt=json&key=x");
    rest::json(api.address(), "POST", &path, json!({ "messages": [{ "data": "eA==" }] })).await.success();
}

fn gzip(text: &str) -> Vec<u8> {
    // A stored block is valid deflate: no compressor is needed for a short text.
    let bytes = text.as_bytes();
    let length = u16::try_from(bytes.len()).unwrap();
    let mut out = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff, 1];
    out.extend(length.to_le_bytes());
    out.extend((!length).to_le_bytes());
    out.extend(bytes);
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    out.extend((!crc).to_le_bytes());
    out.extend((bytes.len() as u32).to_le_bytes());
    out
}

/// Sends raw bytes and answers what comes back until the peer closes.
fn raw(address: std::net::SocketAddr, parts: &[&[u8]]) -> String {
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_secs(15))).unwrap();
    for part in parts {
        socket.write_all(part).unwrap();
    }
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// C158
async fn compressed_and_chunked_bodies_are_read(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    let (topic, subscription) = api.pair().await;
    let path = format!("/v1/{topic}:publish");
    let body = |data: &str| json!({ "messages": [{ "data": data }] }).to_string();
    let headers = [("content-type", "application/json"), ("content-encoding", "gzip"), ("accept-encoding", "gzip")];
    let answer = send(api.address(), "POST", &path, &headers, gzip(&body("Z3ppcA=="))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    if answer.headers.get("content-encoding").is_none() {
        answer.success();
    }
    assert_eq!(api.take(&subscription).await.text(), "gzip");
    let answer = send(api.address(), "POST", &path, &headers, "not gzip").await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);

    let address = api.address();
    let head = |rest: &str| {
        format!("POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n{rest}\r\n\r\n")
    };
    let (first, second) = (body("Y2h1bms="), head("Transfer-Encoding: chunked"));
    let (left, right) = first.split_at(10);
    let chunks = format!("{:x}\r\n{left}\r\n{:x}\r\n{right}\r\n0\r\n\r\n", left.len(), right.len());
    let answer = raw(address, &[second.as_bytes(), chunks.as_bytes()]);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(api.take(&subscription).await.text(), "chunk");

    let large = body(&"QUFB".repeat(500_000));
    let head = head(&format!("Content-Length: {}\r\nExpect: 100-continue", large.len()));
    let answer = raw(address, &[head.as_bytes(), large.as_bytes()]);
    let last = answer.split("\r\n\r\n").find(|part| !part.starts_with("HTTP/1.1 100")).unwrap();
    assert!(last.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(api.take(&subscription).await.message.data.len(), 1_500_000);
}

/// C160
async fn query_fields_work_in_both_spellings(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    for id in ["topic-1", "topic-2", "topic-3"] {
        api.create_topic(id).await;
    }
    let path = |query: &str| format!("/v1/{}/topics?{query}", api.parent());
    let count = |answer: Value| answer["topics"].as_array().map_or(0, Vec::len);
    for (query, expected) in [("pageSize=2", 2), ("page_size=2", 2), ("pageSize=0", 3), ("pageSize=2&pageToken=", 2), ("", 3)] {
        assert_eq!(count(get(api.address(), &path(query)).await.success()), expected, "{query}");
    }
    let token = get(api.address(), &path("pageSize=2")).await.success()["nextPageToken"].as_str().unwrap().to_owned();
    for name in ["pageToken", "page_token"] {
        let query = format!("pageSize=2&{name}={}", rest::escape(&token));
        assert_eq!(count(get(api.address(), &path(&query)).await.success()), 1);
    }
    for query in ["pageSize=abc", "pageSize=1.5", "pageSize=99999999999", "noSuchField=1"] {
        assert_eq!(get(api.address(), &path(query)).await.error_status(), "INVALID_ARGUMENT", "{query}");
    }
}

/// C164
async fn a_tool_can_probe_a_topic(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    let path = format!("/v1/{}", api.topic("orders"));
    assert_eq!(get(api.address(), &path).await.error_status(), "NOT_FOUND");
    let body = json!({ "messages": [{ "data": "eA==" }] });
    let publish = format!("{path}:publish");
    assert_eq!(rest::json(api.address(), "POST", &publish, body.clone()).await.status, 404);
    rest::json(api.address(), "PUT", &path, json!({})).await.success();
    assert_eq!(get(api.address(), &path).await.success()["name"], api.topic("orders"));
    rest::json(api.address(), "POST", &publish, body).await.success();
    assert_eq!(rest::json(api.address(), "PUT", &path, json!({})).await.error_status(), "ALREADY_EXISTS");
}

/// One connection, many requests, also after errors and with bodies that nobody asked for.
async fn keep_alive_connections_serve_many_requests(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    let topic = api.create_topic("orders").await;
    let request = |verb: &str, path: &str, body: &str, close: bool| {
        let connection = if close { "close" } else { "keep-alive" };
        let length = body.len();
        format!("{verb} {path} HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nContent-Length: {length}\r\n\r\n{body}")
    };
    // Pipelined: all of them are on the wire before the first answer.
    let wire = [
        request("GET", &format!("/v1/{topic}"), "", false),
        request("GET", "/v1/projects/p1/topics/none", "", false),
        request("PUT", &format!("/v1/{topic}"), "{", false),
        request("GET", &format!("/v1/{topic}"), "{}", false),
        request("DELETE", &format!("/v1/{topic}"), "", true),
    ]
    .concat();
    let answer = raw(api.address(), &[wire.as_bytes()]);
    let codes: Vec<_> = answer.match_indices("HTTP/1.1 ").map(|(at, _)| answer[at + 9..at + 12].to_owned()).collect();
    assert_eq!(codes, ["200", "404", "400", "200", "200"], "{answer}");
}

/// Clients choose their parser by the content type.
async fn answers_are_json_with_a_content_type(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api_over(Transport::Rest).await;
    let topic = api.create_topic("orders").await;
    for (path, status) in [(format!("/v1/{topic}"), 200), ("/v1/projects/p1/topics/none".into(), 404), ("/v1/x".into(), 404)] {
        let answer = get(api.address(), &path).await;
        assert_eq!(answer.status, status);
        let kind = answer.headers["content-type"].to_str().unwrap();
        assert!(kind.starts_with("application/json"), "{path}: {kind}");
        answer.json();
    }
    let deleted = send(api.address(), "DELETE", &format!("/v1/{topic}"), &[], "").await;
    assert_eq!(deleted.success(), json!({}));
}

async fn pages_of_listed_origins_may_call_and_no_others(backend: Backend) {
    let allowed = |answer: &Answer| answer.headers.get("access-control-allow-origin").map(|v| v.to_str().unwrap().to_owned());
    let path = "/v1/projects/p1/topics";
    let page = |origin| {
        [("origin", origin), ("access-control-request-method", "PUT"), ("access-control-request-headers", "authorization")]
    };

    let fixture = Fixture::start_with(backend, &[("CORS_ORIGINS", "https://App.example.com, http://localhost:3000")]).await;
    let address = fixture.api_over(Transport::Rest).await.address();
    for (origin, known) in [("https://app.example.com", true), ("http://localhost:3000", true), ("https://other.example", false)]
    {
        let expected = known.then(|| origin.to_owned());
        let asked = send(address, "OPTIONS", path, &page(origin), "").await;
        assert_eq!((asked.status, allowed(&asked)), (StatusCode::OK, expected.clone()));
        assert!(asked.headers["access-control-allow-methods"].to_str().unwrap().contains("PUT"));
        assert_eq!(asked.headers["access-control-allow-headers"], "authorization");
        // Errors can be read as well as answers.
        for (path, status) in [(path, 200), ("/v1/projects/p1/topics/none", 404)] {
            let answer = send(address, "GET", path, &[("origin", origin)], "").await;
            assert_eq!((answer.status.as_u16(), allowed(&answer)), (status, expected.clone()), "{path}");
        }
    }

    let fixture = Fixture::start(backend).await;
    let address = fixture.api_over(Transport::Rest).await.address();
    let answer = send(address, "GET", path, &[("origin", "https://app.example.com")], "").await;
    assert_eq!((answer.status.as_u16(), allowed(&answer)), (200, None));
    assert_eq!(send(address, "OPTIONS", path, &page("https://app.example.com"), "").await.status, StatusCode::NOT_FOUND);
}
