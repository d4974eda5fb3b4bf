"""Google's client with a key that the server issued, over TLS, where authentication is enforced."""

import datetime
import ipaddress
import json
import os
import pathlib
import queue
import subprocess
import uuid

import grpc
import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.api_core import exceptions
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud import pubsub_v1
from google.oauth2 import service_account
from google.pubsub_v1.services.publisher import PublisherClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from conftest import Server


def write_certificate(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A certificate for localhost that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "server.crt", folder / "server.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return files


class Secured:
    """A server that enforces authentication, and keys for it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.project = f"project-{uuid.uuid4().hex[:12]}"
        self.certificate, key = write_certificate(folder)
        roles = {"admin": "admin", "reader": "viewer"}
        members = {name: f"serviceAccount:{name}@shop.example" for name in roles}
        bindings = [{"role": f"roles/pubsub.{role}", "members": [members[name]]} for name, role in roles.items()]
        policy = folder / "policy.json"
        policy.write_text(json.dumps({"projects": {self.project: bindings}}), encoding="utf-8")
        self.settings = {
            "CONNECTORS_GCP_TLS_CERT_FILE": str(self.certificate),
            "CONNECTORS_GCP_TLS_KEY_FILE": str(key),
            "CONNECTORS_GCP_AUTH": "enforce",
            "CONNECTORS_GCP_AUTH_POLICY_FILE": str(policy),
            "CONNECTORS_GCP_AUTH_KEYS_FILE": str(folder / "keys.json"),
        }
        self.server = Server(folder, self.settings)
        self.address = f"localhost:{self.server.port}"
        for name in roles:
            self.create_key(name)

    def create_key(self, name: str) -> None:
        subprocess.run(
            [os.environ["LANDLINE_BINARY"], "keys", "create", "--out", str(self.key(name))]
            + ["--email", f"{name}@shop.example", "--project", self.project, "--endpoint", self.address],
            env={**os.environ, **self.settings},
            check=True,
        )

    def key(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.json"


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """One server for all tests here: gRPC reads its roots once in the life of a process."""
    started = Secured(tmp_path_factory.mktemp("secured"))
    with pytest.MonkeyPatch.context() as patch:
        # What a user sets: where the server's root is, and no emulator.
        patch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(started.certificate))
        patch.setenv("REQUESTS_CA_BUNDLE", str(started.certificate))
        patch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
        yield started
    started.server.kill()


def wait_for_key(publisher, project: str) -> None:
    """The server reads the new keys within a second or two."""
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=30)
    while True:
        try:
            list(publisher.list_topics(request={"project": f"projects/{project}"}))
            return
        except exceptions.Unauthenticated:
            assert datetime.datetime.now() < deadline


def test_a_key_file_is_all_that_the_clients_need(secured, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(secured.key("admin")))
    options = {"api_endpoint": secured.address}
    publisher = pubsub_v1.PublisherClient(client_options=options)
    wait_for_key(publisher, secured.project)
    topic = publisher.topic_path(secured.project, "orders")
    publisher.create_topic(name=topic)
    with pubsub_v1.SubscriberClient(client_options=options) as subscriber:
        name = subscriber.subscription_path(secured.project, "billing")
        subscriber.create_subscription(name=name, topic=topic)
        received = queue.Queue()

        def take(message):
            message.ack()
            received.put(message.data)

        stream = subscriber.subscribe(name, callback=take)
        publisher.publish(topic, b"hello").result(timeout=30)
        assert received.get(timeout=30) == b"hello"
        stream.cancel()
        stream.result(timeout=30)

    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(secured.key("reader")))
    reader = pubsub_v1.PublisherClient(client_options=options)
    assert reader.get_topic(topic=topic).name == topic
    with pytest.raises(exceptions.PermissionDenied, match="pubsub.topics.publish"):
        reader.publish(topic, b"no").result(timeout=30)

    rest = PublisherClient(transport="rest", client_options=options)
    assert [found.name for found in rest.list_topics(project=f"projects/{secured.project}")] == [topic]
    with pytest.raises(exceptions.Forbidden, match="pubsub.topics.delete"):
        rest.delete_topic(topic=topic)
    with open(secured.certificate, "rb") as root:
        channel = grpc.secure_channel(secured.address, grpc.ssl_channel_credentials(root.read()))
    nobody = PublisherClient(transport=PublisherGrpcTransport(channel=channel))
    with pytest.raises(exceptions.Unauthenticated):
        nobody.get_topic(topic=topic)


def test_the_token_address_of_a_key_file_gives_tokens(secured):
    scopes = ["https://www.googleapis.com/auth/pubsub"]
    credentials = service_account.Credentials.from_service_account_file(secured.key("reader"), scopes=scopes)
    wait_for_key(pubsub_v1.PublisherClient(client_options={"api_endpoint": secured.address}, credentials=credentials), secured.project)
    exchanged = service_account.Credentials.from_service_account_file(secured.key("reader"), scopes=scopes)
    exchanged.refresh(Request())
    assert exchanged.valid
    session = AuthorizedSession(exchanged)
    url = f"https://{secured.address}/v1/projects/{secured.project}/topics"
    assert session.get(url).status_code == 200
    assert session.put(f"{url}/more", json={}).status_code == 403
    assert requests.get(url, timeout=30).status_code == 401
