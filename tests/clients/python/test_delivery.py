"""Publishing, streaming pull and settling through the high-level client."""

import threading
import time

import pytest
from google.api_core import exceptions
from google.cloud import pubsub_v1
from google.cloud.pubsub_v1.subscriber import exceptions as subscriber_exceptions

INVALID = subscriber_exceptions.AcknowledgeStatus.INVALID_ACK_ID
SUCCESS = subscriber_exceptions.AcknowledgeStatus.SUCCESS


def publish(clients, topic, texts, **attributes):
    futures = [clients.publisher.publish(topic, text.encode(), **attributes) for text in texts]
    return [future.result(timeout=30) for future in futures]


def test_flow_control_lets_every_message_through(clients, inbox):
    topic, name = clients.pair()
    outstanding, most, lock = 0, 0, threading.Lock()

    def handle(message):
        nonlocal outstanding, most
        with lock:
            outstanding += 1
            most = max(most, outstanding)
        time.sleep(0.001)
        with lock:
            outstanding -= 1
        message.ack()

    box = inbox(clients, name, handle, flow_control=pubsub_v1.types.FlowControl(max_messages=10))
    ids = publish(clients, topic, [str(n) for n in range(500)], origin="test")
    received = box.take(500)
    assert {message.message_id for message in received} == set(ids)
    assert most <= 10
    assert received[0].attributes["origin"] == "test"
    assert received[0].delivery_attempt is None
    box.close()
    assert not clients.pull_now(name)


def test_a_nacked_message_comes_again(clients, inbox):
    topic, name = clients.pair()
    seen = []

    def handle(message):
        seen.append(message.message_id)
        message.nack() if len(seen) == 1 else message.ack()

    box = inbox(clients, name, handle)
    publish(clients, topic, ["m1"])
    first, second = box.take(2)
    assert first.message_id == second.message_id and first.ack_id != second.ack_id


def test_a_message_is_kept_while_its_handler_works(clients, inbox):
    """The client extends the lease; the subscription's own deadline is 10 s."""
    topic, name = clients.pair()
    box = inbox(clients, name, lambda message: None)
    publish(clients, topic, ["m1"])
    (message,) = box.take(1)
    # Well beyond the 10 s: only the client's extensions keep it.
    time.sleep(14)
    assert box.messages.empty()
    message.ack()
    box.close()
    assert not clients.pull_now(name)


def test_ordered_messages_arrive_in_order(ordered_clients, inbox):
    topic, name = ordered_clients.pair(enable_message_ordering=True)
    box = inbox(ordered_clients, name)
    for number in range(50):
        for key in ["a", "b", "c"]:
            ordered_clients.publisher.publish(topic, str(number).encode(), ordering_key=key)
    got = {}
    for message in box.take(150):
        got.setdefault(message.ordering_key, []).append(int(message.data))
    assert got == {key: list(range(50)) for key in ["a", "b", "c"]}


def test_exactly_once_acks_are_confirmed(clients, inbox):
    topic, name = clients.pair(enable_exactly_once_delivery=True)
    results = []

    def handle(message):
        results.append(message.ack_with_response())

    box = inbox(clients, name, handle)
    ids = publish(clients, topic, [str(n) for n in range(100)])
    received = box.take(100)
    assert {message.message_id for message in received} == set(ids)
    assert [result.result(timeout=30) for result in results] == [SUCCESS] * 100
    box.close()
    assert not clients.pull_now(name)


def test_an_exactly_once_ack_of_a_lost_lease_fails_alone(clients, inbox):
    topic, name = clients.pair(enable_exactly_once_delivery=True)
    box = inbox(clients, name, lambda message: None)
    publish(clients, topic, ["lost", "kept"])
    lost, kept = sorted(box.take(2), key=lambda message: message.data, reverse=True)
    assert (lost.data, kept.data) == (b"lost", b"kept")
    # Behind the client's back the lease goes away.
    clients.subscriber.modify_ack_deadline(subscription=name, ack_ids=[lost.ack_id], ack_deadline_seconds=0)
    (again,) = box.take(1)
    # All of them in one request, as the client batches them.
    futures = [lost.ack_with_response(), kept.ack_with_response(), again.ack_with_response()]
    with pytest.raises(subscriber_exceptions.AcknowledgeError) as failure:
        futures[0].result(timeout=60)
    assert failure.value.error_code == INVALID
    assert futures[1].result(timeout=60) == SUCCESS
    assert futures[2].result(timeout=60) == SUCCESS
    with pytest.raises(subscriber_exceptions.AcknowledgeError):
        lost.modify_ack_deadline_with_response(30).result(timeout=60)
    box.close()
    assert not clients.pull_now(name)


def test_the_lost_leases_among_many_fail_alone(clients, inbox):
    """Too many ids for the metadata that the client's channel takes."""
    topic, name = clients.pair(enable_exactly_once_delivery=True, ack_deadline_seconds=60)
    box = inbox(clients, name, lambda message: None)
    publish(clients, topic, [str(n) for n in range(200)])
    received = box.take(200)
    lost = {message.ack_id for message in received[::5]}
    clients.subscriber.modify_ack_deadline(subscription=name, ack_ids=list(lost), ack_deadline_seconds=0)
    again = box.take(len(lost))
    futures = {message.ack_id: message.ack_with_response() for message in received + again}
    failed = {ack_id for ack_id, future in futures.items() if future.exception(timeout=60)}
    assert failed == lost
    assert {futures[ack_id].exception().error_code for ack_id in lost} == {INVALID}
    box.close()
    assert not clients.pull_now(name)


def test_an_exactly_once_nack_is_confirmed(clients, inbox):
    topic, name = clients.pair(enable_exactly_once_delivery=True)
    seen, results = [], []

    def handle(message):
        seen.append(message.message_id)
        results.append(message.nack_with_response() if len(seen) == 1 else message.ack_with_response())

    box = inbox(clients, name, handle)
    publish(clients, topic, ["m1"])
    box.take(2)
    assert [result.result(timeout=30) for result in results] == [SUCCESS, SUCCESS]


def test_delivery_attempts_and_dead_letters(clients, inbox):
    dead = clients.publisher.topic_path(clients.project, "dead")
    graveyard = clients.subscriber.subscription_path(clients.project, "graveyard")
    clients.publisher.create_topic(name=dead)
    clients.subscriber.create_subscription(name=graveyard, topic=dead)
    topic, name = clients.pair(dead_letter_policy={"dead_letter_topic": dead, "max_delivery_attempts": 5})
    box = inbox(clients, name, lambda message: message.nack())
    publish(clients, topic, ["m1"])
    assert [message.delivery_attempt for message in box.take(5)] == [1, 2, 3, 4, 5]
    (buried,) = inbox(clients, graveyard).take(1)
    assert buried.data == b"m1"
    assert buried.attributes["CloudPubSubDeadLetterSourceSubscription"] == "billing"


def test_large_messages_travel_both_ways(clients, inbox):
    clients.receive_without_limit()
    topic, name = clients.pair()
    box = inbox(clients, name)
    for size in [4 << 20, 9_999_000]:
        clients.publisher.publish(topic, b"x" * size).result(timeout=60)
        (message,) = box.take(1)
        assert len(message.data) == size


def test_an_idle_stream_stays_open(clients, inbox):
    """The client's heartbeat comes every 30 s; the stream outlives it."""
    topic, name = clients.pair()
    box = inbox(clients, name)
    time.sleep(35)
    assert box.future.running()
    before = time.monotonic()
    publish(clients, topic, ["m1"])
    box.take(1)
    assert time.monotonic() - before < 3


def test_a_pull_of_nothing_is_no_error(clients):
    _, name = clients.pair()
    assert not clients.subscriber.pull(subscription=name, max_messages=3, timeout=8).received_messages
    with pytest.raises(exceptions.NotFound):
        missing = clients.subscriber.subscription_path(clients.project, "none")
        clients.subscriber.pull(subscription=missing, max_messages=1)


def test_a_missing_subscription_ends_the_stream_with_not_found(clients):
    missing = clients.subscriber.subscription_path(clients.project, "none")
    future = clients.subscriber.subscribe(missing, callback=lambda message: None)
    with pytest.raises(exceptions.NotFound):
        future.result(timeout=30)
