//! TLS on the shared port.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Output},
};

use http::Uri;
use landline::{
    api::proto::pubsub::{
        PullRequest, Subscription, Topic, publisher_client::PublisherClient, subscriber_client::SubscriberClient,
    },
    auth::KeyFile,
    tls::{Client, Trust},
};
use tempfile::TempDir;
use tonic::{
    Code, Request, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

use crate::{
    fixture::{
        Backend, Fixture, Received,
        api::publish_request,
        certificates::{Authority, Files},
        message,
        node::binary,
        wait::{SOON, eventually},
    },
    for_one_backend,
    mirroring::Mirror,
};

for_one_backend!(
    grpc_and_rest_share_the_port_over_tls,
    a_changed_certificate_is_used_without_a_restart,
    a_client_without_a_certificate_is_let_in_only_where_it_is_optional,
    the_program_s_own_clients_speak_tls,
    a_client_certificate_says_who_calls,
    a_mirror_between_https_endpoints_shows_its_keys,
);

struct Setup {
    folder: TempDir,
    authority: Authority,
    server: Files,
}

impl Setup {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let server = authority.issue(folder.path(), "server");
        authority.write(folder.path(), "ca");
        Self { folder, authority, server }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    async fn start(&self, backend: Backend, more: &[(&str, &str)]) -> Fixture {
        let (certificate, key) = (self.server.certificate.to_str().unwrap(), self.server.key.to_str().unwrap());
        let settings = [&[("TLS_CERT_FILE", certificate), ("TLS_KEY_FILE", key)], more].concat();
        Fixture::start_with(backend, &settings).await
    }

    fn client(&self, identity: Option<&Files>) -> Client {
        let identity = identity.map(|files| (files.certificate.as_path(), files.key.as_path()));
        Client::new(&Trust::Roots(self.path().join("ca.pem")), identity).unwrap()
    }
}

async fn channel(client: &Client, address: SocketAddr) -> Result<Channel, tonic::transport::Error> {
    let client = client.clone();
    let connector = tower::service_fn(move |address: Uri| {
        let client = client.clone();
        async move { client.connect(address).await }
    });
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect_with_connector(connector).await
}

async fn create(channel: Channel, topic: &str) -> Result<(), tonic::Status> {
    let topic = Topic { name: format!("projects/tls/topics/{topic}"), ..Default::default() };
    PublisherClient::new(channel).create_topic(topic).await.map(|_| ())
}

fn rest(setup: &Setup) -> reqwest::ClientBuilder {
    let root = reqwest::Certificate::from_pem(setup.authority.pem().as_bytes()).unwrap();
    reqwest::Client::builder().tls_certs_only([root])
}

async fn grpc_and_rest_share_the_port_over_tls(backend: Backend) {
    let setup = Setup::new();
    let fixture = setup.start(backend, &[]).await;
    let address = fixture.nodes[0].address;
    create(channel(&setup.client(None), address).await.unwrap(), "orders").await.unwrap();

    let url = format!("https://{address}/v1/projects/tls/topics");
    for builder in [rest(&setup), rest(&setup).http1_only()] {
        let answer = builder.build().unwrap().get(&url).send().await.unwrap();
        assert!(answer.text().await.unwrap().contains("projects/tls/topics/orders"));
    }
    // Neither a client that does not trust the server nor one without TLS gets an answer.
    let foreign = Authority::new();
    let path = foreign.write(setup.path(), "foreign");
    assert!(channel(&Client::new(&Trust::Roots(path), None).unwrap(), address).await.is_err());
    assert!(reqwest::get(format!("http://{address}/")).await.is_err());
    assert!(!fixture.nodes[0].log_tail().contains("PRIVATE KEY"));
}

async fn a_changed_certificate_is_used_without_a_restart(backend: Backend) {
    let setup = Setup::new();
    let fixture = setup.start(backend, &[]).await;
    let address = fixture.nodes[0].address;
    let before = channel(&setup.client(None), address).await.unwrap();
    // The key alone does not fit the certificate; the server goes on with what it has.
    let (old, old_key) = (std::fs::read(&setup.server.certificate).unwrap(), std::fs::read(&setup.server.key).unwrap());
    setup.authority.issue(setup.path(), "server");
    let (new, new_key) = (std::fs::read(&setup.server.certificate).unwrap(), std::fs::read(&setup.server.key).unwrap());
    assert!(old != new && old_key != new_key);
    std::fs::write(&setup.server.certificate, "not a certificate").unwrap();
    eventually("the server complains", SOON, async || fixture.nodes[0].log_tail().contains("can't be used")).await;
    create(channel(&setup.client(None), address).await.unwrap(), "between").await.unwrap();

    std::fs::write(&setup.server.certificate, &new).unwrap();
    let exactly = || Client::new(&Trust::Exactly(setup.server.certificate.clone()), None).unwrap();
    eventually("the new certificate is shown", SOON, async || channel(&exactly(), address).await.is_ok()).await;
    // A connection outlives the certificate it began with.
    create(before, "after").await.unwrap();
}

async fn a_client_without_a_certificate_is_let_in_only_where_it_is_optional(backend: Backend) {
    let setup = Setup::new();
    let ca = setup.path().join("ca.pem");
    let own = setup.authority.issue(setup.path(), "orders");
    let foreign = Authority::new().issue(setup.path(), "foreign");
    for (auth, without) in [("optional", true), ("required", false)] {
        let fixture = setup.start(backend, &[("TLS_CLIENT_CA_FILE", ca.to_str().unwrap()), ("TLS_CLIENT_AUTH", auth)]).await;
        let address = fixture.nodes[0].address;
        // TLS 1.3 tells the client of its refusal after the handshake, on the first call.
        let reaches = async |identity: Option<&Files>| match channel(&setup.client(identity), address).await {
            Ok(channel) => create(channel, &format!("t-{}", identity.is_some())).await.is_ok(),
            Err(_) => false,
        };
        assert!(reaches(Some(&own)).await, "{auth}");
        assert!(!reaches(Some(&foreign)).await, "{auth}");
        assert_eq!(reaches(None).await, without, "{auth}");
    }
}

async fn a_client_certificate_says_who_calls(backend: Backend) {
    let setup = Setup::new();
    let ca = setup.path().join("ca.pem");
    let [orders, other] = ["orders", "other"].map(|name| setup.authority.issue(setup.path(), name));
    let settings = [
        ("TLS_CLIENT_CA_FILE", ca.to_str().unwrap()),
        ("TLS_CLIENT_AUTH", "optional"),
        ("AUTH", "enforce"),
        ("AUTH_ADMINS", "principal://tls/orders"),
    ];
    let fixture = setup.start(backend, &settings).await;
    let address = fixture.nodes[0].address;
    for (identity, expected) in
        [(Some(&orders), None), (Some(&other), Some(Code::PermissionDenied)), (None, Some(Code::Unauthenticated))]
    {
        let created = create(channel(&setup.client(identity), address).await.unwrap(), "orders").await;
        assert_eq!(created.err().map(|status| status.code()), expected);
    }
}

fn run(arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    let settings = settings.iter().map(|(key, value)| (format!("CONNECTORS_GCP_{key}"), value));
    Command::new(binary()).args(arguments).envs(settings).output().unwrap()
}

async fn the_program_s_own_clients_speak_tls(backend: Backend) {
    let setup = Setup::new();
    let fixture = setup.start(backend, &[]).await;
    let address = fixture.nodes[0].address.to_string();
    let ca = setup.path().join("ca.pem");
    let ca = ca.to_str().unwrap();
    let (certificate, key) = (setup.server.certificate.to_str().unwrap(), setup.server.key.to_str().unwrap());
    let port = fixture.nodes[0].address.port().to_string();
    let own = [("TLS_CERT_FILE", certificate), ("TLS_KEY_FILE", key), ("PORT", port.as_str())];
    let bench = ["bench", "publish", "--messages", "100", "--ca-file", ca, "--endpoint"];
    let endpoint = format!("https://{address}");
    let bench = [&bench[..], &[endpoint.as_str()]].concat();
    for (arguments, settings) in
        [(&["healthcheck"][..], &own[..]), (&["healthcheck", "--address", &address, "--ca-file", ca], &[]), (&bench, &[])]
    {
        let output = run(arguments, settings);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let strange = setup.authority.issue(setup.path(), "strange");
    let strange = [("TLS_CERT_FILE", strange.certificate.to_str().unwrap()), ("TLS_KEY_FILE", key), ("PORT", &port)];
    for (arguments, settings) in [(&["healthcheck", "--address", &address][..], &[][..]), (&["healthcheck"], &strange)] {
        assert!(!run(arguments, settings).status.success(), "{arguments:?}");
    }
}

/// A server that speaks TLS alone and enforces authentication, and its administrator.
struct Guarded {
    fixture: Fixture,
    channel: Channel,
    admin: KeyFile,
}

impl Guarded {
    /// `role` of project `tls` goes to the owner of the key file `NAME.json`, and an administrator has another.
    async fn start(setup: &Setup, backend: Backend, name: &str, role: &str) -> Self {
        let path = |name: String| setup.path().join(name).display().to_string();
        let (keys, policy) = (path(format!("{name}-keys.json")), path(format!("{name}-policy.json")));
        let (own, admin) = (path(format!("{name}.json")), path(format!("{name}-admin.json")));
        for (out, email) in [(&own, format!("{name}@tls.example")), (&admin, "admin@tls.example".into())] {
            let made = run(&["keys", "create", "--out", out, "--email", &email], &[("AUTH_KEYS_FILE", &keys)]);
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        }
        let binding = serde_json::json!({"role": role, "members": [format!("serviceAccount:{name}@tls.example")]});
        std::fs::write(&policy, serde_json::json!({"projects": {"tls": [binding]}}).to_string()).unwrap();
        let settings = [
            ("AUTH", "enforce"),
            ("AUTH_KEYS_FILE", keys.as_str()),
            ("AUTH_POLICY_FILE", policy.as_str()),
            ("AUTH_ADMINS", "serviceAccount:admin@tls.example"),
        ];
        let fixture = setup.start(backend, &settings).await;
        let channel = channel(&setup.client(None), fixture.nodes[0].address).await.unwrap();
        Self { fixture, channel, admin: KeyFile::read(Path::new(&admin)).unwrap() }
    }

    /// Calls of the administrator.
    fn service(&self) -> InterceptedService<Channel, impl FnMut(Request<()>) -> Result<Request<()>, Status> + use<>> {
        let token = format!("Bearer {}", self.admin.sign("https://pubsub.googleapis.com/").unwrap()).parse().unwrap();
        InterceptedService::new(self.channel.clone(), move |mut request: Request<()>| {
            request.metadata_mut().insert("authorization", tonic::metadata::MetadataValue::clone(&token));
            Ok(request)
        })
    }

    /// A topic and a subscription of it.
    async fn pair(&self, id: &str) -> (String, String) {
        let (topic, subscription) = (format!("projects/tls/topics/{id}"), format!("projects/tls/subscriptions/{id}"));
        let made = Topic { name: topic.clone(), ..Default::default() };
        PublisherClient::new(self.service()).create_topic(made).await.unwrap();
        let made = Subscription { name: subscription.clone(), topic: topic.clone(), ..Default::default() };
        SubscriberClient::new(self.service()).create_subscription(made).await.unwrap();
        (topic, subscription)
    }

    /// The next message's text.
    #[allow(deprecated)]
    async fn take(&self, subscription: &str) -> String {
        let request = PullRequest { subscription: subscription.to_owned(), max_messages: 1, return_immediately: false };
        let pulled = SubscriberClient::new(self.service()).pull(request).await.unwrap().into_inner();
        Received::decode(pulled.received_messages.into_iter().next().expect("a message")).text().to_owned()
    }

    fn url(&self) -> String {
        format!("https://localhost:{}", self.fixture.nodes[0].address.port())
    }
}

async fn a_mirror_between_https_endpoints_shows_its_keys(backend: Backend) {
    let setup = Setup::new();
    // No more than the mirror needs at either end.
    let source = Guarded::start(&setup, backend, "reader", "roles/pubsub.subscriber").await;
    let target = Guarded::start(&setup, backend, "writer", "roles/pubsub.publisher").await;
    let ((from, subscription), (to, arrived)) = (source.pair("orders").await, target.pair("copies").await);
    let publish = publish_request(&from, ["one", "two", "three"].map(message));
    PublisherClient::new(source.service()).publish(publish).await.unwrap();

    let path = |name: &str| setup.path().join(name).display().to_string();
    let (ca, reader, writer) = (path("ca.pem"), path("reader.json"), path("writer.json"));
    let (here, there) = (source.url(), target.url());
    let trust = ["--from-ca-file", &ca, "--to-ca-file", &ca];
    let ends = ["mirror", "--from", &here, "--to", &there, "--subscription", &subscription, "--topic", &to];
    for (more, told) in [
        (&["--to-key-file", &writer][..], format!("{subscription}: Unauthenticated")),
        (&["--from-key-file", &reader][..], format!("{to}: Unauthenticated")),
        (&["--from-key-file", &reader, "--to-key-file", &reader][..], format!("{to}: Unauthenticated")),
    ] {
        let output = run(&[&ends[..], &trust, more].concat(), &[]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && error.contains(&told), "{error}");
    }
    let keys = ["--from-key-file", &reader, "--to-key-file", &writer];
    // Without the authority nothing is said to the servers at all.
    let distrust = Mirror::start_with(&here, &there, &subscription, &to, setup.path(), &keys);
    eventually("the distrust is told", SOON, async || distrust.log().contains("certificate")).await;
    drop(distrust);

    let mirror = Mirror::start_with(&here, &there, &subscription, &to, setup.path(), &[&trust[..], &keys].concat());
    let mut texts = Vec::new();
    for _ in 0..3 {
        texts.push(target.take(&arrived).await);
    }
    texts.sort();
    assert_eq!(texts, ["one", "three", "two"]);
    let (status, log) = mirror.stop();
    assert!(status.success() && log.contains(" copied=3"), "{log}");
    assert!(!log.contains("PRIVATE") && !log.contains("eyJ"), "{log}");
}
