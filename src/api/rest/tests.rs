//! The transcoder over a small Publisher that shows what reaches it.

mod fixture;
mod forms;
mod wire;

use http::{Method, StatusCode};
use serde_json::json;

use self::fixture::{Fixture, Sent};

#[tokio::test]
async fn a_put_creates_what_the_path_names() {
    let fixture = Fixture::new();
    let body = json!({"name": "projects/p/topics/t", "labels": {"a": "b"}});
    let answer = fixture.send(Method::PUT, "/v1/projects/p/topics/t", body).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.header("content-type"), "application/json; charset=UTF-8");
    assert_eq!(answer.json(), json!({"name": "projects/p/topics/t", "labels": {"a": "b"}, "state": "ACTIVE"}));
}

#[tokio::test]
async fn the_name_in_the_path_wins_over_the_body_and_the_query() {
    let fixture = Fixture::new();
    let uri = "/v1/projects/p/topics/t?name=projects/p/topics/query";
    let answer = fixture.send(Method::PUT, uri, json!({"name": "projects/p/topics/other"})).await;
    assert_eq!(answer.json()["name"], "projects/p/topics/t");
    let patch = json!({"topic": {"name": "projects/p/topics/other"}, "updateMask": "labels"});
    let answer = fixture.send(Method::PATCH, "/v1/projects/p/topics/t", patch).await;
    assert_eq!(answer.json()["name"], "projects/p/topics/t");
}

#[tokio::test]
async fn awkward_ids_are_decoded_once() {
    let fixture = Fixture::new();
    for (path, id) in [("a%25b", "a%b"), ("x+y~z.w", "x+y~z.w"), ("a%2Bb", "a+b"), ("p%2525", "p%25")] {
        let answer = fixture.send(Method::GET, &format!("/v1/projects/p/topics/{path}"), ()).await;
        assert_eq!(answer.json()["name"], format!("projects/p/topics/{id}"));
    }
}

#[tokio::test]
async fn published_messages_reach_the_service_as_they_would_over_grpc() {
    let fixture = Fixture::new();
    let body = json!({"messages": [
        {"data": "aGk=", "attributes": {"k": "v"}, "orderingKey": "o"},
        {"data": "_-8", "ordering_key": "p"},
    ]});
    let answer = fixture.send(Method::POST, "/v1/projects/p/topics/t:publish", body).await;
    assert_eq!(answer.json(), json!({"messageIds": ["1", "2"]}));
    let messages = fixture.published();
    assert_eq!(
        (&messages[0].data[..], &messages[0].attributes["k"], &messages[0].ordering_key[..]),
        (&b"hi"[..], &"v".into(), "o")
    );
    assert_eq!((&messages[1].data[..], &messages[1].ordering_key[..]), (&[0xff, 0xef][..], "p"));
}

#[tokio::test]
async fn masks_are_taken_in_both_spellings_from_body_and_query() {
    let fixture = Fixture::new();
    let topic = json!({"kmsKeyName": "k", "labels": {"a": "b"}});
    for (query, body) in [
        ("", json!({"topic": topic, "updateMask": "kmsKeyName,labels"})),
        ("", json!({"topic": topic, "update_mask": "kms_key_name,labels"})),
        ("?updateMask=kmsKeyName%2Clabels", json!({"topic": topic, "updateMask": "kms_key_name,labels"})),
        ("?updateMask=kmsKeyName%2Clabels", json!({"topic": topic})),
        ("?update_mask=kms_key_name,labels", json!({"topic": topic})),
    ] {
        let answer = fixture.send(Method::PATCH, &format!("/v1/projects/p/topics/t{query}"), body).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(fixture.mask(), ["kms_key_name", "labels"]);
    }
}

#[tokio::test]
async fn query_fields_reach_the_service() {
    let fixture = Fixture::new();
    for query in ["pageSize=2&pageToken=x%2By", "page_size=2&page_token=x%2By", "pageSize=2&pageToken=x%2By&alt=json&key=k"] {
        let answer = fixture.send(Method::GET, &format!("/v1/projects/p/topics?{query}"), ()).await;
        assert_eq!(answer.json(), json!({"nextPageToken": "projects/p 2 x+y"}));
    }
    let answer = fixture.send(Method::GET, "/v1/projects/p/topics?pageSize=abc", ()).await;
    assert_eq!(answer.error(), (400, "INVALID_ARGUMENT", "Invalid value at 'page_size' (TYPE_INT32), \"abc\"".to_owned()));
}

#[tokio::test]
async fn an_empty_answer_is_an_empty_object() {
    let fixture = Fixture::new();
    let answer = fixture.send(Method::GET, "/v1/projects/empty/topics", ()).await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"{}\n"[..]));
    let answer = fixture.send(Method::DELETE, "/v1/projects/p/topics/t", ()).await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"{}\n"[..]));
    assert_eq!(answer.header("content-type"), "application/json; charset=UTF-8");
}

#[tokio::test]
async fn methods_without_a_body_may_be_sent_an_empty_object() {
    let fixture = Fixture::new();
    for body in ["", "{}", " {} \n"] {
        let detached = fixture.send(Method::POST, "/v1/projects/p/subscriptions/s:detach", body).await;
        assert_eq!((detached.status, detached.json()), (StatusCode::OK, json!({})));
        assert_eq!(fixture.send(Method::DELETE, "/v1/projects/p/topics/t", body).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn the_content_type_does_not_matter() {
    let fixture = Fixture::new();
    for content_type in [None, Some("text/plain"), Some("application/octet-stream"), Some("application/json; charset=latin-1")] {
        let headers = content_type.map(|value| ("content-type", value));
        let answer = fixture.send_with(headers, Method::PUT, "/v1/projects/p/topics/t", "{\"labels\":{}}").await;
        assert_eq!(answer.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn an_unknown_field_is_refused_with_details() {
    let fixture = Fixture::new();
    let answer = fixture.send(Method::PUT, "/v1/projects/p/topics/t", json!({"topik": "x"})).await;
    let text = "Invalid JSON payload received. Unknown name \"topik\": Cannot find field.";
    assert_eq!(answer.error(), (400, "INVALID_ARGUMENT", text.to_owned()));
    assert_eq!(
        answer.json()["error"]["details"],
        json!([{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [{"description": text}]}])
    );
    assert_eq!(fixture.calls(), 0);
}

#[tokio::test]
async fn malformed_json_is_refused() {
    let fixture = Fixture::new();
    for body in ["[]", "{", "\"x\"", "nope"] {
        let answer = fixture.send(Method::PUT, "/v1/projects/p/topics/t", body).await;
        let (code, status, message) = answer.error();
        assert_eq!((code, status), (400, "INVALID_ARGUMENT"));
        assert!(message.starts_with("Invalid JSON payload received. "), "{message}");
    }
    assert_eq!(fixture.calls(), 0);
}

#[tokio::test]
async fn paths_and_verbs_that_are_not_part_of_the_api_are_not_found() {
    let fixture = Fixture::new();
    for (verb, path) in [
        (Method::GET, "/v1/projects/p/nothing"),
        (Method::GET, "/v2/projects/p/topics"),
        (Method::POST, "/v1/projects/p/topics/t"),
        (Method::POST, "/v1/projects/p/topics/t:shout"),
        (Method::PUT, "/v1/projects/p/topics/"),
        (Method::POST, "/"),
        (Method::OPTIONS, "/v1/projects/p/topics"),
        (Method::POST, "/google.pubsub.v1.Publisher/GetTopic"),
    ] {
        let answer = fixture.send(verb.clone(), path, ()).await;
        let (code, status, message) = answer.error();
        assert_eq!((code, status), (404, "NOT_FOUND"), "{verb} {path}");
        assert!(message.starts_with("Method not found: "), "{message}");
    }
}

#[tokio::test]
async fn a_method_that_no_service_has_is_not_implemented() {
    let answer = Fixture::new().send(Method::GET, "/v1/projects/p/subscriptions", ()).await;
    let (code, status, _) = answer.error();
    assert_eq!((code, status), (501, "UNIMPLEMENTED"));
}

#[tokio::test]
async fn errors_of_the_service_become_the_envelope() {
    let fixture = Fixture::new();
    let answer = fixture.send(Method::GET, "/v1/projects/p/topics/missing", ()).await;
    let expected = json!({"error": {"code": 404, "message": "Resource not found (resource=missing).", "status": "NOT_FOUND"}});
    assert_eq!((answer.status, answer.json()), (StatusCode::NOT_FOUND, expected));
    assert_eq!(answer.header("content-type"), "application/json; charset=UTF-8");

    let answer = fixture.send(Method::GET, "/v1/projects/p/topics/failing", ()).await;
    assert_eq!(
        answer.json(),
        json!({"error": {
            "code": 400,
            "message": "ünïcode %",
            "status": "FAILED_PRECONDITION",
            "details": [{
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": "R",
                "domain": "d",
                "metadata": {"id": "PERMANENT_FAILURE_INVALID_ACK_ID"},
            }],
        }})
    );
}

#[tokio::test]
async fn the_root_answers_ok() {
    let fixture = Fixture::new();
    let answer = fixture.send(Method::GET, "/", ()).await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"Ok"[..]));
    assert_eq!(fixture.send(Method::HEAD, "/", ()).await.status, StatusCode::OK);
}

#[tokio::test]
async fn headers_and_extensions_of_the_request_reach_interceptors() {
    let fixture = Fixture::new();
    let headers = [("authorization", "Bearer token"), ("x-server-timeout", "20")];
    let sent = Sent { peer: Some("10.0.0.1".into()) };
    fixture.send_sent(headers, sent, Method::GET, "/v1/projects/p/topics/t", ()).await;
    let seen = fixture.seen();
    assert_eq!(seen.authorization.as_deref(), Some("Bearer token"));
    assert_eq!(seen.grpc_timeout.as_deref(), Some("20000m"));
    assert_eq!(seen.peer.as_deref(), Some("10.0.0.1"));
}
