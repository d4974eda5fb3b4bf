"""A landline server for the tests of Google's Python client."""

import os
import pathlib
import queue
import subprocess
import threading
import uuid

import grpc
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

READY = "landline listening on "


class Server:
    """One server process with the embedded broker in a folder of its own."""

    def __init__(self, folder: pathlib.Path, settings: dict[str, str]):
        self.folder = folder
        self.settings = settings
        self.port = "0"
        self.process = None
        self.start()

    def start(self) -> None:
        """Starts the process, on the port it had before if there was one."""
        settings = {
            "CONNECTORS_GCP_BROKER_URL": f"embedded:{self.folder / 'data'}",
            "CONNECTORS_GCP_PORT": self.port,
            **self.settings,
        }
        with open(self.folder / "server.log", "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [os.environ["LANDLINE_BINARY"]],
                env={**os.environ, **settings},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        lines = queue.Queue()
        reader = threading.Thread(target=self._read, args=(self.process.stdout, lines), daemon=True)
        reader.start()
        line = lines.get(timeout=60)
        assert line.startswith(READY), line
        self.port = line.strip().rsplit(":", 1)[1]

    @staticmethod
    def _read(stdout, lines) -> None:
        for line in stdout:
            lines.put(line)
        lines.put("the server ended")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Ends the process as a crash does."""
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server that all tests share which don't kill it."""
    started = Server(tmp_path_factory.mktemp("landline"), {})
    yield started
    started.kill()


@pytest.fixture
def own_server(tmp_path):
    """A server of the test's own."""
    started = Server(tmp_path, {})
    yield started
    started.kill()


class Clients:
    """Publisher and subscriber of one server, in a project of their own."""

    def __init__(self, address: str, **publisher_options):
        self.project = f"project-{uuid.uuid4().hex[:12]}"
        os.environ["PUBSUB_EMULATOR_HOST"] = address
        self.publisher = pubsub_v1.PublisherClient(
            publisher_options=pubsub_v1.types.PublisherOptions(**publisher_options),
            credentials=AnonymousCredentials(),
        )
        self.subscriber = pubsub_v1.SubscriberClient(credentials=AnonymousCredentials())

    def receive_without_limit(self):
        """Takes a subscriber whose channel has no bound: where PUBSUB_EMULATOR_HOST makes it, it has gRPC's of 4 MiB."""
        options = [("grpc.max_receive_message_length", -1)]
        channel = grpc.insecure_channel(os.environ["PUBSUB_EMULATOR_HOST"], options)
        self.subscriber = pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))

    def pair(self, **subscription):
        """A topic and a subscription of it."""
        topic = self.publisher.topic_path(self.project, "orders")
        name = self.subscriber.subscription_path(self.project, "billing")
        self.publisher.create_topic(name=topic)
        self.subscriber.create_subscription(request={"name": name, "topic": topic, **subscription})
        return topic, name

    def pull_now(self, name: str, count: int = 100):
        request = {"subscription": name, "max_messages": count, "return_immediately": True}
        return self.subscriber.pull(request=request).received_messages


@pytest.fixture
def clients(server):
    made = Clients(server.address)
    yield made
    made.subscriber.close()


@pytest.fixture
def ordered_clients(server):
    made = Clients(server.address, enable_message_ordering=True)
    yield made
    made.subscriber.close()


@pytest.fixture
def own_clients(own_server):
    made = Clients(own_server.address)
    yield made
    made.subscriber.close()


class Inbox:
    """Collects what a streaming pull delivers."""

    def __init__(self, clients: Clients, subscription: str, handle=None, **options):
        self.messages = queue.Queue()
        handle = handle or (lambda message: message.ack())

        def callback(message):
            handle(message)
            self.messages.put(message)

        self.future = clients.subscriber.subscribe(subscription, callback=callback, **options)

    def take(self, count: int, timeout: float = 30.0):
        return [self.messages.get(timeout=timeout) for _ in range(count)]

    def close(self) -> None:
        self.future.cancel()
        self.future.result(timeout=30)


@pytest.fixture
def inbox():
    """Opens inboxes and closes them after the test."""
    opened = []

    def open_inbox(*args, **kwargs):
        opened.append(Inbox(*args, **kwargs))
        return opened[-1]

    yield open_inbox
    for each in opened:
        each.close()
