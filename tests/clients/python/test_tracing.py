"""The server's spans in the traces that Google's client begins with OpenTelemetry switched on."""

import http.server
import queue
import threading
import time

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from conftest import Server

WAIT_SECONDS = 60


@pytest.fixture
def collector():
    """An OTLP collector: its address and the spans that came."""
    spans = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for group in request.resource_spans:
                for scope in group.scope_spans:
                    for span in scope.spans:
                        spans.put(span)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()


@pytest.fixture(scope="module")
def client_spans():
    """What the client records itself."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def test_the_server_s_spans_are_in_the_client_s_trace(tmp_path, monkeypatch, collector, client_spans):
    endpoint, spans = collector
    settings = {"OTLP_ENDPOINT": endpoint, "OTLP_PROTOCOL": "http", "OTLP_TRACES": "0", "OTLP_METRICS_SECONDS": "0"}
    server = Server(tmp_path, {f"CONNECTORS_GCP_{key}": value for key, value in settings.items()})
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.address)
    publisher = pubsub_v1.PublisherClient(
        publisher_options=pubsub_v1.types.PublisherOptions(enable_open_telemetry_tracing=True),
        credentials=AnonymousCredentials(),
    )
    subscriber = pubsub_v1.SubscriberClient(
        subscriber_options=pubsub_v1.types.SubscriberOptions(enable_open_telemetry_tracing=True),
        credentials=AnonymousCredentials(),
    )
    topic = publisher.topic_path("demo", "orders")
    subscription = subscriber.subscription_path("demo", "billing")
    publisher.create_topic(name=topic)
    subscriber.create_subscription(request={"name": subscription, "topic": topic})

    acked = queue.Queue()

    def handle(message):
        message.ack()
        acked.put(message.message_id)

    future = subscriber.subscribe(subscription, callback=handle)
    message_id = publisher.publish(topic, b"traced").result(timeout=WAIT_SECONDS)
    assert acked.get(timeout=WAIT_SECONDS) == message_id

    # The client also extends deadlines when and as often as it likes.
    found = {}
    deadline = time.monotonic() + WAIT_SECONDS
    while not {"send orders", "receive billing", "ack billing"} <= set(found):
        span = spans.get(timeout=deadline - time.monotonic())
        found.setdefault(span.name, span)
    future.cancel()
    future.result(timeout=WAIT_SECONDS)
    server.kill()

    created = next(span for span in client_spans.get_finished_spans() if span.name == "orders create")
    for name, span in found.items():
        assert span.trace_id == created.context.trace_id.to_bytes(16, "big"), name
        assert any(a.key == "messaging.message.id" and a.value.string_value == message_id for a in span.attributes), name
    parent = created.context.span_id.to_bytes(8, "big")
    assert found["send orders"].parent_span_id == parent
    assert found["receive billing"].parent_span_id == parent
    assert found["ack billing"].parent_span_id == found["receive billing"].span_id
