//! One port for gRPC and REST, over real connections.

use std::net::SocketAddr;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::fixture::Fixture;
use crate::api::proto::pubsub::{GetTopicRequest, publisher_client::PublisherClient};

/// Serves the port until the test's runtime ends.
async fn serve() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = Fixture::one_port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(async move {
                let server = auto::Builder::new(TokioExecutor::new());
                // The client may go away at any time.
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    address
}

/// Sends text over a connection of its own and reads until the server closes it.
async fn exchange(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn one_port_speaks_grpc_and_rest_over_both_versions_of_http() {
    let address = serve().await;

    let mut client = PublisherClient::connect(format!("http://{address}")).await.unwrap();
    let topic = client.get_topic(GetTopicRequest { topic: "projects/p/topics/t".into() }).await.unwrap().into_inner();
    assert_eq!(topic.name, "projects/p/topics/t");
    let status = client.get_topic(GetTopicRequest { topic: "projects/p/topics/missing".into() }).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::NotFound);

    let answer = exchange(address, b"GET /v1/projects/p/topics/t HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("{\n  \"name\": \"projects/p/topics/t\",\n  \"state\": \"ACTIVE\"\n}\n"), "{answer}");

    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::post(format!("http://{address}/v1/projects/p/topics/t:publish"));
    let request = request.body(Full::new(Bytes::from_static(br#"{"messages":[{"data":"aGk="}]}"#))).unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), json!({"messageIds": ["1"]}));
}

#[tokio::test]
async fn a_chunked_body_is_read() {
    let request = b"POST /v1/projects/p/topics/t:publish HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\
                    Connection: close\r\n\r\n10\r\n{\"messages\":[{\"d\r\ne\r\nata\":\"aGk=\"}]}\r\n0\r\n\r\n";
    let answer = exchange(serve().await, request).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("{\n  \"messageIds\": [\n    \"1\"\n  ]\n}\n"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_gets_it() {
    let address = serve().await;
    let data = "A".repeat(2_000_000);
    let body = json!({"messages": [{ "data": data }]}).to_string();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/projects/p/topics/t:publish HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\nExpect: 100-continue\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut sign = [0; 25];
    stream.read_exact(&mut sign).await.unwrap();
    assert_eq!(&sign, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
}

#[tokio::test]
async fn a_client_that_waits_with_too_much_is_refused_at_once() {
    let request = b"POST /v1/projects/p/topics/t:publish HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\
                    Expect: 100-continue\r\nConnection: close\r\n\r\n";
    let answer = exchange(serve().await, request).await;
    assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{answer}");
    assert!(answer.contains("Request payload size exceeds the limit: 10485760 bytes."), "{answer}");
}

#[tokio::test]
async fn a_body_over_the_limit_is_answered_although_it_was_sent() {
    let address = serve().await;
    let size = 11_000_000;
    let head = format!(
        "POST /v1/projects/p/topics/t:publish HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
    );
    let answer = exchange(address, &[head.into_bytes(), vec![b' '; size]].concat()).await;
    assert!(answer.contains("Request payload size exceeds the limit: 10485760 bytes."), "{answer}");
}

#[tokio::test]
async fn the_root_answers_to_head_without_a_body() {
    let answer = exchange(serve().await, b"HEAD / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
}
