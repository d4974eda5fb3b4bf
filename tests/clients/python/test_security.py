"""Google's client over TLS where authentication is enforced, in the ways that the scenarios don't go: REST, exchanged tokens
and tokens of another issuer."""

import json
import pathlib
import sys
import time
import uuid

import jwt
import pytest
import requests
from cryptography.hazmat.primitives.asymmetric import rsa
from google.api_core import exceptions
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud import pubsub_v1
from google.oauth2 import credentials as oauth2_credentials
from google.oauth2 import service_account
from google.pubsub_v1.services.publisher import PublisherClient
from google.pubsub_v1.services.subscriber import SubscriberClient

from conftest import Server

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from brokers import Secured  # pylint: disable=wrong-import-position

ISSUER = "https://issuer.example"
SCOPES = ["https://www.googleapis.com/auth/pubsub"]
SUBJECT = "8a2f"


class Provider:
    """An identity provider whose keys are in a file."""

    def __init__(self, folder: pathlib.Path):
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        shown = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        self.file = folder / "jwks.json"
        self.file.write_text(json.dumps({"keys": [{**shown, "kid": "k1", "use": "sig", "alg": "RS256"}]}), encoding="utf-8")

    def credentials(self, **claims) -> oauth2_credentials.Credentials:
        """What a program holds that got a token from the provider."""
        now = int(time.time())
        claims = {"iss": ISSUER, "sub": SUBJECT, "aud": "landline", "iat": now, "exp": now + 600, **claims}
        return oauth2_credentials.Credentials(jwt.encode(claims, self.key, "RS256", headers={"kid": "k1"}))


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """One server for all tests here: gRPC reads its roots once in the life of a process."""
    folder = tmp_path_factory.mktemp("secured")
    made = Secured(folder)
    made.provider = Provider(folder)
    policy = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
    members = [f"principal://issuer.example/subject/{SUBJECT}"]
    policy["projects"]["*"].append({"role": "roles/pubsub.publisher", "members": members})
    (folder / "policy.json").write_text(json.dumps(policy), encoding="utf-8")
    more = {"CONNECTORS_GCP_AUTH_OIDC_ISSUERS": f"{ISSUER}={made.provider.file}", "CONNECTORS_GCP_AUTH_AUDIENCES": "landline"}
    server = Server(folder, {**made.settings, **more})
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
        for name, value in made.environment(server.address).items():
            patch.setenv(name, value)
        made.address = f"localhost:{server.port}"
        yield made
    server.kill()


@pytest.fixture
def project():
    return f"project-{uuid.uuid4().hex[:12]}"


def key(secured, name):
    return service_account.Credentials.from_service_account_file(secured.folder / f"{name}.json", scopes=SCOPES)


def test_the_rest_transport_does_what_is_allowed(secured, project):
    options = {"transport": "rest", "client_options": {"api_endpoint": secured.address}, "credentials": key(secured, "admin")}
    publisher, subscriber = PublisherClient(**options), SubscriberClient(**options)
    topic, name = f"projects/{project}/topics/orders", f"projects/{project}/subscriptions/billing"
    publisher.create_topic(name=topic)
    subscriber.create_subscription(name=name, topic=topic)
    sent = publisher.publish(topic=topic, messages=[{"data": b"\x00\xff", "attributes": {"a": "b"}}]).message_ids
    (received,) = subscriber.pull(subscription=name, max_messages=10).received_messages
    assert [received.message.message_id] == sent
    assert (received.message.data, dict(received.message.attributes)) == (b"\x00\xff", {"a": "b"})
    subscriber.acknowledge(subscription=name, ack_ids=[received.ack_id])
    assert [found.name for found in publisher.list_topics(project=f"projects/{project}")] == [topic]

    reader = PublisherClient(**{**options, "credentials": key(secured, "reader")})
    assert reader.get_topic(topic=topic).name == topic
    with pytest.raises(exceptions.Forbidden, match="pubsub.topics.delete"):
        reader.delete_topic(topic=topic)


def test_the_token_address_of_a_key_file_gives_tokens(secured, project):
    exchanged = key(secured, "reader")
    exchanged.refresh(Request())
    assert exchanged.valid
    session = AuthorizedSession(exchanged)
    url = f"https://{secured.address}/v1/projects/{project}/topics"
    assert session.get(url).status_code == 200
    assert session.put(f"{url}/more", json={}).status_code == 403
    assert requests.get(url, timeout=30).status_code == 401


def test_tokens_of_an_identity_provider_are_accepted(secured, project):
    options = {"api_endpoint": secured.address}
    topic = f"projects/{project}/topics/orders"
    pubsub_v1.PublisherClient(client_options=options, credentials=key(secured, "admin")).create_topic(name=topic)
    provider = secured.provider
    publisher = pubsub_v1.PublisherClient(client_options=options, credentials=provider.credentials())
    publisher.publish(topic, b"hello").result(timeout=30)
    with pytest.raises(exceptions.PermissionDenied, match="pubsub.topics.delete"):
        publisher.delete_topic(topic=topic)
    stranger = pubsub_v1.PublisherClient(client_options=options, credentials=provider.credentials(sub="other"))
    with pytest.raises(exceptions.PermissionDenied, match="pubsub.topics.get"):
        stranger.get_topic(topic=topic)
    for wrong in [{"aud": "another service"}, {"iss": "https://other.example"}, {"exp": int(time.time()) - 600}]:
        client = pubsub_v1.PublisherClient(client_options=options, credentials=provider.credentials(**wrong))
        with pytest.raises(exceptions.Unauthenticated):
            client.get_topic(topic=topic)
