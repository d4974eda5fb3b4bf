"""The scenarios of ../scenarios.txt with Google's Python client."""

import datetime
import json
import os
import sys
import threading
import time
import urllib.request

from google.api_core import exceptions
from google.cloud import pubsub_v1
from google.cloud.pubsub_v1.subscriber import exceptions as subscriber_exceptions
from google.pubsub_v1.types import Encoding, Schema, SchemaSettings

from conftest import Clients, Inbox

SCHEMA = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
SOON = 60


class Run:
    """Clients of a project of its own, and the inboxes that are open."""

    def __init__(self, **publisher_options):
        self.clients = Clients(os.environ["PUBSUB_EMULATOR_HOST"], **publisher_options)
        self.inboxes = []

    def pair(self, **subscription):
        self.topic, self.name = self.clients.pair(**subscription)

    def publish(self, texts, **attributes):
        futures = [self.clients.publisher.publish(self.topic, text.encode(), **attributes) for text in texts]
        return [future.result(timeout=SOON) for future in futures]

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
    run.publish(["x" * 9_000_000])
    (message,) = run.open().take(1, SOON)
    assert message.data == b"x" * 9_000_000


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


def restart(run):
    run.pair(enable_exactly_once_delivery=True)
    before = run.publish(numbers(50, "before-"))
    assert run.confirmed(50) == sorted(before)
    kept = run.publish(numbers(50, "kept-"))
    with urllib.request.urlopen(os.environ["LANDLINE_RESTART"], timeout=SOON):
        pass
    after = run.publish(numbers(50, "after-"))
    assert run.confirmed(100) == sorted(kept + after)


SCENARIOS = {
    scenario.__name__.strip("_"): scenario
    for scenario in [
        batch, ordered, large, flow_control, nack, extend, exactly_once, lost_lease, dead_letter, filter_, seek, snapshot,
        detach, schema, restart,
    ]
}


def main():
    for name in sys.argv[1:]:
        if name not in SCENARIOS:
            print("absent", name, flush=True)
            continue
        run = Run(enable_message_ordering=name == "ordered")
        try:
            SCENARIOS[name](run)
            print("ok", name, flush=True)
        except Exception as error:  # pylint: disable=broad-exception-caught
            print("failed", name, repr(error).replace("\n", " "), flush=True)
        run.close()


if __name__ == "__main__":
    main()
