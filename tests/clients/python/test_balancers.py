"""Balancers pin a subscription to a node, so that the `node` scope of exactly-once delivery works behind them."""

import base64
import json
import urllib.parse
import urllib.request

import grpc
import pytest
from google.pubsub_v1 import AcknowledgeRequest, PullRequest, PullResponse

from cluster import Cluster, HAProxy, Nginx
from conftest import Clients

SUBSCRIPTIONS = 12


@pytest.fixture(params=[HAProxy, Nginx], ids=["haproxy", "nginx"])
def cluster(request, tmp_path):
    with Cluster(tmp_path, 2, {"CONNECTORS_GCP_EXACTLY_ONCE_SCOPE": "node"}) as made:
        made.behind(request.param)
        yield made


def pairs(clients, count=SUBSCRIPTIONS):
    """Topics with an exactly-once subscription each."""
    made = []
    for number in range(count):
        topic = clients.publisher.topic_path(clients.project, f"topic-{number}")
        name = clients.subscriber.subscription_path(clients.project, f"sub-{number}")
        clients.publisher.create_topic(name=topic)
        request = {"name": name, "topic": topic, "enable_exactly_once_delivery": True, "ack_deadline_seconds": 60}
        clients.subscriber.create_subscription(request=request)
        made.append((topic, name))
    return made


class Raw:
    """Calls with a routing header of the caller's choice."""

    def __init__(self, address: str):
        self.channel = grpc.insecure_channel(address)

    def call(self, method: str, request, header, parse=lambda raw: raw):
        call = self.channel.unary_unary(f"/google.pubsub.v1.Subscriber/{method}", type(request).serialize, parse)
        metadata = [("x-goog-request-params", header)] if header is not None else []
        return call(request, metadata=metadata, timeout=30)

    def pull(self, name: str, header):
        request = PullRequest(subscription=name, max_messages=1)
        return self.call("Pull", request, header, PullResponse.deserialize).received_messages

    def ack(self, name: str, ack_id: str, header) -> None:
        self.call("Acknowledge", AcknowledgeRequest(subscription=name, ack_ids=[ack_id]), header)

    def close(self):
        self.channel.close()


def spellings(name: str):
    encoded = urllib.parse.quote(name, safe="")
    return [
        f"subscription={name}",
        f"subscription={encoded}",
        f"subscription={encoded.replace('%2F', '%2f')}",
        f"&subscription={name}",
        f"&subscription={encoded}",
        f"a=b&subscription={encoded}&c=d",
        f"topic=projects/p/topics/t&subscription={name}",
    ]


def test_every_spelling_of_the_header_leads_to_the_same_node(cluster):
    clients = Clients(cluster.balancer.address)
    raw = Raw(cluster.balancer.address)
    for topic, name in pairs(clients):
        ways = spellings(name)
        for _ in ways:
            clients.publisher.publish(topic, b"m").result(timeout=30)
        for number, way in enumerate(ways):
            received = raw.pull(name, way)
            assert len(received) == 1, way
            # In the `node` scope any other node refuses the id.
            raw.ack(name, received[0].ack_id, ways[(number + 1) % len(ways)])
    shares = [node.sent_messages() for node in cluster.nodes]
    assert sum(shares) == SUBSCRIPTIONS * len(spellings("s"))
    assert min(shares) > 0, f"one node got everything: {shares}"
    raw.close()
    clients.subscriber.close()


def test_without_the_header_a_client_stays_on_its_node(cluster):
    clients = Clients(cluster.balancer.address)
    raw = Raw(cluster.balancer.address)
    for topic, name in pairs(clients, 4):
        clients.publisher.publish(topic, b"m").result(timeout=30)
        received = raw.pull(name, None)
        raw.ack(name, received[0].ack_id, None)
    raw.close()
    clients.subscriber.close()


def test_another_node_would_refuse(cluster):
    """Without this the tests above would prove nothing."""
    clients = Clients(cluster.balancer.address)
    balanced = Raw(cluster.balancer.address)
    direct = [Raw(node.address) for node in cluster.nodes]
    topic, name = pairs(clients, 1)[0]
    clients.publisher.publish(topic, b"m").result(timeout=30)
    received = balanced.pull(name, f"subscription={name}")
    outcomes = []
    for node in direct:
        try:
            node.ack(name, received[0].ack_id, None)
            outcomes.append("acknowledged")
        except grpc.RpcError as error:
            outcomes.append(error.code().name)
    assert sorted(outcomes) == ["FAILED_PRECONDITION", "acknowledged"], outcomes
    for each in (balanced, *direct):
        each.close()
    clients.subscriber.close()


def test_rest_and_grpc_meet_on_one_node(cluster):
    clients = Clients(cluster.balancer.address)
    raw = Raw(cluster.balancer.address)
    for topic, name in pairs(clients, 6):
        clients.publisher.publish(topic, b"hello").result(timeout=30)
        url = f"http://{cluster.balancer.rest}/v1/{name}:pull"
        request = urllib.request.Request(url, b'{"maxMessages": 1}', {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            received = json.load(answer)["receivedMessages"]
        assert base64.b64decode(received[0]["message"]["data"]) == b"hello"
        raw.ack(name, received[0]["ackId"], f"subscription={urllib.parse.quote(name, safe='')}")
    raw.close()
    clients.subscriber.close()


def test_the_official_client_gets_every_ack_confirmed(cluster, inbox):
    clients = Clients(cluster.balancer.address)
    results = []
    boxes = []
    for topic, name in pairs(clients, 8):
        boxes.append(inbox(clients, name, lambda message: results.append(message.ack_with_response())))
        for number in range(25):
            clients.publisher.publish(topic, str(number).encode()).result(timeout=30)
    for box in boxes:
        box.take(25)
    # Raises what the server answered to an id it refused.
    for result in results:
        result.result(timeout=30)
    assert len(results) == 200
    assert min(node.sent_messages() for node in cluster.nodes) > 0
