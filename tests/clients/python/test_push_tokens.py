"""Push over HTTPS, and the tokens it carries, verified by Google's own library against the server's keys."""

import datetime
import http.server
import ipaddress
import json
import queue
import ssl
import threading
import urllib.request

import google.auth.transport.requests
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1
from google.oauth2 import id_token

from conftest import Server

EMAIL = "pusher@demo.iam.gserviceaccount.com"
WAIT_SECONDS = 60


def certificate(name, key, issuer, issuer_key, is_authority):
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if not is_authority:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def pem(item) -> bytes:
    if isinstance(item, x509.Certificate):
        return item.public_bytes(serialization.Encoding.PEM)
    return item.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A folder with the certificate of an authority (ca.pem), and a certificate and key for localhost (server.pem)."""
    folder = tmp_path_factory.mktemp("certificates")
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
    server_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    (folder / "ca.pem").write_bytes(pem(certificate(name, key, name, key, True)))
    own = certificate(server_name, server_key, name, key, False)
    (folder / "server.pem").write_bytes(pem(server_key) + pem(own))
    return folder


class Endpoint:
    """An HTTPS endpoint that keeps what it gets."""

    def __init__(self, folder):
        self.requests = queue.Queue()
        self.failures = queue.Queue()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.requests.put((dict(self.headers.items()), json.loads(body)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *args):
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")

        class HttpsServer(http.server.ThreadingHTTPServer):
            def finish_request(self, request, client_address):
                try:
                    secured = context.wrap_socket(request, server_side=True)
                except (ssl.SSLError, OSError) as error:
                    outer.failures.put(error)
                    return
                Handler(secured, client_address, self)

        self.server = HttpsServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.server.server_address[1]}/push?x=1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endpoint(authority):
    started = Endpoint(authority)
    yield started
    started.close()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a server with settings; answers it and its clients."""
    servers = []

    def started(settings):
        server = Server(tmp_path, settings)
        servers.append(server)
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.address)
        publisher = pubsub_v1.PublisherClient(credentials=AnonymousCredentials())
        subscriber = pubsub_v1.SubscriberClient(credentials=AnonymousCredentials())
        return server, publisher, subscriber

    yield started
    for server in servers:
        server.kill()


def push_to(publisher, subscriber, url, audience=""):
    topic, subscription = publisher.topic_path("demo", "orders"), subscriber.subscription_path("demo", "pushed")
    publisher.create_topic(name=topic)
    token = {"service_account_email": EMAIL, "audience": audience}
    push_config = {"push_endpoint": url, "oidc_token": token}
    subscriber.create_subscription(name=subscription, topic=topic, push_config=push_config)
    publisher.publish(topic, b"hello").result(timeout=WAIT_SECONDS)


def fetch(url):
    with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as response:
        return json.load(response)


def verify(server, token, audience):
    issuer = f"http://localhost:{server.port}"
    discovery = fetch(f"http://{server.address}/.well-known/openid-configuration")
    assert discovery["issuer"] == issuer
    request = google.auth.transport.requests.Request()
    claims = id_token.verify_token(token, request, audience=audience, certs_url=discovery["jwks_uri"])
    assert claims["iss"] == issuer
    return claims


@pytest.mark.parametrize("audience", ["", "https://orders.example"])
def test_a_push_over_https_carries_a_token_that_google_auth_verifies(start, authority, endpoint, audience):
    server, publisher, subscriber = start({"CONNECTORS_GCP_PUSH_CA_FILE": str(authority / "ca.pem")})
    push_to(publisher, subscriber, endpoint.url, audience)
    headers, body = endpoint.requests.get(timeout=WAIT_SECONDS)
    assert body["message"]["data"] == "aGVsbG8="
    scheme, token = headers["authorization"].split(" ")
    assert scheme == "Bearer"
    claims = verify(server, token, audience or endpoint.url)
    assert claims["email"] == EMAIL and claims["email_verified"] is True
    assert claims["exp"] - claims["iat"] == 3600
    assert claims["sub"] == claims["azp"]
    with pytest.raises(Exception, match="(?i)audience"):
        verify(server, token, "https://somebody.else")
    header, _, signature = token.split(".")
    other = token.replace(token.split(".")[1], "eyJhdWQiOiJ4In0")
    assert other != token
    with pytest.raises(Exception, match="(?i)signature"):
        verify(server, other, "x")


def test_an_endpoint_of_an_unknown_authority_gets_nothing(start, endpoint):
    _, publisher, subscriber = start({})
    push_to(publisher, subscriber, endpoint.url)
    for _ in range(2):
        endpoint.failures.get(timeout=WAIT_SECONDS)
    assert endpoint.requests.empty()


def test_private_networks_can_be_denied(start, authority, endpoint):
    settings = {
        "CONNECTORS_GCP_PUSH_CA_FILE": str(authority / "ca.pem"),
        "CONNECTORS_GCP_PUSH_INTERNAL_NETWORKS": "deny",
        "CONNECTORS_GCP_LOG": "landline::push=debug",
    }
    server, publisher, subscriber = start(settings)
    push_to(publisher, subscriber, endpoint.url)
    log = server.folder / "server.log"
    for _ in range(WAIT_SECONDS * 20):
        if log.read_text(encoding="utf-8").count("no address that pushes may go to") >= 2:
            break
        threading.Event().wait(0.05)
    else:
        pytest.fail(log.read_text(encoding="utf-8"))
    assert endpoint.requests.empty() and endpoint.failures.empty()


def test_keys_outlive_a_restart(start, authority, endpoint):
    server, publisher, subscriber = start({"CONNECTORS_GCP_PUSH_CA_FILE": str(authority / "ca.pem")})
    keys = fetch(f"http://{server.address}/.well-known/jwks.json")
    assert len(keys["keys"]) == 1
    push_to(publisher, subscriber, endpoint.url)
    headers, _ = endpoint.requests.get(timeout=WAIT_SECONDS)
    server.kill()
    server.start()
    assert fetch(f"http://{server.address}/.well-known/jwks.json") == keys
    verify(server, headers["authorization"].split(" ")[1], endpoint.url)
