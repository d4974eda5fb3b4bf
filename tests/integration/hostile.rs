//! Clients that mean harm: they may lose their connection, and nobody else loses anything.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use landline::api::proto::{FILE_DESCRIPTOR_SET, pubsub::ListTopicsRequest};
use prost_reflect::DescriptorPool;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    fixture::{
        Api, Backend, Fixture, message, rest,
        wait::{SOON, within},
    },
    for_one_backend,
};

for_one_backend!(
    resets_as_fast_as_requests_end_the_connection_or_are_borne,
    floods_of_headers_end_the_connection,
    floods_of_tiny_frames_are_borne_or_end_the_connection,
    answers_that_nobody_reads_do_not_fill_the_memory,
    bodies_that_come_a_byte_at_a_time_cost_little_and_are_given_up,
    the_bound_on_headers_holds_over_http1_too,
    many_idle_connections_cost_little,
    a_huge_body_is_refused_and_not_kept,
    a_small_body_that_unpacks_to_a_huge_one_is_refused_and_not_kept,
    unfinished_requests_do_not_fill_the_memory,
    broken_frames_end_the_connection,
    bytes_that_are_no_request_are_the_callers_fault,
);

/// What one attack may add to the server's memory. The largest buffers of a connection are its windows of 16 MiB.
const MAX_GROWTH: u64 = 150 << 20;

/// Memory of a connection that does nothing: the state of HTTP/2 and of its task.
const MAX_IDLE_BYTES: u64 = 32 << 10;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The head of a Publish call, without any compression.
fn head() -> Vec<u8> {
    let text = |name: &[u8], value: &str| [name, &[value.len() as u8], value.as_bytes()].concat();
    // POST and http from the static table; then literals with names from it.
    let path = text(&[0x04], "/google.pubsub.v1.Publisher/Publish");
    [vec![0x83, 0x86], path, text(&[0x01], "localhost"), text(&[0x0f, 0x10], "application/grpc")].concat()
}

async fn connect(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await.unwrap();
    stream
}

/// How many connections of so many there is room for, once this process and the servers it starts may open as many files as
/// the machine lets them.
fn room_for(count: usize) -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
    limit.maximum.map_or(count, |maximum| (maximum / 2) as usize).min(count)
}

/// Writes until everything is written or the server has had enough.
async fn flood(stream: TcpStream, frames: impl Iterator<Item = Vec<u8>>) -> TcpReading {
    let (mut reader, mut writer) = stream.into_split();
    let reading = tokio::spawn(async move {
        let mut buffer = vec![0; 64 * 1024];
        while reader.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
    });
    let writing = async {
        for bytes in frames {
            if writer.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    within(SOON * 2, "the flood", writing).await;
    TcpReading { reading, _writer: writer }
}

/// A connection after a flood.
struct TcpReading {
    reading: tokio::task::JoinHandle<()>,
    _writer: tokio::net::tcp::OwnedWriteHalf,
}

impl TcpReading {
    /// The server ends the connection.
    async fn ends(self) {
        within(SOON, "the end of the connection", self.reading).await.unwrap();
    }
}

/// The server serves others, and has not grown much.
async fn unharmed(fixture: &Fixture, api: &Api, before: u64) {
    unharmed_within(fixture, api, before, MAX_GROWTH).await;
}

async fn unharmed_within(fixture: &Fixture, api: &Api, before: u64, most: u64) {
    let request = ListTopicsRequest { project: api.parent(), ..Default::default() };
    within(SOON, "an answer", api.ok(request)).await;
    let growth = fixture.nodes[0].resident_bytes().saturating_sub(before);
    assert!(growth < most, "{} MiB more", growth >> 20);
}

async fn resets_as_fast_as_requests_end_the_connection_or_are_borne(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    api.create_topic("orders").await;
    let before = fixture.nodes[0].resident_bytes();
    for _ in 0..4 {
        let pairs = (0..50_000_u32).map(|n| {
            let stream = 2 * n + 1;
            [frame(HEADERS, END_HEADERS, stream, &head()), frame(RESET, 0, stream, &8_u32.to_be_bytes())].concat()
        });
        let _after = flood(connect(address).await, pairs).await;
        unharmed(&fixture, &api, before).await;
    }
}

async fn floods_of_headers_end_the_connection(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let before = fixture.nodes[0].resident_bytes();
    // A head that never ends, in large and in empty pieces.
    let filling = [&[0x00, 1, b'a', 0x7f, 0xc1, 0x3d][..], &vec![b'x'; 8000]].concat();
    for piece in [filling, Vec::new()] {
        let begin = std::iter::once(frame(HEADERS, 0, 1, &head()));
        let more = (0..100_000).map(|_| frame(CONTINUATION, 0, 1, &piece));
        flood(connect(address).await, begin.chain(more)).await.ends().await;
        unharmed(&fixture, &api, before).await;
    }
    // HTTP/1: one long line, and very many.
    for line in [vec![b'x'; 8192], b"a: b\r\n".repeat(1000)] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nx: ").await.unwrap();
        let lines = (0..20_000).map(|_| line.clone());
        flood(stream, lines).await.ends().await;
        unharmed(&fixture, &api, before).await;
    }
}

async fn floods_of_tiny_frames_are_borne_or_end_the_connection(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let before = fixture.nodes[0].resident_bytes();
    let one = &1_u32.to_be_bytes();
    for tiny in [
        frame(PING, 0, 0, &[0; 8]),
        frame(SETTINGS, 0, 0, &[]),
        frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0xff, 0xff]),
        frame(WINDOW_UPDATE, 0, 0, one),
        frame(PRIORITY, 0, 3, &[0, 0, 0, 0, 1]),
        frame(DATA, 0, 1, &[]),
        frame(DATA, 0, 1, b"\0"),
        frame(WINDOW_UPDATE, 0, 1, one),
        // Of a kind that nobody knows, which is to be passed over.
        frame(0xbe, 0, 0, &[]),
    ] {
        let begin = std::iter::once(frame(HEADERS, END_HEADERS, 1, &head()));
        let many = tiny.repeat(1000);
        let _after = flood(connect(address).await, begin.chain((0..200).map(|_| many.clone()))).await;
        unharmed(&fixture, &api, before).await;
    }
}

/// Writes for as long as the server takes it, and reads nothing.
async fn push(stream: &mut TcpStream, bytes: &[u8], times: usize) {
    const STUCK: Duration = Duration::from_secs(2);
    for _ in 0..times {
        if !matches!(tokio::time::timeout(STUCK, stream.write_all(bytes)).await, Ok(Ok(()))) {
            return;
        }
    }
}

async fn answers_that_nobody_reads_do_not_fill_the_memory(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    for _ in 0..20 {
        api.publish(&topic, [message(vec![b'x'; 1 << 20])]).await;
    }
    let before = fixture.nodes[0].resident_bytes();
    let mut held = Vec::new();
    // Each of them is to be answered by the server itself, or with a megabyte.
    let get = format!("GET /v1/{subscription} HTTP/1.1\r\nhost: x\r\n\r\n").repeat(100);
    for bytes in [frame(PING, 0, 0, &[0; 8]).repeat(1000), frame(SETTINGS, 0, 0, &[]).repeat(1000)] {
        let mut stream = connect(address).await;
        push(&mut stream, &bytes, 1000).await;
        held.push(stream);
        unharmed(&fixture, &api, before).await;
    }
    let mut stream = TcpStream::connect(address).await.unwrap();
    push(&mut stream, get.as_bytes(), 1000).await;
    held.push(stream);
    let body = "{\"maxMessages\": 1}";
    let pull = format!("POST /v1/{subscription}:pull HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    for _ in 0..20 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        push(&mut stream, pull.as_bytes(), 20).await;
        held.push(stream);
    }
    unharmed(&fixture, &api, before).await;
}

async fn bodies_that_come_a_byte_at_a_time_cost_little_and_are_given_up(backend: Backend) {
    let count = room_for(1000);
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let topic = api.create_topic("orders").await;
    let before = fixture.nodes[0].resident_bytes();
    let head = format!("POST /v1/{topic}:publish HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{{");
    let mut held = Vec::with_capacity(count);
    for number in 0..count {
        let mut stream = if number % 2 == 0 { connect(address).await } else { TcpStream::connect(address).await.unwrap() };
        let announced = [&[0][..], &9_000_000_u32.to_be_bytes()].concat();
        let begin = [frame(HEADERS, END_HEADERS, 1, &self::head()), frame(DATA, 0, 1, &announced)].concat();
        stream.write_all(if number % 2 == 0 { &begin } else { head.as_bytes() }).await.unwrap();
        held.push(stream);
    }
    let (data, began) = (frame(DATA, 0, 1, b"x"), Instant::now());
    let mut ended = [false; 2];
    while ended != [true; 2] {
        assert!(began.elapsed() < Duration::from_secs(120), "the server waits for ever: {ended:?}");
        let mut buffer = vec![0; 1024];
        for (number, stream) in held.iter_mut().enumerate() {
            let _ = stream.write_all(if number % 2 == 0 { &data } else { b" " }).await;
            // What the two kinds hear in the end: a reset of the stream, or an answer.
            let read = stream.try_read(&mut buffer).unwrap_or_default();
            let refusal: &[u8] = if number % 2 == 0 { b"grpc-status" } else { b"DEADLINE_EXCEEDED" };
            let told = buffer[..read].windows(refusal.len()).any(|part| part == refusal);
            let reset = number % 2 == 0 && read > 0 && ended_stream(&buffer[..read]);
            ended[number % 2] |= told || reset;
        }
        unharmed_within(&fixture, &api, before, MAX_GROWTH + count as u64 * MAX_IDLE_BYTES).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// True where these frames have an end of a stream, or a reset of one.
fn ended_stream(mut frames: &[u8]) -> bool {
    const END_STREAM: u8 = 1;
    while let [a, b, c, kind, flags, rest @ ..] = frames {
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        if *kind == RESET || (*kind == HEADERS && flags & END_STREAM != 0) {
            return true;
        }
        frames = rest.get(4 + length..).unwrap_or_default();
    }
    false
}

async fn many_idle_connections_cost_little(backend: Backend) {
    let count = room_for(10_000);
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let before = fixture.nodes[0].resident_bytes();
    let most = MAX_GROWTH + count as u64 * MAX_IDLE_BYTES;
    let mut held = Vec::with_capacity(count);
    for number in 0..count {
        // Every second one says something first.
        held.push(if number % 2 == 0 { connect(address).await } else { TcpStream::connect(address).await.unwrap() });
    }
    unharmed_within(&fixture, &api, before, most).await;
    drop(held);
    unharmed_within(&fixture, &api, before, most).await;
}

async fn a_huge_body_is_refused_and_not_kept(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let topic = api.create_topic("orders").await;
    let before = fixture.nodes[0].resident_bytes();
    let url = format!("http://{address}/v1/{topic}:publish");
    let answer = reqwest::Client::new().post(url).body(vec![b' '; 30 << 20]).send().await.unwrap();
    assert_eq!(answer.status(), 400);
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("POST /v1/{topic}:publish HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let chunk = vec![b' '; 1 << 20];
    flood(stream, (0..100).map(|_| chunk.clone())).await.ends().await;
    unharmed(&fixture, &api, before).await;
    // A gRPC message of 100 MB is refused by what it announces.
    let announced = [&[0][..], &100_000_000_u32.to_be_bytes()].concat();
    let status = grpc(address, "identity", announced).await;
    assert!(["3", "8", "11"].contains(&status.as_str()), "status {status:?}");
    unharmed(&fixture, &api, before).await;
}

/// A call with a body in the form of gRPC: the status word of its answer.
async fn grpc(address: SocketAddr, encoding: &str, body: Vec<u8>) -> String {
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let request = client.post(format!("http://{address}/google.pubsub.v1.Publisher/Publish"));
    let request = request.header("content-type", "application/grpc").header("te", "trailers").header("grpc-encoding", encoding);
    let answer = request.body(body).send().await.unwrap();
    answer.headers().get("grpc-status").map_or_else(String::new, |code| code.to_str().unwrap().to_owned())
}

async fn a_small_body_that_unpacks_to_a_huge_one_is_refused_and_not_kept(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let topic = api.create_topic("orders").await;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let chunk = vec![b' '; 1 << 20];
    (0..100).for_each(|_| std::io::Write::write_all(&mut gzip, &chunk).unwrap());
    let gzip = gzip.finish().unwrap();
    assert!(gzip.len() < 2 << 20);
    let before = fixture.nodes[0].resident_bytes();
    for _ in 0..3 {
        let request = reqwest::Client::new().post(format!("http://{address}/v1/{topic}:publish"));
        let answer = request.header("content-encoding", "gzip").body(gzip.clone()).send().await.unwrap();
        assert_eq!(answer.status(), 400);
        let framed = [&[1][..], &(gzip.len() as u32).to_be_bytes(), &gzip].concat();
        let status = grpc(address, "gzip", framed).await;
        assert!(["3", "8", "11", "13"].contains(&status.as_str()), "status {status:?}");
        unharmed(&fixture, &api, before).await;
    }
}

async fn unfinished_requests_do_not_fill_the_memory(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let before = fixture.nodes[0].resident_bytes();
    // Each call announces 9 MB and sends most of it, as far as the server's windows let it.
    let announced = [&[0][..], &9_000_000_u32.to_be_bytes()].concat();
    let mut held = Vec::new();
    for _ in 0..8 {
        let stream = connect(address).await;
        let (mut reader, mut writer) = stream.into_split();
        held.push(tokio::spawn(async move {
            let mut buffer = vec![0; 64 * 1024];
            while reader.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
        }));
        let part = vec![0; 16_000];
        for number in 0..200_u32 {
            let id = 2 * number + 1;
            let sent =
                [frame(HEADERS, END_HEADERS, id, &head()), frame(DATA, 0, id, &announced), frame(DATA, 0, id, &part)].concat();
            if writer.write_all(&sent).await.is_err() {
                break;
            }
        }
        held.push(tokio::spawn(async move {
            let _writer = writer;
            std::future::pending::<()>().await;
        }));
    }
    unharmed(&fixture, &api, before).await;
    held.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn the_bound_on_headers_holds_over_http1_too(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let path = format!("/v1/{}/topics", api.parent());
    for (bytes, status) in [(250_000, 200), (300_000, 431)] {
        let answer = rest::send(address, "GET", &path, &[("x-long", &"x".repeat(bytes))], "").await;
        assert_eq!(answer.status, status, "{bytes} bytes");
    }
}

async fn broken_frames_end_the_connection(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (api, address) = (fixture.api().await, fixture.nodes[0].address);
    let before = fixture.nodes[0].resident_bytes();
    for broken in [
        frame(DATA, 0, 0, b"x"),
        frame(HEADERS, END_HEADERS, 2, &head()),
        frame(HEADERS, END_HEADERS, 1, &[0xff; 100]),
        frame(CONTINUATION, END_HEADERS, 1, &head()),
        frame(SETTINGS, 0, 0, &[1, 2, 3]),
        frame(RESET, 0, 0, &[0; 4]),
        vec![0xff; 1000],
    ] {
        let mut stream = connect(address).await;
        stream.write_all(&broken).await.unwrap();
        let ended = async {
            let mut buffer = [0; 4096];
            while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
        };
        within(SOON, "the end of the connection", ended).await;
    }
    // A handshake of TLS where none is spoken, and nonsense, are answered or ended too.
    for text in [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], b"\0\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(text).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let _ = within(SOON, "the end of the connection", stream.read_to_end(&mut answer)).await;
    }
    tokio::time::timeout(Duration::from_secs(30), unharmed(&fixture, &api, before)).await.unwrap();
}

/// INTERNAL would have clients repeat such a call for ever.
async fn bytes_that_are_no_request_are_the_callers_fault(backend: Backend) {
    const NO_FIELD: &[u8] = b"\xff\xff\xff";
    const NO_TEXT: &[u8] = b"\x0a\x02\xff\xfe";
    let fixture = Fixture::start(backend).await;
    let address = fixture.nodes[0].address;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let services = pool.services().filter(|s| ["google.pubsub.v1", "google.iam.v1"].contains(&s.package_name()));
    let methods: Vec<_> =
        services.flat_map(|s| s.methods().map(|m| format!("{}/{}", s.full_name(), m.name())).collect::<Vec<_>>()).collect();
    assert!(methods.len() >= 38, "{methods:?}");
    for method in methods {
        for bytes in [NO_FIELD, NO_TEXT] {
            let mut body = vec![0, 0, 0, 0, bytes.len() as u8];
            body.extend_from_slice(bytes);
            let request = client.post(format!("http://{address}/{method}")).header("content-type", "application/grpc");
            let answer = request.header("te", "trailers").body(body).send().await.unwrap();
            let status = answer.headers().get("grpc-status").map(|code| code.to_str().unwrap().to_owned());
            assert_eq!(status.as_deref(), Some("3"), "{method} of {bytes:?}: {:?}", answer.headers());
            assert!(answer.headers().contains_key("grpc-status-details-bin"), "{method}");
        }
    }
}
