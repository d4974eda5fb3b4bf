//! Forms of requests and answers: enums, layout, compression, other verbs.

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::fixture::{Fixture, gunzip, gzip};

#[tokio::test]
async fn enums_are_numbers_in_answers_when_asked_for() {
    let fixture = Fixture::new();
    for query in ["$alt=json%3Benum-encoding%3Dint", "%24alt=json%3Benum-encoding%3Dint", "$alt=json;enum-encoding=int"] {
        let body = json!({"schemaSettings": {"encoding": 2}});
        let answer = fixture.send(Method::PUT, &format!("/v1/projects/p/topics/t?{query}"), body).await;
        assert_eq!(answer.json()["state"], 1, "{query}");
        assert_eq!(answer.json()["schemaSettings"]["encoding"], 2);
    }
    let answer = fixture.send(Method::PUT, "/v1/projects/p/topics/t?alt=json", json!({"schemaSettings": {"encoding": 2}})).await;
    assert_eq!(answer.json()["schemaSettings"]["encoding"], "BINARY");
}

#[tokio::test]
async fn answers_are_laid_out_for_people_unless_asked_otherwise() {
    let fixture = Fixture::new();
    let lines = async |query: &str| {
        let answer = fixture.send(Method::GET, &format!("/v1/projects/p/topics/t{query}"), ()).await;
        answer.body.iter().filter(|byte| **byte == b'\n').count()
    };
    assert_eq!([lines("?prettyPrint=false").await, lines("?pp=0").await], [0, 0]);
    assert!(lines("").await > 1 && lines("?prettyPrint=true").await > 1);
    let error = fixture.send(Method::GET, "/v1/projects/p/topics/missing", ()).await;
    assert!(error.body.ends_with(b"}\n"));
    let error = fixture.send(Method::GET, "/v1/projects/p/topics/missing?prettyPrint=false", ()).await;
    assert!(!error.body.contains(&b'\n'));
}

#[tokio::test]
async fn an_answer_holds_the_fields_that_are_asked_for() {
    let fixture = Fixture::new();
    let path = "/v1/projects/p/topics/t";
    let answer =
        fixture.send(Method::PUT, &format!("{path}?fields=name,labels/a"), json!({"labels": {"a": "1", "b": "2"}})).await;
    assert_eq!(answer.json(), json!({"name": "projects/p/topics/t", "labels": {"a": "1"}}));
    let (code, status, text) = fixture.send(Method::GET, &format!("{path}?fields=name("), ()).await.error();
    assert_eq!((code, status), (400, "INVALID_ARGUMENT"));
    assert!(text.contains("field selection"), "{text}");
}

#[tokio::test]
async fn the_api_s_system_parameters_are_accepted_everywhere() {
    let fixture = Fixture::new();
    let all = "alt=json&prettyPrint=false&key=abc&fields=name&quotaUser=x&$.xgafv=1&access_token=t&upload_protocol=raw&callback=";
    for (verb, path) in [(Method::GET, "t"), (Method::PUT, "t"), (Method::DELETE, "t"), (Method::POST, "t:publish")] {
        let answer = fixture.send(verb, &format!("/v1/projects/p/topics/{path}?{all}"), ()).await;
        assert_eq!(answer.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn compressed_bodies_are_read() {
    let fixture = Fixture::new();
    let plain = json!({"messages": [{"data": "aGk="}]}).to_string();
    for encoding in ["gzip", "x-gzip"] {
        let headers = [("content-encoding", encoding)];
        let answer = fixture.send_with(headers, Method::POST, "/v1/projects/p/topics/t:publish", gzip(plain.as_bytes())).await;
        assert_eq!(answer.json(), json!({"messageIds": ["1"]}));
    }
    let answer = fixture.send_with([("content-encoding", "br")], Method::POST, "/v1/projects/p/topics/t:publish", plain).await;
    assert_eq!(answer.error().0, 400);
}

#[tokio::test]
async fn the_size_limit_counts_decoded_bytes() {
    let fixture = Fixture::new();
    let large = " ".repeat(10_485_760 - 2) + "{}";
    let path = "/v1/projects/p/topics/t";
    assert_eq!(fixture.send(Method::PUT, path, large.clone()).await.status, StatusCode::OK);
    let gzipped = gzip(large.as_bytes());
    assert_eq!(fixture.send_with([("content-encoding", "gzip")], Method::PUT, path, gzipped).await.status, StatusCode::OK);

    let larger = large + " ";
    let expected = (400, "INVALID_ARGUMENT", "Request payload size exceeds the limit: 10485760 bytes.".to_owned());
    assert_eq!(fixture.send(Method::PUT, path, larger.clone()).await.error(), expected);
    let gzipped = gzip(larger.as_bytes());
    assert_eq!(fixture.send_with([("content-encoding", "gzip")], Method::PUT, path, gzipped).await.error(), expected);
}

#[tokio::test]
async fn large_answers_are_compressed_when_the_caller_takes_it() {
    let fixture = Fixture::new();
    let labels: serde_json::Map<String, Value> = (0..64).map(|n| (format!("label-{n}"), json!("x".repeat(63)))).collect();
    let body = json!({ "labels": labels });
    let path = "/v1/projects/p/topics/t";
    let plain = fixture.send(Method::PUT, path, body.clone()).await;
    assert_eq!(plain.header("content-encoding"), "");

    let packed = fixture.send_with([("accept-encoding", "gzip, deflate")], Method::PUT, path, body).await;
    assert_eq!(packed.header("content-encoding"), "gzip");
    assert!(packed.body.len() < plain.body.len());
    assert_eq!(serde_json::from_slice::<Value>(&gunzip(&packed.body)).unwrap(), plain.json());

    let small = fixture.send_with([("accept-encoding", "gzip")], Method::GET, path, ()).await;
    assert_eq!(small.header("content-encoding"), "");
}

#[tokio::test]
async fn a_post_may_stand_for_another_verb() {
    let fixture = Fixture::new();
    let path = "/v1/projects/p/topics/t";
    let patch = [("x-http-method-override", "PATCH")];
    let answer = fixture.send_with(patch, Method::POST, path, json!({"topic": {}, "updateMask": "labels"})).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(fixture.mask(), ["labels"]);

    let get = [("x-http-method-override", "GET"), ("content-type", "application/x-www-form-urlencoded")];
    let answer = fixture.send_with(get, Method::POST, "/v1/projects/p/topics", "pageSize=2&pageToken=x").await;
    assert_eq!(answer.json(), json!({"nextPageToken": "projects/p 2 x"}));

    // Only a POST does: a link must not delete.
    let delete = [("x-http-method-override", "DELETE")];
    assert_eq!(fixture.send_with(delete, Method::GET, path, ()).await.json()["state"], "ACTIVE");
}
