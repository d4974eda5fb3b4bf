"""The scenarios of ../scenarios.txt with Google's Python client."""

import datetime
import json
import logging
import os
import queue
import sys
import threading
import time
import urllib.request
import uuid

import grpc
from google.api_core import exceptions
from google.cloud import pubsub_v1
from google.cloud.pubsub_v1.subscriber import exceptions as subscriber_exceptions
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import Encoding, Schema, SchemaSettings

from conftest import Clients, Inbox

SCHEMA = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
SOON = 60
STREAMS = 20
# Longer than three minutes, after which many a proxy forgets a connection that nobody uses.
IDLE_SECONDS = 190
# Longest wait for a server that comes back, and for a message whose lease went down with it.
OUTAGE = 240
KILLS = 3
# Messages whose publish is confirmed between two kills.
BETWEEN_KILLS = 100
VIEWER = {"role": "roles/pubsub.viewer", "members": ["user:jane@shop.example"]}


class Run:
    """Clients of a project of its own, and the inboxes that are open."""

    def __init__(self, **publisher_options):
        self.clients = Clients(os.environ["PUBSUB_EMULATOR_HOST"], **publisher_options)
        self.inboxes = []

    def pair(self, **subscription):
        self.topic, self.name = self.clients.pair(**subscription)

    def publish(self, texts, **attributes):
        futures = [self.clients.publisher.publish(self.topic, text.encode(), **attributes) for text in texts]
        return [future.result(timeout=OUTAGE) for future in futures]

    def open(self, handle=None, name=None, **options):
        self.inboxes.append(Inbox(self.clients, name or self.name, handle, **options))
        return self.inboxes[-1]

    def confirmed(self, count):
        """Receives messages whose acks the server must confirm."""
        results = []
        inbox = self.open(lambda message: results.append(message.ack_with_response()))
        received = inbox.take(count, SOON)
        for result in results:
            result.result(timeout=SOON)
        self.inboxes.remove(inbox)
        inbox.close()
        return ids_of(received)

    def close(self):
        for inbox in self.inboxes:
            inbox.close()
        self.clients.subscriber.close()


def ids_of(messages):
    return sorted(message.message_id for message in messages)


def numbers(count, prefix=""):
    return [f"{prefix}{n}" for n in range(count)]


def batch(run):
    run.pair()
    ids = run.publish(numbers(1000))
    assert ids_of(run.open().take(1000, SOON)) == sorted(ids)


def ordered(run):
    run.pair(enable_message_ordering=True)
    inbox = run.open()
    for n in range(50):
        for key in "abc":
            run.clients.publisher.publish(run.topic, str(n).encode(), ordering_key=key)
    got = {}
    for message in inbox.take(150, SOON):
        got.setdefault(message.ordering_key, []).append(int(message.data))
    assert got == {key: list(range(50)) for key in "abc"}, got


def large(run):
    run.pair()
    # With PUBSUB_EMULATOR_HOST alone the client takes no more than 4 MiB, see the README.
    run.clients.receive_without_limit()
    run.publish(["x" * 9_999_000])
    (message,) = run.open().take(1, SOON)
    assert message.data == b"x" * 9_999_000


def compressed(run):
    run.pair()
    # The client has no option for it; its channel does.
    channel = grpc.insecure_channel(os.environ["PUBSUB_EMULATOR_HOST"], compression=grpc.Compression.Gzip)
    run.clients.publisher = pubsub_v1.PublisherClient(transport=PublisherGrpcTransport(channel=channel))
    ids = run.publish(["x" * 5_000] * 20)
    received = run.open().take(20, SOON)
    assert ids_of(received) == sorted(ids)
    assert all(message.data == b"x" * 5_000 for message in received)


def flow_control(run):
    run.pair()
    ids = run.publish(numbers(200))
    now, most, lock = 0, 0, threading.Lock()

    def handle(message):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1
        message.ack()

    inbox = run.open(handle, flow_control=pubsub_v1.types.FlowControl(max_messages=10))
    assert ids_of(inbox.take(200, SOON)) == sorted(ids)
    assert most <= 10, f"{most} were under way"


def many_streams(run):
    run.pair()
    inboxes = [run.open() for _ in range(STREAMS)]
    ids = run.publish(numbers(1000))
    got, until = [], time.monotonic() + SOON
    while len(got) < 1000 and time.monotonic() < until:
        for inbox in inboxes:
            while not inbox.messages.empty():
                got.append(inbox.messages.get())
        time.sleep(0.01)
    assert ids_of(got) == sorted(ids), f"{len(got)} messages came"


def nack(run):
    run.pair()
    (sent,) = run.publish(["m1"])
    seen = []

    def handle(message):
        seen.append(message)
        message.nack() if len(seen) == 1 else message.ack()

    assert ids_of(run.open(handle).take(2, SOON)) == [sent, sent]


def extend(run):
    run.pair()
    run.publish(["m1"])
    inbox = run.open(lambda message: (time.sleep(14), message.ack()))
    inbox.take(1, SOON)
    time.sleep(1)
    assert inbox.messages.empty(), "the message came again meanwhile"


def exactly_once(run):
    run.pair(enable_exactly_once_delivery=True)
    ids = run.publish(numbers(50))
    assert run.confirmed(50) == sorted(ids)


def lost_lease(run):
    run.pair(enable_exactly_once_delivery=True, retain_acked_messages=True)
    ids = run.publish(["m1", "m2"])
    inbox = run.open(lambda message: None)
    first, second = inbox.take(2, SOON)
    first.ack_with_response().result(timeout=SOON)
    # A seek ends every lease behind the client's back.
    rewind(run)
    try:
        second.ack_with_response().result(timeout=SOON)
        raise AssertionError("the ack of a lost lease was confirmed")
    except subscriber_exceptions.AcknowledgeError as error:
        assert error.error_code == subscriber_exceptions.AcknowledgeStatus.INVALID_ACK_ID, error
    again = inbox.take(2, SOON)
    for message in again:
        message.ack_with_response().result(timeout=SOON)
    assert ids_of(again) == sorted(ids)


def dead_letter(run):
    clients = run.clients
    dead = clients.publisher.topic_path(clients.project, "dead")
    graveyard = clients.subscriber.subscription_path(clients.project, "graveyard")
    clients.publisher.create_topic(name=dead)
    clients.subscriber.create_subscription(name=graveyard, topic=dead)
    run.pair(dead_letter_policy={"dead_letter_topic": dead, "max_delivery_attempts": 5})
    run.publish(["m1"])
    received = run.open(lambda message: message.nack()).take(5, SOON)
    assert [message.delivery_attempt for message in received] == [1, 2, 3, 4, 5]
    (buried,) = run.open(name=graveyard).take(1, SOON)
    assert buried.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5", buried.attributes


def filter_(run):
    run.pair(filter='attributes.color = "red"')
    red = []
    for _ in range(10):
        red += run.publish(["x"], color="red")
        run.publish(["x"], color="blue")
    assert ids_of(run.open().take(10, SOON)) == sorted(red)


def rewind(run):
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=1)
    run.clients.subscriber.seek(request={"subscription": run.name, "time": past})


def seek(run):
    rewound(run, lambda _: rewind(run))


def snapshot(run):
    rewound(run, lambda made: run.clients.subscriber.seek(request={"subscription": run.name, "snapshot": made}))


def rewound(run, back):
    run.pair(retain_acked_messages=True)
    made = f"projects/{run.clients.project}/snapshots/before"
    run.clients.subscriber.create_snapshot(name=made, subscription=run.name)
    ids = run.publish(numbers(3))
    inbox = run.open()
    inbox.take(3, SOON)
    back(made)
    assert ids_of(inbox.take(3, SOON)) == sorted(ids)


def detach(run):
    run.pair()
    run.clients.publisher.detach_subscription(request={"subscription": run.name})
    assert run.clients.subscriber.get_subscription(subscription=run.name).detached
    future = run.clients.subscriber.subscribe(run.name, callback=lambda message: None)
    try:
        future.result(timeout=SOON)
        raise AssertionError("it is served")
    except exceptions.FailedPrecondition:
        pass


def schema(run):
    clients = run.clients
    # The client for schemas takes the variable for the emulator as well.
    schemas = pubsub_v1.SchemaServiceClient()
    definition = Schema(name="", type_=Schema.Type.AVRO, definition=json.dumps(SCHEMA))
    made = schemas.create_schema(parent=f"projects/{clients.project}", schema=definition, schema_id="order")
    run.topic = clients.publisher.topic_path(clients.project, "orders")
    settings = SchemaSettings(schema=made.name, encoding=Encoding.JSON)
    clients.publisher.create_topic(request={"name": run.topic, "schema_settings": settings})
    run.publish(['{"id": 1}'])
    try:
        run.publish(['{"id": "one"}'])
        raise AssertionError("a message against the schema was taken")
    except exceptions.InvalidArgument:
        pass


def update(run):
    run.pair(labels={"team": "a"})
    mask = {"paths": ["ack_deadline_seconds", "labels"]}
    subscription = {"name": run.name, "ack_deadline_seconds": 42, "labels": {"team": "b"}, "filter": "not in the mask"}
    run.clients.subscriber.update_subscription(request={"subscription": subscription, "update_mask": mask})
    shown = run.clients.subscriber.get_subscription(subscription=run.name)
    assert (shown.ack_deadline_seconds, dict(shown.labels), shown.filter) == (42, {"team": "b"}, ""), shown
    topic = {"name": run.topic, "labels": {"team": "c"}}
    run.clients.publisher.update_topic(request={"topic": topic, "update_mask": {"paths": ["labels"]}})
    assert dict(run.clients.publisher.get_topic(topic=run.topic).labels) == {"team": "c"}


def iam(run):
    run.pair()
    publisher = run.clients.publisher
    publisher.set_iam_policy(request={"resource": run.topic, "policy": {"bindings": [VIEWER]}})
    policy = publisher.get_iam_policy(request={"resource": run.topic})
    assert [(each.role, list(each.members)) for each in policy.bindings] == [tuple(VIEWER.values())], policy
    assert policy.etag
    wanted = ["pubsub.topics.publish", "pubsub.topics.get"]
    tested = publisher.test_iam_permissions(request={"resource": run.topic, "permissions": wanted})
    assert sorted(tested.permissions) == sorted(wanted), tested


def idle(run):
    run.pair()
    inbox = run.open()
    time.sleep(IDLE_SECONDS)
    assert inbox.future.running()
    before = time.monotonic()
    run.publish(["m1"])
    inbox.take(1, SOON)
    took = time.monotonic() - before
    assert took < 15, f"it took {took} s"


def reconnect(run):
    """The server closes each stream after about 3 s."""
    run.pair()
    inbox = run.open()
    ids = []
    for number in range(24):
        ids += run.publish([str(number)])
        time.sleep(0.5)
    assert ids_of(inbox.take(24, SOON)) == sorted(ids)
    assert inbox.future.running()


def get(variable):
    with urllib.request.urlopen(os.environ[variable], timeout=OUTAGE):
        pass


def kill(run):
    """Publishes, receives and acks while servers are killed, and notes every ack that was confirmed."""
    run.pair(enable_exactly_once_delivery=True)
    confirmed, received, acked, returned = set(), set(), set(), set()
    stop, lock = threading.Event(), threading.Lock()

    def handle(message):
        with lock:
            received.add(message.message_id)
            if message.message_id in acked:
                returned.add(message.message_id)

        def settled(future):
            if future.exception() is None:
                with lock:
                    acked.add(message.message_id)

        message.ack_with_response().add_done_callback(settled)

    def publish():
        # The client repeats what fails meanwhile.
        while not stop.is_set():
            confirmed.update(run.publish(["x"]))

    def more():
        wanted = len(confirmed) + BETWEEN_KILLS
        wait_until(lambda: len(confirmed) >= wanted, "confirmed publishes")

    inbox = run.open(handle)
    publishers = [threading.Thread(target=publish) for _ in range(4)]
    for publisher in publishers:
        publisher.start()
    try:
        for _ in range(KILLS):
            more()
            get("LANDLINE_DISTURB")
        more()
    finally:
        stop.set()
        for publisher in publishers:
            publisher.join()
    # Not all acks are confirmed: the answer to one that was carried out may be lost with its server.
    wait_until(lambda: confirmed <= received, "the messages that are missing")
    assert not returned, f"{len(returned)} messages came after their confirmed ack"
    assert inbox.future.running()


def wait_until(condition, what, seconds=OUTAGE):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.01)


def key(_):
    address, keys = os.environ["LANDLINE_ADDRESS"], os.environ["LANDLINE_KEYS"]
    options = {"api_endpoint": address}
    project = f"project-{uuid.uuid4().hex[:12]}"
    topic, name = f"projects/{project}/topics/orders", f"projects/{project}/subscriptions/billing"
    os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = f"{keys}/admin.json"
    publisher = pubsub_v1.PublisherClient(client_options=options)
    publisher.create_topic(name=topic)
    with pubsub_v1.SubscriberClient(client_options=options) as subscriber:
        subscriber.create_subscription(name=name, topic=topic)
        received = queue.Queue()
        stream = subscriber.subscribe(name, callback=lambda message: (message.ack(), received.put(message.data)))
        publisher.publish(topic, b"hello").result(timeout=SOON)
        assert received.get(timeout=SOON) == b"hello"
        stream.cancel()
        stream.result(timeout=SOON)
    os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = f"{keys}/reader.json"
    reader = pubsub_v1.PublisherClient(client_options=options)
    assert reader.get_topic(topic=topic).name == topic
    refused(exceptions.PermissionDenied, lambda: reader.publish(topic, b"no").result(timeout=SOON), "pubsub.topics.publish")
    with open(os.environ["SSL_CERT_FILE"], "rb") as root:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(root.read()))
    nobody = pubsub_v1.PublisherClient(transport=PublisherGrpcTransport(channel=channel))
    refused(exceptions.Unauthenticated, lambda: nobody.get_topic(topic=topic))
    get("LANDLINE_DELETE_KEY")

    def is_refused():
        try:
            publisher.get_topic(topic=topic)
            return False
        except exceptions.Unauthenticated:
            return True

    wait_until(is_refused, "the end of the deleted key", SOON)


def refused(kind, call, text=""):
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


SCENARIOS = {
    scenario.__name__.strip("_"): scenario
    for scenario in [
        batch, ordered, compressed, large, flow_control, many_streams, nack, extend, exactly_once, lost_lease, dead_letter,
        filter_, seek, snapshot, detach, update, schema, iam, idle, reconnect, key, kill,
    ]
}


def main():
    # The client tells of every lease that was lost with a stack trace.
    logging.disable()
    for name in sys.argv[1:]:
        if name not in SCENARIOS:
            print("absent", name, flush=True)
            continue
        run = None if name == "key" else Run(enable_message_ordering=name == "ordered")
        try:
            SCENARIOS[name](run)
            print("ok", name, flush=True)
        except Exception as error:  # pylint: disable=broad-exception-caught
            print("failed", name, repr(error).replace("\n", " "), flush=True)
        if run:
            run.close()


if __name__ == "__main__":
    main()
