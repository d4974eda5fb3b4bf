#!/usr/bin/env python3
"""Keeps one server under a steady load of every kind of subscription, and looks for loss, late deliveries and growth.

    tests/bench/soak.py [MINUTES] [--redis] [--rate N] [--out FOLDER]

It needs the packages of tests/clients/python/requirements.txt (`tests/clients/run python` sets them up below target/clients) and
a release build, or LANDLINE_BINARY. Redis runs with appendonly and appendfsync everysec. The folder, target/soak by default,
gets BROKER.json with every sample and BROKER.md with the summary, which is printed as well. The exit status is 1 when a
message was lost, came after a confirmed acknowledgement, out of order or where it does not belong, and when what the server
uses grows. Growth is judged from ten minutes on: the median of the last third against that of the third before.
"""

import argparse
import base64
import collections
import http.server
import json
import pathlib
import queue
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

import grpc
from google.protobuf.empty_pb2 import Empty
from google.pubsub_v1 import types as wrapped
from google.rpc import error_details_pb2, status_pb2

from servers import ROOT, Redis, cpu_seconds, folder_mb, free_port, landline, resident_mb, status_of

PROJECT = "projects/soak"
SERVICE = "/google.pubsub.v1"
TICK_SECONDS = 0.2
SAMPLE_SECONDS = 10
CYCLE_SECONDS = 60
LEASE_SECONDS = 60
# Of the leases that are left to expire.
SHORT_LEASE_SECONDS = 20
CALL_SECONDS = 30
RETENTION_SECONDS = 600
DRAIN_SECONDS = 180
KEYS = 100
MAX_ATTEMPTS = 5
JUDGED_MINUTES = 10
# What a figure may grow by between the two thirds: absolute, and as a share of it. The larger of the two holds.
ALLOWANCE = {
    "server_mb": (6, 0.10),
    "server_descriptors": (6, 0),
    "server_threads": (2, 0),
    "disk_mb": (64, 0.25),
    "redis_mb": (2, 0.10),
    "redis_keys": (10, 0.05),
    "redis_clients": (4, 0),
}
PUBLISHED, DELIVERED, ACKED = 1, 2, 4


def raw(name):
    return getattr(wrapped, name).pb()


PublishRequest, PublishResponse, Message = raw("PublishRequest"), raw("PublishResponse"), raw("PubsubMessage")
StreamRequest, StreamResponse = raw("StreamingPullRequest"), raw("StreamingPullResponse")
Subscription = raw("Subscription")


def refused(error):
    """Ack ids that an answer names as not carried out."""
    found = set()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    found |= set(info.metadata)
    return found


class Api:
    """A connection of its own, and the calls of the two services over it."""

    def __init__(self, address):
        # As Google's client has it: refused acknowledgements are named one by one in the metadata of the answer.
        options = [("grpc.max_metadata_size", 4 * 2**20), ("grpc.max_receive_message_length", -1)]
        options += [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=options)
        self.methods = {}

    def call(self, method, request, response=Empty, seconds=CALL_SECONDS):
        if method not in self.methods:
            self.methods[method] = self.channel.unary_unary(
                f"{SERVICE}.{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=response.FromString,
            )
        return self.methods[method](request, timeout=seconds)

    def topic(self, name):
        self.call("Publisher/CreateTopic", raw("Topic")(name=name), raw("Topic"))

    def subscription(self, **fields):
        self.call("Subscriber/CreateSubscription", Subscription(**fields), Subscription)

    def acknowledge(self, subscription, ack_ids):
        self.call("Subscriber/Acknowledge", raw("AcknowledgeRequest")(subscription=subscription, ack_ids=ack_ids))

    def nack(self, subscription, ack_ids):
        request = raw("ModifyAckDeadlineRequest")(subscription=subscription, ack_ids=ack_ids, ack_deadline_seconds=0)
        self.call("Subscriber/ModifyAckDeadline", request)

    def stream(self, subscription, seconds):
        """Responses of a StreamingPull, and what ends it."""
        first = StreamRequest(subscription=subscription, stream_ack_deadline_seconds=seconds, max_outstanding_messages=1000)
        ends = queue.SimpleQueue()

        def requests():
            yield first
            ends.get()

        opened = self.channel.stream_stream(
            f"{SERVICE}.Subscriber/StreamingPull",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=StreamResponse.FromString,
        )(requests())
        return opened, lambda: (ends.put(None), opened.cancel())

    def close(self):
        self.channel.close()


class Ledger:
    """What became of each message of one subscription."""

    def __init__(self, name, expects=lambda number: True):
        self.name, self.expects = name, expects
        self.lock = threading.Lock()
        self.states = bytearray()
        self.counts = collections.Counter()
        self.examples = []
        self.last_of_key = {}

    def room(self, end):
        with self.lock:
            self.states.extend(bytes(max(end - len(self.states), 0)))

    def published(self, numbers):
        with self.lock:
            for number in filter(self.expects, numbers):
                self.states[number] |= PUBLISHED
                self.counts["published"] += 1

    def violation(self, kind, number, detail=""):
        self.counts[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{time.strftime('%H:%M:%S')} {self.name}: {kind}, message {number} {detail}".strip())

    def delivered(self, number, key="", attempt=0):
        """Notes a delivery; true when it is the message's first."""
        with self.lock:
            self.counts["delivered"] += 1
            if number >= len(self.states) or not self.expects(number):
                self.violation("misplaced", number)
                return False
            state = self.states[number]
            if state & ACKED:
                self.violation("late", number, f"attempt {attempt}")
            if state & DELIVERED:
                self.counts["again"] += 1
                return False
            self.states[number] |= DELIVERED
            if key:
                if self.last_of_key.get(key, -1) > number:
                    self.violation("out of order", number, f"after {self.last_of_key[key]} of {key}")
                self.last_of_key[key] = number
            return True

    def acked(self, numbers):
        with self.lock:
            for number in numbers:
                if not self.states[number] & ACKED:
                    self.counts["acked"] += 1
                self.states[number] |= ACKED

    def missing(self):
        with self.lock:
            return [n for n, state in enumerate(self.states) if state & PUBLISHED and not state & ACKED]


class Run:
    """The load, its threads and what they met."""

    def __init__(self, address, rate):
        self.address, self.rate = address, rate
        self.publishing, self.receiving = threading.Event(), threading.Event()
        self.publishing.set()
        self.receiving.set()
        self.ledgers, self.threads, self.errors = [], [], collections.Counter()
        self.cycles, self.streams_ended, self.longest_stall = 0, 0, 0

    def start(self, work, *arguments):
        def guarded():
            try:
                work(*arguments)
            except Exception:  # whatever it is, it belongs into the report
                self.error(f"{work.__name__} ended: {traceback.format_exc(limit=3)}")

        thread = threading.Thread(target=guarded, daemon=True)
        self.threads.append(thread)
        thread.start()

    def error(self, text):
        self.errors[text] += 1
        if self.errors[text] == 1:
            print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    def call_error(self, what, error):
        self.error(f"{what}: {error.code().name}: {error.details()}")

    def ledger(self, name, expects=lambda number: True):
        ledger = Ledger(name, expects)
        self.ledgers.append(ledger)
        return ledger

    def publish(self, topic, rate, ledgers, keyed=False):
        """Publishes a steady rate, a request a tick and key."""
        api, number, due = Api(self.address), 0, time.monotonic()
        size = max(int(rate * TICK_SECONDS), 1)
        while self.publishing.is_set():
            due += size / rate
            time.sleep(max(due - time.monotonic(), 0))
            # A machine that is too busy shows here: what comes late then is not the server's fault alone.
            self.longest_stall = max(self.longest_stall, time.monotonic() - due)
            numbers = range(number, number + size)
            number += size
            for ledger in ledgers:
                ledger.room(number)
            key = f"key-{numbers[0] // size % KEYS}" if keyed else ""
            messages = [
                Message(
                    data=struct.pack(">Q", n) + b"x" * 92, ordering_key=key, attributes={"part": "tenth" if n % 10 == 0 else "rest"}
                )
                for n in numbers
            ]
            request = PublishRequest(topic=topic, messages=messages)
            while True:
                try:
                    api.call("Publisher/Publish", request, PublishResponse)
                    break
                except grpc.RpcError as error:
                    # It may be there nevertheless; sent again, it may be there twice.
                    self.call_error(f"Publish to {topic}", error)
            for ledger in ledgers:
                ledger.published(numbers)
        api.close()

    def receive(self, subscription, ledger, lease=LEASE_SECONDS, decide=lambda *_: "ack"):
        """Receives over a stream. `decide` gets a delivery's number, its key and whether it is the first, and says what to do
        with it. Acknowledgements are unary calls, because only those are confirmed."""
        api = Api(self.address)
        while self.receiving.is_set():
            stream, end = api.stream(subscription, lease)
            self.start(lambda: (self.wait_for_end(), end()))
            try:
                for response in stream:
                    self.settle(api, subscription, ledger, response.received_messages, decide)
            except grpc.RpcError as error:
                # Servers end streams after half an hour, with this text, as Google does.
                if self.receiving.is_set() and "unable to fulfill your request" not in (error.details() or ""):
                    self.call_error(f"StreamingPull of {subscription}", error)
                self.streams_ended += 1
        api.close()

    def wait_for_end(self):
        while self.receiving.is_set():
            time.sleep(0.5)

    def settle(self, api, subscription, ledger, received, decide):
        chosen = {"ack": [], "nack": [], "forget": []}
        for each in received:
            number = struct.unpack(">Q", each.message.data[:8])[0]
            first = ledger.delivered(number, each.message.ordering_key, each.delivery_attempt)
            chosen[decide(number, each.message.ordering_key, first)].append((number, each.ack_id))
        try:
            if chosen["ack"]:
                api.acknowledge(subscription, [ack_id for _, ack_id in chosen["ack"]])
                ledger.acked([number for number, _ in chosen["ack"]])
        except grpc.RpcError as error:
            self.call_error(f"Acknowledge on {subscription}", error)
            if named := refused(error):
                ledger.acked([number for number, ack_id in chosen["ack"] if ack_id not in named])
        try:
            if chosen["nack"]:
                api.nack(subscription, [ack_id for _, ack_id in chosen["nack"]])
        except grpc.RpcError as error:
            self.call_error(f"ModifyAckDeadline on {subscription}", error)

    # The kinds of load. Each makes its topic and its subscriptions and starts what works on them.

    def names(self, *names):
        return [f"{PROJECT}/subscriptions/{name}" for name in names]

    def plain(self, api):
        """Plain, with leases that expire, and a filter that lets a tenth pass."""
        topic = f"{PROJECT}/topics/plain"
        plain, filtered = self.names("plain", "filtered")
        api.topic(topic)
        api.subscription(name=plain, topic=topic, ack_deadline_seconds=SHORT_LEASE_SECONDS)
        api.subscription(name=filtered, topic=topic, ack_deadline_seconds=LEASE_SECONDS, filter='attributes.part = "tenth"')
        ledgers = [self.ledger("plain"), self.ledger("filtered", lambda number: number % 10 == 0)]
        forget = lambda number, _, first: "forget" if first and number % 1009 == 0 else "ack"  # noqa: E731
        self.start(self.receive, plain, ledgers[0], SHORT_LEASE_SECONDS, forget)
        self.start(self.receive, filtered, ledgers[1])
        self.start(self.publish, topic, self.rate * 0.5, ledgers)

    def ordered(self, api):
        topic, (name,) = f"{PROJECT}/topics/ordered", self.names("ordered")
        api.topic(topic)
        api.subscription(name=name, topic=topic, ack_deadline_seconds=LEASE_SECONDS, enable_message_ordering=True)
        ledger = self.ledger("ordered")
        nacked, accepted = {}, {}

        def decide(number, key, first):
            """What was under way behind a nacked message is left alone: it comes again behind that."""
            if number > nacked.get(key, number):
                return "forget"
            nacked.pop(key, None)
            if first and number % 499 == 0:
                nacked[key] = number
                return "nack"
            if number < accepted.get(key, 0):
                ledger.violation("out of order", number, f"came again after {accepted[key]} of {key}")
            accepted[key] = number
            return "ack"

        self.start(self.receive, name, ledger, LEASE_SECONDS, decide)
        self.start(self.publish, topic, self.rate * 0.25, [ledger], True)

    def exactly_once(self, api):
        topic, (name,) = f"{PROJECT}/topics/exactly-once", self.names("exactly-once")
        api.topic(topic)
        api.subscription(name=name, topic=topic, ack_deadline_seconds=LEASE_SECONDS, enable_exactly_once_delivery=True)
        ledger = self.ledger("exactly-once")
        nack = lambda number, _, first: "nack" if first and number % 499 == 0 else "ack"  # noqa: E731
        self.start(self.receive, name, ledger, LEASE_SECONDS, nack)
        self.start(self.publish, topic, self.rate * 0.15, [ledger])

    def dead_letters(self, api):
        """One message of 97 is nacked until it is a dead letter."""
        topic, dead = f"{PROJECT}/topics/retried", f"{PROJECT}/topics/dead"
        retried, letters = self.names("retried", "dead")
        api.topic(topic)
        api.topic(dead)
        api.subscription(
            name=retried,
            topic=topic,
            ack_deadline_seconds=LEASE_SECONDS,
            dead_letter_policy={"dead_letter_topic": dead, "max_delivery_attempts": MAX_ATTEMPTS},
            retry_policy={"minimum_backoff": {"seconds": 1}, "maximum_backoff": {"seconds": 3}},
        )
        api.subscription(name=letters, topic=dead, ack_deadline_seconds=LEASE_SECONDS)
        poison = lambda number: number % 97 == 0  # noqa: E731
        good, bad = self.ledger("retried", lambda number: not poison(number)), self.ledger("dead letters", poison)
        tries = Ledger("poison")

        class Both:
            """The subscription's deliveries: poison is told apart by its number."""

            def delivered(_, number, key, attempt):
                if poison(number):
                    if attempt > MAX_ATTEMPTS:
                        bad.violation("misplaced", number, f"attempt {attempt}")
                    tries.room(number + 1)
                    return tries.delivered(number, key, attempt)
                return good.delivered(number, key, attempt)

            def acked(_, numbers):
                good.acked(numbers)

        self.start(self.receive, retried, Both(), LEASE_SECONDS, lambda number, *_: "nack" if poison(number) else "ack")
        self.start(self.receive, letters, bad)
        self.start(self.publish, topic, self.rate * 0.09, [good, bad])

    def push(self, api):
        """Pushes to an endpoint of this process, which refuses one message of 50 once."""
        ledger, refused = self.ledger("push"), set()

        class Endpoint(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = struct.unpack(">Q", base64.b64decode(body["message"]["data"])[:8])[0]
                first = ledger.delivered(number)
                refuse = first and number % 50 == 0
                if not refuse:
                    ledger.acked([number])
                self.send_response(503 if refuse else 204)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Endpoint)
        self.start(server.serve_forever)
        topic, (name,) = f"{PROJECT}/topics/push", self.names("push")
        api.topic(topic)
        endpoint = f"http://127.0.0.1:{server.server_port}/push"
        api.subscription(name=name, topic=topic, ack_deadline_seconds=LEASE_SECONDS, push_config={"push_endpoint": endpoint})
        self.start(self.publish, topic, self.rate * 0.01, [ledger])

    def cycles_of_seeks(self, api):
        """Each minute: a snapshot, a replay of it, a purge; and a topic, a subscription and a connection that come and go."""
        topic, (name,) = f"{PROJECT}/topics/seek", self.names("seek")
        snapshot = f"{PROJECT}/snapshots/seek"
        api.topic(topic)
        # As short as may be, so that what is retained stops growing soon.
        kept = {"retain_acked_messages": True, "message_retention_duration": {"seconds": RETENTION_SECONDS}}
        api.subscription(name=name, topic=topic, ack_deadline_seconds=LEASE_SECONDS, **kept)
        ledger = self.ledger("seek")
        due = time.monotonic()
        while self.publishing.is_set():
            try:
                self.seek_once(api, topic, name, snapshot, ledger)
                self.churn_once(api, f"churn-{self.cycles}")
            except grpc.RpcError as error:
                self.call_error("seek or churn", error)
            self.cycles += 1
            due += CYCLE_SECONDS
            while self.publishing.is_set() and time.monotonic() < due:
                time.sleep(0.5)

    def seek_once(self, api, topic, name, snapshot, ledger):
        request = raw("CreateSnapshotRequest")(name=snapshot, subscription=name)
        api.call("Subscriber/CreateSnapshot", request, raw("Snapshot"))
        numbers = range(self.cycles * 200, self.cycles * 200 + 200)
        ledger.room(numbers.stop)
        messages = [Message(data=struct.pack(">Q", n)) for n in numbers]
        api.call("Publisher/Publish", PublishRequest(topic=topic, messages=messages), PublishResponse)
        ledger.published(numbers)
        self.take(api, name, ledger, set(numbers))
        api.call("Subscriber/Seek", raw("SeekRequest")(subscription=name, snapshot=snapshot), raw("SeekResponse"))
        # They come once more, all of them.
        with ledger.lock:
            for number in numbers:
                ledger.states[number] = PUBLISHED
            ledger.counts["acked"] -= len(numbers)
        self.take(api, name, ledger, set(numbers))
        # What is published before that time is acknowledged on arrival; the next round is later.
        purge = raw("SeekRequest")(subscription=name, time={"seconds": int(time.time()) + 2})
        api.call("Subscriber/Seek", purge, raw("SeekResponse"))
        api.call("Subscriber/DeleteSnapshot", raw("DeleteSnapshotRequest")(snapshot=snapshot))

    def take(self, api, name, ledger, wanted):
        """Pulls and acknowledges until all that is wanted was there."""
        until = time.monotonic() + CALL_SECONDS
        while wanted and time.monotonic() < until:
            pulled = api.call("Subscriber/Pull", raw("PullRequest")(subscription=name, max_messages=100), raw("PullResponse"))
            numbers = [struct.unpack(">Q", each.message.data[:8])[0] for each in pulled.received_messages]
            for number in numbers:
                ledger.delivered(number)
            if numbers:
                api.acknowledge(name, [each.ack_id for each in pulled.received_messages])
                ledger.acked(numbers)
            wanted -= set(numbers)
        for number in wanted:
            ledger.violation("lost", number, "by a seek")

    def churn_once(self, api, name):
        topic, subscription = f"{PROJECT}/topics/{name}", f"{PROJECT}/subscriptions/{name}"
        api.topic(topic)
        api.subscription(name=subscription, topic=topic)
        api.call("Publisher/Publish", PublishRequest(topic=topic, messages=[Message(data=bytes(1000))] * 10), PublishResponse)
        guest = Api(self.address)
        stream, end = guest.stream(subscription, LEASE_SECONDS)
        left = 10
        for response in stream:
            # Half of them are left behind unacknowledged, to go with the subscription.
            left -= len(response.received_messages)
            if left <= 0:
                break
        end()
        guest.close()
        api.call("Subscriber/DeleteSubscription", raw("DeleteSubscriptionRequest")(subscription=subscription))
        api.call("Publisher/DeleteTopic", raw("DeleteTopicRequest")(topic=topic))

    def begin(self):
        api = Api(self.address)
        for load in (self.plain, self.ordered, self.exactly_once, self.dead_letters, self.push):
            load(api)
        self.start(self.cycles_of_seeks, api)

    def end(self):
        """Stops publishing and waits until everything was acknowledged."""
        self.publishing.clear()
        until = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < until and any(ledger.missing() for ledger in self.ledgers):
            time.sleep(1)
        time.sleep(2)
        self.receiving.clear()
        for ledger in self.ledgers:
            # What a seek lost is counted there.
            for number in ledger.missing() if ledger.name != "seek" else []:
                ledger.violation("lost", number)


def sample(started, server, redis, data, admin, run):
    found = {
        "seconds": round(time.monotonic() - started),
        "server_mb": round(resident_mb(server.pid), 1),
        "server_descriptors": len(list(pathlib.Path(f"/proc/{server.pid}/fd").iterdir())),
        "server_threads": status_of(server.pid, "Threads"),
        "server_cpu_seconds": cpu_seconds(server.pid),
        "client_cpu_seconds": time.process_time(),
        "disk_mb": round(folder_mb(data), 1),
    }
    if redis and (info := redis.info()).get("used_memory"):
        found |= {
            "redis_mb": round(int(info["used_memory"]) / 2**20, 2),
            "redis_resident_mb": round(resident_mb(redis.pid), 1),
            "redis_keys": redis.keys(),
            "redis_clients": int(info["connected_clients"]),
            "redis_cpu_seconds": cpu_seconds(redis.pid),
        }
    try:
        # The metrics are looked at as a monitor would do it.
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=CALL_SECONDS) as answer:
            found["metrics_bytes"] = len(answer.read())
    except OSError as error:
        run.error(f"metrics: {error}")
    return found


def growth(samples, minutes):
    """Rows of what grew: the figure, the two medians, whether it is too much."""
    last = samples[-1]["seconds"]
    third = [s for s in samples if last / 3 <= s["seconds"] < last * 2 / 3]
    end = [s for s in samples if s["seconds"] >= last * 2 / 3]
    for figure, (absolute, share) in ALLOWANCE.items():
        if figure not in samples[0] or not third or not end:
            continue
        before, after = (statistics.median(s[figure] for s in part if figure in s) for part in (third, end))
        too_much = minutes >= JUDGED_MINUTES and after - before > max(absolute, before * share)
        yield figure, before, after, max(s[figure] for s in samples if figure in s), too_much


def summary(broker, minutes, run, samples):
    wrong = ("lost", "late", "out of order", "misplaced")
    lines = [f"{minutes:g} minutes on {broker}, {run.rate} messages/s published, {run.cycles} rounds of seeks and churn"]
    lines += [f"longest stall of a publisher: {run.longest_stall:.1f} s; streams opened again: {run.streams_ended}", ""]
    lines += ["| subscription | published | acknowledged | came again | " + " | ".join(wrong) + " |", "|---" * 8 + "|"]
    failed = False
    for ledger in run.ledgers:
        counts = ledger.counts
        failed |= any(counts[kind] for kind in wrong)
        cells = [counts["published"], counts["acked"], counts["again"], *(counts[kind] for kind in wrong)]
        lines.append(f"| {ledger.name} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    lines += ["", "| figure | median of the middle third | of the last third | largest | |", "|---" * 5 + "|"]
    for figure, before, after, largest, too_much in growth(samples, minutes):
        failed |= too_much
        lines.append(f"| {figure} | {before:,.1f} | {after:,.1f} | {largest:,.1f} | {'GROWS' if too_much else ''} |")
    spent = samples[-1]["seconds"] - samples[0]["seconds"]
    for figure in ("server_cpu_seconds", "redis_cpu_seconds", "client_cpu_seconds"):
        if figure in samples[0] and spent:
            share = (samples[-1][figure] - samples[0][figure]) / spent
            lines.append(f"| {figure.removesuffix('_seconds')}, share of a core | | | {share:.3f} | |")
    lines += [""] + [example for ledger in run.ledgers for example in ledger.examples]
    lines += [f"{count} x {text}" for text, count in run.errors.items()]
    return "\n".join(lines).rstrip() + "\n", failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", nargs="?", type=float, default=60)
    parser.add_argument("--redis", action="store_true", help="on Redis instead of the embedded broker")
    parser.add_argument("--rate", type=int, default=2000, help="messages published a second, in all")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target" / "soak")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    broker = "redis" if options.redis else "embedded"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=options.out) as data, open(options.out / f"{broker}.log", "w") as log:
        redis = Redis(data, "everysec") if options.redis else None
        admin = free_port()
        url = f"redis://127.0.0.1:{redis.port}" if redis else f"embedded:{data}/data"
        server = landline(url, {"ADMIN_ADDRESS": f"127.0.0.1:{admin}"}, log)
        try:
            run, started, samples = Run(f"127.0.0.1:{server.port}", options.rate), time.monotonic(), []
            run.begin()
            while time.monotonic() - started < options.minutes * 60 and server.process.poll() is None:
                time.sleep(SAMPLE_SECONDS - (time.monotonic() - started) % SAMPLE_SECONDS)
                try:
                    samples.append(sample(started, server, redis, data, admin, run))
                except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                    run.error(f"sample: {error}")
            run.end()
            text, failed = summary(broker, options.minutes, run, samples)
            if server.process.poll() is not None:
                text, failed = f"{text}the server ended with {server.process.returncode}\n", True
        finally:
            server.stop()
            if redis:
                redis.stop()
    counts = {ledger.name: ledger.counts for ledger in run.ledgers}
    report = {"broker": broker, "minutes": options.minutes, "rate": options.rate, "counts": counts, "failed": failed}
    (options.out / f"{broker}.json").write_text(json.dumps({**report, "errors": run.errors, "samples": samples}))
    (options.out / f"{broker}.md").write_text(text)
    print(text, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
