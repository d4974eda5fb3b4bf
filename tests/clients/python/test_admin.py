"""Administration through the generated clients, over gRPC and REST."""

import datetime
import uuid

import grpc
import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1
from google.pubsub_v1.services.publisher import PublisherClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport, PublisherRestTransport
from google.pubsub_v1.services.subscriber import SubscriberClient
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport, SubscriberRestTransport


@pytest.fixture(params=["grpc", "rest"])
def admin(request, server):
    """Generated publisher and subscriber clients and a project."""
    project = f"project-{uuid.uuid4().hex[:12]}"
    if request.param == "grpc":
        channel = grpc.insecure_channel(server.address)
        publisher = PublisherClient(transport=PublisherGrpcTransport(channel=channel))
        return publisher, SubscriberClient(transport=SubscriberGrpcTransport(channel=channel)), project
    options = {"host": server.address, "url_scheme": "http", "credentials": AnonymousCredentials()}
    publisher = PublisherClient(transport=PublisherRestTransport(**options))
    subscriber = SubscriberClient(transport=SubscriberRestTransport(**options))
    return publisher, subscriber, project


def test_topics(admin):
    publisher, _, project = admin
    name = f"projects/{project}/topics/orders"
    created = publisher.create_topic(request={"name": name, "labels": {"a": "1"}})
    assert publisher.get_topic(topic=name) == created
    # Over REST the client knows the HTTP status alone; what it raises over gRPC is a kind of it.
    with pytest.raises(exceptions.Conflict):
        publisher.create_topic(name=name)
    request = {"topic": {"name": name, "labels": {"b": "2"}}, "update_mask": {"paths": ["labels"]}}
    assert dict(publisher.update_topic(request=request).labels) == {"b": "2"}
    for number in range(5):
        publisher.create_topic(name=f"{name}{number}")
    pages = list(publisher.list_topics(request={"project": f"projects/{project}", "page_size": 4}).pages)
    assert [len(page.topics) for page in pages] == [4, 2]
    publisher.delete_topic(topic=name)
    with pytest.raises(exceptions.NotFound):
        publisher.get_topic(topic=name)
    with pytest.raises(exceptions.BadRequest):
        publisher.create_topic(name=f"projects/{project}/topics/a")


def test_subscriptions(admin):
    publisher, subscriber, project = admin
    topic, name = f"projects/{project}/topics/orders", f"projects/{project}/subscriptions/billing"
    publisher.create_topic(name=topic)
    request = {"name": name, "topic": topic, "filter": 'attributes.a = "1"', "retry_policy": {"minimum_backoff": {"seconds": 20}}}
    created = subscriber.create_subscription(request=request)
    assert created.ack_deadline_seconds == 10
    assert created.retry_policy.maximum_backoff == datetime.timedelta(seconds=600)
    assert created.expiration_policy.ttl == datetime.timedelta(days=31)
    assert subscriber.get_subscription(subscription=name) == created
    request = {"subscription": {"name": name, "ack_deadline_seconds": 60}, "update_mask": {"paths": ["ack_deadline_seconds"]}}
    assert subscriber.update_subscription(request=request).ack_deadline_seconds == 60
    assert list(publisher.list_topic_subscriptions(topic=topic)) == [name]
    assert [s.name for s in subscriber.list_subscriptions(project=f"projects/{project}")] == [name]
    publisher.detach_subscription(request={"subscription": name})
    assert subscriber.get_subscription(subscription=name).detached
    subscriber.delete_subscription(subscription=name)
    with pytest.raises(exceptions.NotFound):
        subscriber.get_subscription(subscription=name)


def test_messages_without_streams(admin):
    publisher, subscriber, project = admin
    topic, name = f"projects/{project}/topics/orders", f"projects/{project}/subscriptions/billing"
    publisher.create_topic(name=topic)
    subscriber.create_subscription(name=name, topic=topic)
    message = pubsub_v1.types.PubsubMessage(data=b"\xff\x00x", attributes={"a": "1"})
    ids = publisher.publish(topic=topic, messages=[message]).message_ids
    (received,) = subscriber.pull(subscription=name, max_messages=5).received_messages
    assert [received.message.message_id] == list(ids)
    assert (received.message.data, dict(received.message.attributes)) == (b"\xff\x00x", {"a": "1"})
    subscriber.modify_ack_deadline(subscription=name, ack_ids=[received.ack_id], ack_deadline_seconds=60)
    subscriber.acknowledge(subscription=name, ack_ids=[received.ack_id])
    with pytest.raises(exceptions.BadRequest):
        subscriber.modify_ack_deadline(subscription=name, ack_ids=[received.ack_id], ack_deadline_seconds=601)


def test_snapshots_and_seek(admin):
    publisher, subscriber, project = admin
    topic, name = f"projects/{project}/topics/orders", f"projects/{project}/subscriptions/billing"
    publisher.create_topic(name=topic)
    subscriber.create_subscription(name=name, topic=topic)
    snapshot = f"projects/{project}/snapshots/before"
    created = subscriber.create_snapshot(name=snapshot, subscription=name)
    assert created.topic == topic
    assert subscriber.get_snapshot(snapshot=snapshot) == created
    assert list(publisher.list_topic_snapshots(topic=topic)) == [snapshot]
    assert [s.name for s in subscriber.list_snapshots(project=f"projects/{project}")] == [snapshot]
    subscriber.seek(request={"subscription": name, "snapshot": snapshot})
    subscriber.seek(request={"subscription": name, "time": datetime.datetime.now(datetime.timezone.utc)})
    subscriber.delete_snapshot(snapshot=snapshot)
    with pytest.raises(exceptions.NotFound):
        subscriber.seek(request={"subscription": name, "snapshot": snapshot})
