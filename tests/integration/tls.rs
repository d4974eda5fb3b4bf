//! TLS on the shared port.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Output},
};

use http::Uri;
use landline::{
    api::proto::pubsub::{Topic, publisher_client::PublisherClient},
    tls::{Client, Trust},
};
use tempfile::TempDir;
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};

use crate::{
    fixture::{
        Backend, Fixture,
        certificates::{Authority, Files},
        node::binary,
        wait::{SOON, eventually},
    },
    for_one_backend,
};

for_one_backend!(
    grpc_and_rest_share_the_port_over_tls,
    a_changed_certificate_is_used_without_a_restart,
    a_client_without_a_certificate_is_let_in_only_where_it_is_optional,
    the_program_s_own_clients_speak_tls,
    a_client_certificate_says_who_calls,
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
