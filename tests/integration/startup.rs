//! Start, addresses, restarts and unimplemented parts.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::{
    CreateSnapshotRequest, DeadLetterPolicy, GetSnapshotRequest, ListTopicsRequest, PubsubMessage, RetryPolicy, SeekRequest,
    seek_request::Target,
};
use tonic::Code;

use crate::{
    fixture::{
        Api, Backend, Fixture, Transport,
        api::channel,
        message,
        message::{Build, texts},
        node::{Node, NodeSpec, binary},
        ports, rest, seconds,
        wait::{SOON, assert_took},
    },
    for_durable_backends, for_every_backend, for_one_backend,
};

for_durable_backends!(
    a_crash_keeps_everything,
    ids_are_unique_across_restarts,
    leases_end_on_time_across_a_restart,
    what_old_consumers_hold_is_not_the_new_ones_after_a_restart,
);
for_one_backend!(
    a_wrong_setting_stops_the_start_with_one_line,
    a_file_that_can_not_be_used_is_told_by_its_setting,
    a_busy_port_stops_the_start,
    a_second_server_can_not_open_the_same_folder,
    the_root_path_answers_a_health_probe,
    unknown_methods_are_unimplemented,
    one_port_serves_every_protocol,
);
for_every_backend!(the_health_service_reports_serving);

/// C184
async fn a_crash_keeps_everything(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let policy = DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 5 };
    let backoff = RetryPolicy { minimum_backoff: Some(seconds(600)), maximum_backoff: Some(seconds(600)) };
    let (topic, plain) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let counted = api.create_subscription_with("counted", &topic, |s| s.dead_letter_policy = Some(policy)).await;
    let delayed = api.create_subscription_with("delayed", &topic, |s| s.retry_policy = Some(backoff)).await;
    let set = |s: &mut landline::api::proto::pubsub::Subscription| {
        s.enable_message_ordering = true;
        s.ack_deadline_seconds = 600;
    };
    let ordered = api.create_subscription_with("ordered", &topic, set).await;
    let kept = api.create_subscription_with("kept", &topic, |s| s.retain_acked_messages = true).await;
    api.publish(&topic, ["m1", "m2", "m3"].map(|m| message(m).key("k"))).await;

    let leased = api.pull(&plain, 1).await;
    for _ in 0..2 {
        let received = api.pull(&counted, 3).await;
        api.nack(&counted, &received).await;
    }
    let nacked = api.pull(&delayed, 3).await;
    api.nack(&delayed, &nacked[..1]).await;
    api.ack(&delayed, &nacked[1..]).await;
    let first = api.pull_once(&ordered, 1).await;
    let snapshot = CreateSnapshotRequest { name: api.snapshot("snap"), subscription: kept.clone(), ..Default::default() };
    let snapshot = api.ok(snapshot).await;
    let received = api.pull(&kept, 3).await;
    api.ack(&kept, &received).await;
    let before = api.get_subscription(&counted).await.unwrap();

    fixture.crash_and_restart();
    let api = fixture.api_of_node(0, &api).await;

    assert_eq!(api.get_subscription(&counted).await.unwrap(), before);
    assert_eq!(api.ok(GetSnapshotRequest { snapshot: snapshot.name.clone() }).await, snapshot);
    let others = api.pull(&plain, 2).await;
    assert!(others.iter().all(|r| r.id() != leased[0].id()), "a leased message came again");
    api.ack(&plain, leased.iter().chain(&others)).await;
    api.assert_drained(&topic, &plain).await;

    // The fence above went to every subscription.
    let received = api.pull(&counted, 4).await;
    let mut attempts: Vec<_> = received.iter().map(|r| (r.text(), r.delivery_attempt)).collect();
    attempts.sort_unstable();
    assert_eq!(attempts, [("fence", 1), ("m1", 3), ("m2", 3), ("m3", 3)]);
    let received = api.pull(&delayed, 1).await;
    assert_eq!(texts(&received), ["fence"], "m1 waits for its backoff of 600 s");
    assert!(api.pull_now(&delayed, 10).await.is_empty());

    let received = api.pull_now(&ordered, 10).await;
    assert_eq!(texts(&received), ["fence"], "the key waits for its first message");
    api.ack(&ordered, &first).await;
    assert_eq!(texts(&api.pull(&ordered, 2).await), ["m2", "m3"]);

    let received = api.pull(&kept, 1).await;
    assert_eq!(texts(&received), ["fence"], "acked messages stay acked");
    api.ok(SeekRequest { subscription: kept.clone(), target: Some(Target::Snapshot(snapshot.name)) }).await;
    let received = api.pull(&kept, 4).await;
    let mut got = texts(&received);
    got.sort_unstable();
    assert_eq!(got, ["fence", "m1", "m2", "m3"]);
}

/// C184
async fn ids_are_unique_across_restarts(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let mut api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut ids = std::collections::BTreeSet::new();
    for round in 1..=4 {
        for _ in 0..3 {
            ids.extend(api.publish(&topic, (0..100).map(|n| message(n.to_string()))).await);
        }
        assert_eq!(ids.len(), round * 300);
        fixture.crash_and_restart();
        api = fixture.api_of_node(0, &api).await;
    }
    let mut got = std::collections::BTreeSet::new();
    for _ in 0..2 {
        let received = api.pull(&subscription, 600).await;
        got.extend(received.iter().map(|r| r.id().to_owned()));
        api.ack(&subscription, &received).await;
    }
    assert_eq!(got, ids);
}

/// C184: a lease ends on its original deadline, whatever happened meanwhile.
async fn leases_end_on_time_across_a_restart(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish_texts(&topic, &["m1"]).await;
    let since = Instant::now();
    let first = api.pull(&subscription, 1).await;
    fixture.crash_and_restart();
    let api = fixture.api_of_node(0, &api).await;
    let mut stream = api.stream(&subscription).await;
    // A start that takes longer than the lease, as on a busy machine, delivers at once.
    let late = (since.elapsed().as_secs_f64() - 10.0).max(0.0);
    let again = stream.message().await;
    assert_eq!(again.id(), first[0].id());
    assert_took(since, 9.9, 2.5 + late, "the lease of 10 s");
}

/// C094, C184. Neither the ordering keys nor the room in flow control that went with the leases of consumers before.
async fn what_old_consumers_hold_is_not_the_new_ones_after_a_restart(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let ordered = api.create_subscription_with("ordered", &topic, |s| {
        s.enable_message_ordering = true;
        s.ack_deadline_seconds = 600;
    });
    let ordered = ordered.await;
    let plain = api.create_subscription_with("plain", &topic, |s| s.ack_deadline_seconds = 600).await;
    let keyed = |text: &&str| PubsubMessage { data: (*text).to_owned().into(), ordering_key: "k".into(), ..Default::default() };
    api.publish(&topic, ["1", "2", "3", "4", "5"].iter().map(keyed)).await;
    let first = api.pull(&ordered, 1).await;
    let held = api.pull(&plain, 2).await;
    fixture.crash_and_restart();

    let api = fixture.api_of_node(0, &api).await;
    assert_eq!(texts(&api.pull_now(&ordered, 10).await), [""; 0]);
    api.ack(&ordered, &first).await;
    assert_eq!(texts(&api.pull(&ordered, 2).await), ["2", "3"]);

    let stream = api.stream_with(&plain, |request| {
        request.max_outstanding_messages = 1;
        request.stream_ack_deadline_seconds = 600;
    });
    let mut stream = stream.await;
    let own = stream.message().await;
    api.ack(&plain, &held).await;
    assert!(stream.try_message(Duration::from_millis(300)).await.is_none(), "more than the stream's limit");
    stream.ack(&own);
    stream.message().await;
}

fn run(env: &[(&str, &str)]) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary());
    command.env("CONNECTORS_GCP_PORT", "0").env("CONNECTORS_GCP_BROKER_URL", "memory:").current_dir(folder.path());
    let child = command.envs(env.iter().copied()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let until = Instant::now() + SOON;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("the server started with {env:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A wrong or unknown key stops the start with one line naming the key, the value and the range.
async fn a_wrong_setting_stops_the_start_with_one_line(_: Backend) {
    let wrong = [
        ("CONNECTORS_GCP_PORT", "65536"),
        ("CONNECTORS_GCP_PORT", "web"),
        ("CONNECTORS_GCP_DEFAULT_ACK_DEADLINE_SECONDS", "9"),
        ("CONNECTORS_GCP_DEFAULT_ACK_DEADLINE_SECONDS", "601"),
        ("CONNECTORS_GCP_MAX_OUTSTANDING_MESSAGES", "0"),
        ("CONNECTORS_GCP_MIN_ACK_EXTENSION_SECONDS", "11"),
        ("CONNECTORS_GCP_MAX_ACK_EXTENSION_SECONDS", "3601"),
        ("CONNECTORS_GCP_NACK_BYPASSES_BACKOFF", "perhaps"),
        ("CONNECTORS_GCP_EXACTLY_ONCE_SCOPE", "galaxy"),
        ("CONNECTORS_GCP_BROKER_URL", "kafka://localhost"),
        ("CONNECTORS_GCP_ADVERTISED_ENDPOINT", "no port"),
        ("CONNECTORS_GCP_NO_SUCH_KEY", "1"),
    ];
    for (key, value) in wrong {
        let (success, text) = run(&[(key, value)]);
        assert!(!success, "{key}={value}");
        assert_eq!(text.trim().lines().count(), 1, "{key}={value}: {text}");
        let short = key.trim_start_matches("CONNECTORS_GCP_");
        assert!(text.to_uppercase().contains(short), "{key}={value}: {text}");
        assert!(key.ends_with("NO_SUCH_KEY") || text.contains(value), "{key}={value}: {text}");
    }
}

/// The same of what is in the files that settings name.
async fn a_file_that_can_not_be_used_is_told_by_its_setting(_: Backend) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (missing, broken, certificate, key) = (path("missing"), path("broken.yaml"), path("cert.pem"), path("key.pem"));
    std::fs::write(&broken, "broken: [").unwrap();
    let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&certificate, pair.cert.pem()).unwrap();
    std::fs::write(&key, pair.signing_key.serialize_pem()).unwrap();
    let (cert, key) = (("TLS_CERT_FILE", certificate.as_str()), ("TLS_KEY_FILE", key.as_str()));
    let admins = [("AUTH", "enforce"), ("AUTH_ADMINS", "user:a@example.com")];
    let issuer = [("AUTH_OIDC_ISSUERS", "https://127.0.0.1:1"), ("AUTH_AUDIENCES", "a")];
    for setting in landline::settings::keys::KEYS.iter().map(|key| key.name).filter(|name| name.ends_with("_FILE")) {
        let with: Vec<_> = match setting {
            "TLS_CERT_FILE" => vec![key],
            "TLS_KEY_FILE" => vec![cert],
            "TLS_CLIENT_CA_FILE" => vec![cert, key, ("TLS_CLIENT_AUTH", "required")],
            "OTLP_CA_FILE" => vec![("OTLP_ENDPOINT", "https://127.0.0.1:1")],
            "AUTH_OIDC_CA_FILE" => [admins, issuer].concat(),
            name if name.starts_with("AUTH_") => admins.to_vec(),
            _ => Vec::new(),
        };
        for file in [&missing, &broken] {
            // One that is not there holds no keys yet.
            if setting == "AUTH_KEYS_FILE" && file == &missing {
                continue;
            }
            let env: Vec<_> =
                with.iter().chain(&[(setting, file.as_str())]).map(|(k, v)| (format!("CONNECTORS_GCP_{k}"), *v)).collect();
            let env: Vec<_> = env.iter().map(|(k, v)| (k.as_str(), *v)).collect();
            let (success, text) = run(&env);
            assert!(!success, "{setting}={file}");
            let expected = format!("landline: CONNECTORS_GCP_{setting}={file:?}: must be the path of a");
            assert!(text.lines().any(|line| line.starts_with(&expected)), "{setting}={file}: {text}");
        }
    }
}

/// C179
async fn a_busy_port_stops_the_start(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let port = fixture.nodes[0].address.port().to_string();
    let (success, text) = run(&[("CONNECTORS_GCP_PORT", &port)]);
    assert!(!success && text.contains(&port), "{text}");
}

/// Two servers on one folder would destroy it.
async fn a_second_server_can_not_open_the_same_folder(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let url = format!("embedded:{}", fixture.data().display());
    let (success, text) = run(&[("CONNECTORS_GCP_BROKER_URL", &url)]);
    assert!(!success && text.contains(&fixture.data().display().to_string()), "{text}");
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.assert_drained(&topic, &subscription).await;
}

/// C163
async fn the_root_path_answers_a_health_probe(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let address = fixture.nodes[0].address;
    assert_eq!(rest::get(address, "/").await.status, 200);
    assert_eq!(rest::send(address, "HEAD", "/", &[], "").await.status, 200);
    assert_eq!(rest::get(address, "/v1/projects/x/topics").await.status, 200);
}

/// C163
async fn the_health_service_reports_serving(backend: Backend) {
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
    let fixture = Fixture::start(backend).await;
    for node in &fixture.nodes {
        let mut client = HealthClient::new(channel(node.address));
        for service in ["", "google.pubsub.v1.Publisher", "google.pubsub.v1.Subscriber"] {
            let answer = client.check(HealthCheckRequest { service: service.into() }).await.unwrap().into_inner();
            assert_eq!(answer.status, ServingStatus::Serving as i32, "{service:?}");
        }
    }
}

/// C185
async fn unknown_methods_are_unimplemented(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    for path in ["/google.pubsub.v1.Publisher/NoSuchMethod", "/google.pubsub.v2.Publisher/CreateTopic", "/x.Y/Z"] {
        let mut grpc = tonic::client::Grpc::new(api.channel());
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<(), ()>::default();
        let answer = grpc.unary(tonic::Request::new(()), http::uri::PathAndQuery::from_static(path), codec).await;
        assert_eq!(answer.unwrap_err().code(), Code::Unimplemented, "{path}");
    }
    for (verb, path) in [("GET", "/v1/nonsense"), ("GET", "/v2/projects/p1/topics"), ("POST", "/v1/projects/p1/topics/t11:fly")] {
        assert_eq!(rest::send(api.address(), verb, path, &[], "").await.status, 404, "{verb} {path}");
    }
}

/// C161
async fn one_port_serves_every_protocol(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let (grpc, plain) = (fixture.api().await, fixture.api_over(Transport::Rest).await);
    let work = async |api: &Api| {
        let (topic, subscription) = api.pair().await;
        for _ in 0..20 {
            api.assert_drained(&topic, &subscription).await;
        }
    };
    let over_http2 = async {
        let stream = tokio::net::TcpStream::connect(grpc.address()).await.unwrap();
        let io = hyper_util::rt::TokioIo::new(stream);
        let executor = hyper_util::rt::TokioExecutor::new();
        let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..20 {
            let request = http::Request::get(format!("http://{}/v1/projects/x/topics", grpc.address()));
            let request = request.body(http_body_util::Empty::<bytes::Bytes>::new()).unwrap();
            assert_eq!(sender.send_request(request).await.unwrap().status(), 200);
        }
    };
    // A client that asks to go on in HTTP/2 may be answered in HTTP/1.1.
    let headers = [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "AAMAAABkAAQAAP__")];
    let upgrade = async {
        let answer = rest::send(grpc.address(), "GET", "/v1/projects/x/topics", &headers, "").await;
        assert_eq!(answer.status, 200);
    };
    tokio::join!(work(&grpc), work(&plain), over_http2, upgrade);
    let topics = grpc.ok(ListTopicsRequest { project: grpc.parent(), ..Default::default() }).await.topics;
    assert_eq!(topics.len(), 1);
}

/// The printed address is the one it listens on, also when the system chose the port.
#[tokio::test]
async fn a_port_of_zero_is_chosen_and_printed() {
    let folder = tempfile::tempdir().unwrap();
    let env = [("CONNECTORS_GCP_PORT", "0"), ("CONNECTORS_GCP_BROKER_URL", "memory:")];
    let env = env.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec();
    let node = Node::start(NodeSpec { wrapper: Vec::new(), env, log: folder.path().join("log") }).unwrap();
    assert_ne!(node.address.port(), 0);
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, node.address.port()));
    assert_eq!(rest::get(local, "/").await.status, 200);
    assert_ne!(ports::reserve(), node.address.port());
}
