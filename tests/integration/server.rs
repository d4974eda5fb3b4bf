//! The process and its port: stop, connections, odd clients, health and reflection.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::stream;
use http::Request;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper_util::rt::{TokioExecutor, TokioIo};
use landline::api::proto::pubsub::{ListTopicsRequest, StreamingPullRequest};
use prost::Message;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient, server_reflection_request::MessageRequest,
    server_reflection_response::MessageResponse,
};

use crate::{
    fixture::{Backend, Fixture, api::channel, rest, stream as pull, wait::SOON, within},
    for_one_backend,
};

for_one_backend!(
    a_stop_waits_for_the_calls_under_way,
    a_stop_that_takes_too_long_ends_the_rest,
    a_second_signal_ends_at_once,
    a_stopping_server_tells_health_watchers_and_takes_no_connections,
    a_burst_of_tiny_frames_leaves_the_connection_alive,
    large_headers_are_taken,
    half_a_preface_holds_nobody_up,
    connections_over_the_limit_are_closed_and_then_taken_again,
    a_server_out_of_file_descriptors_recovers,
    reflection_shows_the_services_unless_it_is_off,
    the_healthcheck_command_tells_by_its_exit_code,
    settings_come_from_the_file_too,
);

/// A request whose body is not complete yet, and the connection that carries it.
async fn open_request(address: SocketAddr) -> TcpStream {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let head = "PUT /v1/projects/p1/topics/late HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n";
    connection.write_all(head.as_bytes()).await.unwrap();
    // The server asks for the body once it works on the request.
    let mut answer = [0; 12];
    within(SOON, "100 Continue", connection.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 100");
    connection
}

async fn rest_of(mut connection: TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = within(SOON, "the end of the connection", connection.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

async fn a_stop_waits_for_the_calls_under_way(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let mut connection = open_request(fixture.nodes[0].address).await;
    let health = watch(fixture.nodes[0].address).await;
    fixture.nodes[0].terminate();
    stopping(health).await;
    connection.write_all(b"{}").await.unwrap();
    let answer = rest_of(connection).await;
    assert!(answer.contains("HTTP/1.1 200"), "{answer}");
    let status = fixture.nodes[0].wait(SOON).expect("the end of the process");
    assert!(status.success(), "{status}");
}

async fn a_stop_that_takes_too_long_ends_the_rest(backend: Backend) {
    let mut fixture = Fixture::start_with(backend, &[("DRAIN_SECONDS", "1")]).await;
    let connection = open_request(fixture.nodes[0].address).await;
    let since = Instant::now();
    fixture.nodes[0].terminate();
    let status = fixture.nodes[0].wait(SOON).expect("the end of the process");
    assert!(status.success() && since.elapsed() >= Duration::from_secs(1), "{status} after {:?}", since.elapsed());
    assert!(!rest_of(connection).await.contains("HTTP/1.1 200"));
}

async fn a_second_signal_ends_at_once(backend: Backend) {
    let mut fixture = Fixture::start_with(backend, &[("DRAIN_SECONDS", "3600")]).await;
    let _connection = open_request(fixture.nodes[0].address).await;
    let health = watch(fixture.nodes[0].address).await;
    fixture.nodes[0].signal(Signal::INT);
    stopping(health).await;
    fixture.nodes[0].signal(Signal::INT);
    let status = fixture.nodes[0].wait(SOON).expect("the end of the process");
    assert_eq!(status.code(), Some(130));
}

/// A health watch that has answered SERVING.
async fn watch(address: SocketAddr) -> tonic::Streaming<tonic_health::pb::HealthCheckResponse> {
    let mut health = HealthClient::new(channel(address)).watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    let first = within(SOON, "the health", health.message()).await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    health
}

/// Waits until a watch says that the server stops.
async fn stopping(mut health: tonic::Streaming<tonic_health::pb::HealthCheckResponse>) {
    let next = within(SOON, "NOT_SERVING", health.message()).await.unwrap().unwrap();
    assert_eq!(next.status(), ServingStatus::NotServing);
    assert_eq!(within(SOON, "the end of the watch", health.message()).await.unwrap_err().code(), Code::Unavailable);
}

async fn a_stopping_server_tells_health_watchers_and_takes_no_connections(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let address = fixture.nodes[0].address;
    let _connection = open_request(address).await;
    let health = watch(address).await;
    fixture.nodes[0].terminate();
    stopping(health).await;
    crate::fixture::eventually("connections are refused", SOON, async || TcpStream::connect(address).await.is_err()).await;
}

/// HTTP/2 at its defaults ends a connection that sends thousands of frames of a few bytes, as acknowledgements are.
async fn a_burst_of_tiny_frames_leaves_the_connection_alive(backend: Backend) {
    const FRAMES: usize = 20_000;
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;

    let frame = |request: &StreamingPullRequest| {
        let body = request.encode_to_vec();
        let head = [&[0][..], &(body.len() as u32).to_be_bytes()].concat();
        Ok::<_, std::convert::Infallible>(Frame::data(Bytes::from([head, body].concat())))
    };
    let first = frame(&pull::first(&subscription));
    let empty = StreamingPullRequest::default();
    let frames = (0..FRAMES).map(move |_| frame(&empty));
    let body = StreamBody::new(futures::StreamExt::chain(
        stream::iter(std::iter::once(first).chain(frames)),
        // The stream stays open behind them.
        stream::pending(),
    ));
    let socket = TcpStream::connect(api.address()).await.unwrap();
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let request = Request::post(format!("http://{}/google.pubsub.v1.Subscriber/StreamingPull", api.address()))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .unwrap();
    let mut answer = within(SOON, "the answer's head", sender.send_request(request)).await.unwrap().into_body();
    api.publish_texts(&topic, &["after the burst"]).await;
    let mut seen = Vec::new();
    within(SOON * 2, "the message", async {
        while !seen.windows(15).any(|w| w == b"after the burst") {
            let frame = answer.frame().await.expect("an open stream").expect("a connection that lives");
            seen.extend_from_slice(frame.data_ref().expect("no end of the stream"));
        }
    })
    .await;
}

/// Clients put tokens, routing parameters and traces there.
async fn large_headers_are_taken(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let large = "x".repeat(64 * 1024);
    let mut grpc = tonic::client::Grpc::new(api.channel());
    grpc.ready().await.unwrap();
    let mut request = tonic::Request::new(ListTopicsRequest { project: api.parent(), ..Default::default() });
    request.metadata_mut().insert("x-goog-request-params", large.parse().unwrap());
    let path = http::uri::PathAndQuery::from_static("/google.pubsub.v1.Publisher/ListTopics");
    let codec = tonic_prost::ProstCodec::<_, landline::api::proto::pubsub::ListTopicsResponse>::default();
    grpc.unary(request, path, codec).await.unwrap();
    let path = format!("/v1/{}/topics", api.parent());
    let answer = rest::send(api.address(), "GET", &path, &[("authorization", &large)], "").await;
    assert_eq!(answer.status, 200);
}

async fn half_a_preface_holds_nobody_up(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("WORKERS", "1")]).await;
    let address = fixture.nodes[0].address;
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"PRI * HTTP/2.0\r\n").await.unwrap();
    assert_eq!(rest::get(address, "/").await.status, 200);
    // What looked like HTTP/2 so far turns out not to be anything.
    slow.write_all(b"nonsense\r\n\r\n").await.unwrap();
    let answer = rest_of(slow).await;
    assert!(answer.starts_with("HTTP/1.1 400") || answer.is_empty(), "{answer}");
}

/// True when the server answers on a new connection, false when it closes it.
async fn is_answered(address: SocketAddr) -> bool {
    let Ok(mut connection) = TcpStream::connect(address).await else { return false };
    let _ = connection.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    rest_of(connection).await.starts_with("HTTP/1.1 200")
}

async fn connections_over_the_limit_are_closed_and_then_taken_again(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MAX_CONNECTIONS", "2")]).await;
    let address = fixture.nodes[0].address;
    let held = [open_request(address).await, open_request(address).await];
    assert!(!is_answered(address).await, "a third connection is served");
    drop(held);
    crate::fixture::eventually("a connection is taken again", SOON, async || is_answered(address).await).await;
}

async fn a_server_out_of_file_descriptors_recovers(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let node = &fixture.nodes[0];
    assert!(is_answered(node.address).await);
    let open = std::fs::read_dir(format!("/proc/{}/fd", node.id())).unwrap().count() as u64;
    let limit = Rlimit { current: Some(open + 4), maximum: Some(open + 4) };
    prlimit(Pid::from_raw(node.id() as i32), Resource::Nofile, limit).unwrap();
    let mut held = Vec::new();
    for _ in 0..20 {
        held.push(TcpStream::connect(node.address).await.unwrap());
    }
    crate::fixture::eventually("it says so", SOON, async || node.log_tail().contains("can't take connections")).await;
    drop(held);
    crate::fixture::eventually("it serves again", SOON, async || is_answered(node.address).await).await;
}

async fn reflection_shows_the_services_unless_it_is_off(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let ask = async |address, message_request| {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(message_request) };
        let mut client = ServerReflectionClient::new(channel(address));
        let mut answers = client.server_reflection_info(tokio_stream::once(request)).await?.into_inner();
        answers.message().await.map(|answer| answer.unwrap().message_response.unwrap())
    };
    let address = fixture.nodes[0].address;
    let Ok(MessageResponse::ListServicesResponse(list)) = ask(address, MessageRequest::ListServices(String::new())).await else {
        panic!("no list of services");
    };
    let names: Vec<_> = list.service.into_iter().map(|s| s.name).collect();
    for name in ["google.pubsub.v1.Publisher", "google.pubsub.v1.Subscriber", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
    }
    let symbol = MessageRequest::FileContainingSymbol("google.pubsub.v1.PubsubMessage".into());
    assert!(matches!(ask(address, symbol).await, Ok(MessageResponse::FileDescriptorResponse(_))));

    let without = Fixture::start_with(backend, &[("ENABLE_REFLECTION", "false")]).await;
    let answer = ask(without.nodes[0].address, MessageRequest::ListServices(String::new())).await;
    assert_eq!(answer.unwrap_err().code(), Code::Unimplemented);
}

/// Runs the program with a command; answers its exit code and output.
fn command(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(crate::fixture::node::binary());
    let output = command.args(arguments).stdin(std::process::Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

async fn the_healthcheck_command_tells_by_its_exit_code(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let address = fixture.nodes[0].address.to_string();
    let (code, text) = command(&["healthcheck", "--address", &address]);
    assert_eq!((code, text.trim()), (Some(0), format!("{address}: SERVING").as_str()));
    let port = format!("PORT={}", fixture.nodes[0].address.port());
    assert_eq!(command(&["healthcheck", "--set", &port]).0, Some(0), "the address of the settings");
    fixture.nodes[0].kill();
    let (code, text) = command(&["healthcheck", "--address", &address]);
    assert_eq!(code, Some(1), "{text}");
}

async fn settings_come_from_the_file_too(_: Backend) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("landline.yaml");
    std::fs::write(&file, "port: 1234\nbroker_url: redis://:s3cret@db:6379/1\n").unwrap();
    let (code, text) = command(&["--config", file.to_str().unwrap(), "check-config"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("port: 1234") && text.contains("redis://:***@db:6379/1") && !text.contains("s3cret"), "{text}");
    std::fs::write(&file, "port: 1234567\n").unwrap();
    let (code, text) = command(&["--config", file.to_str().unwrap(), "check-config"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains(r#"port="1234567": must be 0..65535"#), "{text}");
}
