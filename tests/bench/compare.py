#!/usr/bin/env python3
"""Measures everything the README says of speed, and writes it into one table.

    cargo build --release && nice -n -20 tests/bench/compare.py [--quick] [--rounds N] [--seconds S]
        [--emulator DIR] [--table FILE] [--out FILE] [PART]...

The servers run beside each other and take turns, so that what else happens on the machine hits all of them: Landline without
and with syncs, Landline on Redis, Google's Java emulator where it is installed, and the floor, which is Landline's transport
with nothing behind it. Figures are medians over the rounds. The table goes to benches/performance.md unless --quick is given or
only some PARTs are asked for: speed, latency, delivery, backlog, streams, keys, seek, trips. --out writes every report as a line
of JSON. A scenario that fails puts its reason into the table. DIR is the emulator's folder, the one that holds
lib/cloud-pubsub-emulator-*.jar (default: the place of the Debian package google-cloud-cli-pubsub-emulator).
"""

import argparse
import asyncio
import contextlib
import glob
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request

from servers import BINARY, ROOT, Failed, Process, Redis, cpu_seconds, folder_mb, landline, resident_mb

EMULATOR = "/usr/lib/google-cloud-sdk/platform/pubsub-emulator"
TABLE = ROOT / "benches" / "performance.md"
FLOOR, FREE, SYNCED, REDIS, GOOGLE = "floor", "disk, no sync", "disk, fsync", "Redis", "Google's emulator"
# Servers that keep messages.
OURS = [FREE, SYNCED, REDIS]
LONGEST_SECONDS = 300
# Names, arguments, and what they are published as the first time; later rounds run for a set time.
SPEED = [
    (f"publish, {size}, {batch} a request", ["publish", "--batch", str(batch), "--bytes", str(count), "--publishers", str(at_once)])
    for size, count in (("100 B", 100), ("1 KB", 1000), ("10 KB", 10_000))
    for batch, at_once in ((1, 32), (10, 16), (100, 8), (1000, 4))
    # A request has at most 10 MB.
    if batch * count < 10_000_000
] + [
    ("receive and acknowledge, 100 B", ["drain", "--batch", "100", "--bytes", "100"]),
    ("receive and acknowledge, 1 KB", ["drain", "--batch", "100", "--bytes", "1000"]),
    ("end to end, 100 B, 100 a request", ["end-to-end", "--batch", "100", "--bytes", "100"]),
    ("end to end, 1 KB, 1 a request", ["end-to-end", "--batch", "1", "--bytes", "1000", "--publishers", "32"]),
    ("ordered, 1 key", ["ordered", "--batch", "100", "--bytes", "100", "--keys", "1"]),
    ("ordered, 100 keys", ["ordered", "--batch", "100", "--bytes", "100", "--keys", "100"]),
    ("ordered, 100,000 keys", ["ordered", "--batch", "100", "--bytes", "100", "--keys", "100000"]),
    ("filtered", ["filtered", "--batch", "100", "--bytes", "100"]),
    ("fan-out to 1", ["fan-out", "--batch", "100", "--bytes", "100", "--subscriptions", "1"]),
    ("fan-out to 10", ["fan-out", "--batch", "100", "--bytes", "100", "--subscriptions", "10"]),
    ("fan-out to 100", ["fan-out", "--batch", "100", "--bytes", "100", "--subscriptions", "100"]),
]
# What the floor can't do: it keeps nothing to be received later.
STORED = "drain"
LATENCY = [
    ("1 message a second", ["latency", "--bytes", "100", "--rate", "1", "--batch", "1"], 1, 8),
    ("1,000 a second, one a request", ["latency", "--bytes", "100", "--rate", "1000", "--batch", "1"], 1000, 3),
    ("50,000 a second, 50 a request", ["latency", "--bytes", "100", "--rate", "50000", "--batch", "50"], 50_000, 3),
]
# So many messages may be outstanding, where that is what is measured.
ROOM = {"MAX_OUTSTANDING_MESSAGES": "200000", "MAX_INFLIGHT_PER_SUBSCRIPTION": "200000"}


class Target:
    """A server with what is below it."""

    def __init__(self, name, server, redis=None):
        self.name, self.server, self.redis = name, server, redis
        time.sleep(1)
        self.idle_mb = resident_mb(server.pid)

    def bench(self, arguments, messages, seconds=LONGEST_SECONDS):
        """Runs a load and answers its report; beneath it the processor time of Redis a message."""
        if self.server.process.poll() is not None:
            raise Failed(f"the server ended with {self.server.process.returncode}")
        command = [str(BINARY), "bench", *arguments, "--messages", str(messages), "--pid", str(self.server.pid)]
        before = cpu_seconds(self.redis.pid) if self.redis else 0
        try:
            done = subprocess.run(
                [*command, "--endpoint", f"http://127.0.0.1:{self.server.port}"], capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {seconds} s") from None
        if done.returncode != 0:
            raise Failed(done.stderr.strip()[-160:])
        report = json.loads(done.stdout.strip().splitlines()[-1])
        for problem in ("lost", "out_of_order"):
            if report[problem]:
                raise Failed(f"{problem} {report[problem]}")
        if self.redis:
            count = max(report["published"], report["delivered"], 1)
            report["redis_cpu_us_per_message"] = (cpu_seconds(self.redis.pid) - before) * 1e6 / count
        return report

    def rest(self, method, path, body, seconds=LONGEST_SECONDS):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.server.port}/v1/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        try:
            return json.loads(urllib.request.urlopen(request, timeout=seconds).read())
        except urllib.error.HTTPError as error:
            raise Failed(f"{path}: {error.read()[:160]}") from None

    def stop(self):
        self.server.stop()
        if self.redis:
            self.redis.kill()


def start(name, folder, settings=None):
    """A fresh server on a fresh store."""
    folder = pathlib.Path(folder) / re.sub("[^a-z]", "", name.lower())
    if name == FLOOR:
        return Target(name, Process([str(BINARY), "floor"], {"CONNECTORS_GCP_PORT": "PORT", "CONNECTORS_GCP_BIND": "127.0.0.1"}))
    if name == REDIS:
        redis = Redis(folder, "everysec")
        return Target(name, landline(f"redis://127.0.0.1:{redis.port}", {"DURABILITY": "none", **(settings or {})}), redis)
    durability = "fsync" if name == SYNCED else "none"
    return Target(name, landline(f"embedded:{folder}", {"DURABILITY": durability, **(settings or {})}))


def emulator(folder):
    jars = glob.glob(f"{folder}/lib/cloud-pubsub-emulator-*.jar")
    if not jars:
        return None
    command = ["java", "-cp", jars[0], "com.google.cloud.pubsub.testing.v1.Main", "--host=127.0.0.1", "--port=PORT"]
    return Target(GOOGLE, Process(command))


@contextlib.contextmanager
def running(name, settings=None):
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        target = start(name, folder, settings)
        try:
            yield target
        finally:
            target.stop()


def processor(report):
    """Processor time a message, of the server and of the Redis beneath it."""
    return report["server_cpu_us_per_message"] + report.get("redis_cpu_us_per_message", 0)


def median(reports, figure):
    return statistics.median(figure(report) for report in reports)


def short(number):
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.2f}" if number < 10 else f"{number:.0f}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]) + "\n"


class Run:
    """What was measured so far."""

    def __init__(self, options):
        self.options = options
        self.rounds = 1 if options.quick else options.rounds
        self.seconds = 0.4 if options.quick else options.seconds
        self.text, self.reports = [], []
        # Figures that the goals are about.
        self.found = {}

    def say(self, text):
        print(text, flush=True)

    def add(self, title, text, *tables):
        self.text.append(f"## {title}\n\n{text}\n")
        self.text += tables
        self.say("\n" + "\n".join(self.text[-1 - len(tables) :]))

    def keep(self, part, server, report, **more):
        self.reports.append({"part": part, "server": server, **more, **report})
        return report

    def attempt(self, part, server, measure):
        """What `measure` answers, or the reason why there is nothing."""
        try:
            return measure()
        except (Failed, OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            self.say(f"{server}: {part}: {error}")
            self.reports.append({"part": part, "server": server, "error": str(error)})
            # Of an error with its sources the first says what happened.
            return "failed: " + str(error).removeprefix("e: ").split(", source:")[0]

    # Speed and latency: all servers beside each other.

    def turns(self, targets, scenarios, count):
        """Reports of each scenario and server. `count` says how many messages a run has, from the rate of the run before."""
        results = {}
        for name, arguments, *rest in scenarios:
            broken, rates = {}, {}
            for number in range(self.rounds + 1):
                for target in targets:
                    if target.name in broken or (target.name == FLOOR and arguments[0] == STORED):
                        continue
                    messages = count(arguments, rates.get(target.name), *rest)
                    done = self.attempt(name, target.name, lambda: target.bench(arguments, messages))
                    if isinstance(done, str):
                        broken[target.name] = done
                        continue
                    rates[target.name] = done["messages_per_second"]
                    if number:  # the first round warms up and tells how fast it goes
                        results.setdefault((name, target.name), []).append(self.keep(name, target.name, done, round=number))
            for server, reason in broken.items():
                results[name, server] = reason
            self.say("; ".join([name] + [f"{t.name} {self.speed_cell(results.get((name, t.name)))}" for t in targets]))
        return results

    def speed_cell(self, reports):
        if not reports or isinstance(reports, str):
            return reports or ""
        return f"{short(median(reports, lambda r: r['messages_per_second']))}/s, {short(median(reports, processor))} us"

    def speed(self, targets):
        def count(arguments, rate):
            batch = int(arguments[arguments.index("--batch") + 1])
            # Each message of a fan-out is delivered so many times, and rates are of deliveries.
            share = int(arguments[arguments.index("--subscriptions") + 1]) if "--subscriptions" in arguments else 1
            size = int(arguments[arguments.index("--bytes") + 1])
            # A backlog in memory, as the emulator has it, should not grow for ever.
            wanted = min((rate or 2000) * self.seconds / share, 2e9 / size / 2)
            return max(int(wanted // batch), 2) * batch

        results = self.turns(targets, SPEED, count)
        names = [target.name for target in targets]
        rows = [[name] + [self.speed_cell(results.get((name, server))) for server in names] for name, _ in SPEED]
        others = [server for server in names if server != FLOOR]

        def ratio(name, server, to):
            both = [results.get((name, each)) for each in (server, to)]
            if any(not each or isinstance(each, str) for each in both):
                return ""
            return f"{median(both[0], processor) / median(both[1], processor):.1f}"

        ratios = [[name] + [ratio(name, server, FLOOR) for server in others] for name, _ in SPEED]
        if GOOGLE in names:
            for row, (name, _) in zip(ratios, SPEED):
                row += [ratio(name, GOOGLE, server) for server in OURS]
        head = ["processor time", *[f"{server} / floor" for server in others]]
        head += [f"emulator / {server}" for server in OURS] if GOOGLE in names else []
        self.add(
            "Speed",
            "Messages a second, in a fan-out deliveries, and processor time a message: of the server, with Redis that of both.",
            table(["", *names], rows),
            table(head, ratios),
        )
        name = "publish, 100 B, 100 a request"
        self.found["publish against the floor"] = ratio(name, FREE, FLOOR)
        for server in OURS:
            best = results.get(("end to end, 100 B, 100 a request", server))
            if best and not isinstance(best, str):
                self.found[f"end to end, {server}"] = median(best, lambda r: r["messages_per_second"])
        synced = results.get((name, SYNCED))
        if synced and not isinstance(synced, str):
            self.found["publish with fsync"] = median(synced, lambda r: r["messages_per_second"])
        self.bare()

    def bare(self):
        """What the disk and Redis do by themselves with the same bytes."""
        rows = []
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
            for batch, at_once in ((1, 32), (100, 8)):
                rate, times = raw_log(pathlib.Path(folder) / "raw", batch * at_once * 170, self.seconds * 2)
                rows.append([f"a log of {batch * at_once} messages a sync", f"{short(rate * batch * at_once)}/s", spread(times)])
                if batch == 100:
                    self.found["raw log"] = rate * batch * at_once
            _, times = raw_log(pathlib.Path(folder) / "raw", 170, self.seconds * 2, pause=0.001)
            rows.append(["a log of one message a sync, about 1,000 a second", "", spread(times)])
            self.found["sync p50, ms"] = percentile(times, 0.5) * 1000
            if shutil.which("redis-server"):
                redis = Redis(pathlib.Path(folder) / "redis", "everysec")
                for pipeline, clients in ((1, 32), (100, 8)):
                    name = f"Redis, SET, {pipeline} a pipeline"
                    done = self.attempt(name, REDIS, lambda: bare_redis(redis, pipeline, clients, int(300_000 * self.seconds)))
                    rows.append([name, done, ""] if isinstance(done, str) else [name, f"{short(done[0])}/s, {short(done[1])} us", ""])
                redis.kill()
        self.text.append("The bare means, in the same run: messages of 170 bytes as they are stored, and the time of a sync.\n")
        self.text.append(table(["", "messages", "p50, p99"], rows))
        self.say(self.text[-1])

    def latency(self, targets):
        def count(arguments, _, rate, seconds):
            return max(int(rate * seconds * (self.seconds if rate > 1 else 1)), 1)

        results = self.turns(targets, LATENCY, count)

        def cell(reports):
            if not reports or isinstance(reports, str):
                return reports or ""
            parts = [median(reports, lambda r: r["latency_us"][p]) / 1000 for p in ("p50", "p99")]
            slow = "" if median(reports, lambda r: r["messages_per_second"] / r["rate"]) > 0.9 else ", behind the rate"
            return f"{parts[0]:.2f}, {parts[1]:.2f}{slow}"

        names = [target.name for target in targets]
        rows = [[name] + [cell(results.get((name, server))) for server in names] for name, *_ in LATENCY]
        text = "Milliseconds from before the publish to after the receipt, p50 and p99, messages of 100 bytes, one stream."
        self.add("Latency", text, table(["", *names], rows))
        for server in (FLOOR, *OURS):
            reports = results.get((LATENCY[1][0], server))
            if reports and not isinstance(reports, str):
                self.found[f"latency, {server}"] = tuple(
                    median(reports, lambda r: r["latency_us"][p]) / 1000 for p in ("p50", "p99")
                )

    # The rest: fresh servers, one after the other.

    def delivery(self, _):
        """Ordered and filtered delivery against plain, in the same round."""
        # Ordered publishing has one request under way; so has the rest.
        load = ["--batch", "100", "--bytes", "100", "--publishers", "1", "--keys", "100"]
        rows = []
        for server in OURS:
            rows += self.attempt("delivery", server, lambda: self.delivery_of(server, load)) or []
        self.add(
            "Delivery",
            "One publisher, 100 a request. Speed and processor time are medians of the ratios to plain delivery in the same round.",
            table(["", "delivery", "messages a second", "speed against plain", "processor time against plain"], listed(rows)),
        )

    def delivery_of(self, server, load):
        seen = {name: [] for name in ("end-to-end", "ordered", "filtered")}
        with running(server) as target:
            count = 2000
            for number in range(self.rounds + 2):
                for name, runs in seen.items():
                    report = target.bench([name, *load], count)
                    if number:  # the first round warms up
                        runs.append(self.keep("delivery", server, report))
                if not number:
                    count = max(int(report["messages_per_second"] * self.seconds) // 100, 10) * 100
        rows = []
        for name, runs in seen.items():
            pairs = list(zip(runs, seen["end-to-end"]))
            speed = [r["messages_per_second"] / p["messages_per_second"] for r, p in pairs]
            cpu = [processor(r) / processor(p) for r, p in pairs]
            name = "plain" if name == "end-to-end" else name
            rate = short(median(runs, lambda r: r["messages_per_second"]))
            ratio = f"{statistics.median(speed):.2f} ({min(speed):.2f} to {max(speed):.2f})"
            rows.append([server, name, rate, ratio, f"{statistics.median(cpu):.2f}"])
        return rows

    def backlog(self, _):
        """Ten million waiting messages: publish, what they take, restart, seek over them."""
        messages = 500_000 if self.options.quick else 10_000_000
        rows = []
        for server in OURS:
            row = self.attempt("backlog", server, lambda: self.backlog_of(server, messages))
            rows.append([server, row] if isinstance(row, str) else row)
        head = ["", "published", "memory a message, bytes", "of Redis", "on disk", "start", "memory after it"]
        head += ["first message", "seek to the future", "seek to the past", "memory then"]
        text = f"{messages:,} messages of 100 bytes, 1,000 a request. Memory is that of the process less what it had before."
        self.add("Backlog", text, table(head, [(row + [""] * len(head))[: len(head)] for row in rows]))

    def backlog_of(self, server, messages):
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
            target = start(server, folder)
            try:
                return self.backlog_steps(target, folder, messages)
            finally:
                target.stop()

    def backlog_steps(self, target, folder, messages):
        topic, subscription = "projects/backlog/topics/backlog", "projects/backlog/subscriptions/backlog"
        target.rest("PUT", topic, {})
        target.rest("PUT", subscription, {"topic": topic, "retainAckedMessages": True, "ackDeadlineSeconds": 600})
        redis_before = int(target.redis.info()["used_memory"]) if target.redis else 0
        report = target.bench(["publish", "--topic", topic, "--batch", "1000", "--bytes", "100", "--publishers", "4"], messages)
        self.keep("backlog", target.name, report)
        each = lambda mb: short(max(mb, 0) * 2**20 / messages)  # noqa: E731
        row = [target.name, f"{short(report['messages_per_second'])}/s", each(resident_mb(target.server.pid) - target.idle_mb)]
        own = (int(target.redis.info()["used_memory"]) - redis_before) / 2**20 if target.redis else None
        row += [each(own) if own else "", each(folder_mb(folder))]
        # The same store, a new process.
        target.server.stop()
        url = f"redis://127.0.0.1:{target.redis.port}" if target.redis else f"embedded:{next(pathlib.Path(folder).iterdir())}"
        target.server = landline(url, {"DURABILITY": "fsync" if target.name == SYNCED else "none"})
        began = time.monotonic()
        # The port is open before the broker is; what is waited for is a call that needs it.
        while not self.answers(target, subscription):
            if time.monotonic() - began > 60:
                raise Failed("no answer 60 s after the start")
            time.sleep(0.005)
        ready = target.server.start_seconds + time.monotonic() - began
        after = resident_mb(target.server.pid) - target.idle_mb
        row += [f"{ready:.2f} s", each(after)]
        began = time.monotonic()
        pulled = target.rest("POST", f"{subscription}:pull", {"maxMessages": 1}).get("receivedMessages", [])
        row += [f"{(time.monotonic() - began) * 1000:.1f} ms" if pulled else "none came"]
        for when in ("2100-01-01T00:00:00Z", "2000-01-01T00:00:00Z"):
            began = time.monotonic()
            target.rest("POST", f"{subscription}:seek", {"time": when})
            row.append(f"{time.monotonic() - began:.2f} s")
        row.append(each(resident_mb(target.server.pid) - target.idle_mb))
        self.found[f"start, {target.name}"] = ready
        self.found[f"memory a message, {target.name}"] = float(row[2])
        self.reports.append({"part": "backlog", "server": target.name, "row": row})
        return row

    def answers(self, target, subscription):
        try:
            target.rest("GET", subscription, None, seconds=30)
            return True
        except (Failed, OSError):
            return False

    def streams(self, _):
        count = 1000 if self.options.quick else 10_000
        rows = []
        for server in (FLOOR, *OURS):
            row = self.attempt("streams", server, lambda: self.streams_of(server, count))
            rows.append([server, row, "", "", "", ""] if isinstance(row, str) else row)
        text = f"{count:,} subscriptions with a stream each over 100 connections, and another subscription in use beside them."
        head = ["", "opened in", "memory, MB", "KB a stream", "idle, share of a core", "the other, publish to ack: p50, p99, ms"]
        self.add("Idle streams", text, table(head, rows))

    def streams_of(self, server, count):
        with running(server) as target:
            report = target.bench(["idle", "--subscriptions", str(count), "--connections", "100"], 1)
            self.keep("streams", server, report)
            opened, idle = report["phases"]
            grown = report["server_resident_mb"] - target.idle_mb
            times = ", ".join(f"{idle['neighbour_us'][p] / 1000:.2f}" for p in ("p50", "p99"))
            self.found[f"streams, {server}"] = report["server_resident_mb"]
            row = [server, f"{opened['seconds']:.1f} s", f"{report['server_resident_mb']:.0f}", f"{grown * 1024 / count:.1f}"]
            return [*row, f"{report['server_cores']:.3f}", times]

    def keys(self, _):
        """Memory of messages that are all outstanding, by the number of their keys."""
        rows, messages = [], 10_000 if self.options.quick else 100_000
        for server in (FREE, REDIS):
            for count in (1, messages):
                row = self.attempt("keys", server, lambda: self.keys_of(server, messages, count))
                rows.append([server, count, row, ""] if isinstance(row, str) else row)
        text = f"{messages:,} messages of 100 bytes, all outstanding at once on one stream, in MB."
        self.add("Ordering keys", text, table(["", "keys", "memory of the server", "of Redis"], rows))

    def keys_of(self, server, messages, count):
        with running(server, ROOM) as target:
            before = int(target.redis.info()["used_memory"]) if target.redis else 0
            report = target.bench(["hold", "--bytes", "100", "--keys", str(count)], messages)
            self.keep("keys", server, report)
            # The run has removed its subscription when it ends; Redis tells its peak.
            peak = (int(target.redis.info()["used_memory_peak"]) - before) / 2**20 if target.redis else None
            grown = report["server_resident_mb"] - target.idle_mb
            return [server, f"{count:,}", f"{grown:.0f}", f"{peak:.0f}" if peak else ""]

    def seek(self, _):
        """Seeks with another subscription in use. Messages that were published one by one are the hardest case."""
        rows, share = [], 20 if self.options.quick else 1
        for server in (FREE, REDIS):
            for messages, batch in ((1_200_000 // share, 100), (120_000 // share, 1)):
                name = f"{messages:,} in batches of {batch}"
                done = self.attempt("seek", server, lambda: self.seek_of(server, messages, batch))
                rows += [[server, name, done, "", "", ""]] if isinstance(done, str) else [[server, name, *row] for row in done]
        head = ["", "retained messages", "step", "seconds", "another subscription, publish to ack: p50, ms", "largest"]
        self.add("Seek", "Messages of 100 bytes.", table(head, rows))

    def seek_of(self, server, messages, batch):
        with running(server) as target:
            report = target.bench(["seek", "--batch", str(batch), "--bytes", "100", "--publishers", "32"], messages)
            self.keep("seek", server, report)
        rows = []
        for phase in report["phases"]:
            other = phase.get("neighbour_us") or {"p50": 0, "max": 0}
            rows.append([phase["step"], f"{phase['seconds']:.3f}", *(f"{other[p] / 1000:.1f}" for p in ("p50", "max"))])
        return rows

    def trips(self, _):
        """Round trips that Redis adds from publish to receipt: what a slower way to it costs, in units of it."""
        ways, times = (0.005, 0.015), {}
        if not shutil.which("redis-server"):
            raise Failed("there is no redis-server")
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
            redis = Redis(folder, "everysec")
            try:
                for way in ways:
                    proxy = Proxy(redis.port, way)
                    target = Target(REDIS, landline(f"redis://127.0.0.1:{proxy.port}", {"DURABILITY": "none"}))
                    # Slow enough for one message to be done with before the next.
                    report = target.bench(["latency", "--bytes", "100", "--rate", "8", "--batch", "1"], 80)
                    times[way] = self.keep("trips", REDIS, report)["latency_us"]["p50"] / 1000
                    target.stop()
                    proxy.stop()
            finally:
                redis.kill()
        added = (times[ways[1]] - times[ways[0]]) / (2000 * (ways[1] - ways[0]))
        self.found["round trips"] = added
        near, far = (f"{times[way]:.2f} ms where Redis is {2000 * way:.0f} ms away" for way in ways)
        self.add("Round trips to Redis", f"From publish to receipt, p50: {near}, {far}, there and back: {added:.2f} round trips.")

    def goals(self):
        """What was asked for, against what was found."""
        found, rows = self.found, []

        def goal(name, value, text, met):
            rows.append([name, "not measured" if value is None else text(value), "" if value is None else "met" if met(value) else "missed"])

        ratio = found.get("publish against the floor")
        goal("publish, 100 a request, no sync: processor time at most twice the floor's", float(ratio) if ratio else None, "{:.1f}".format, lambda v: v <= 2)
        log = found["raw log"] / found["publish with fsync"] if {"raw log", "publish with fsync"} <= set(found) else None
        goal("the same with fsync: at least a third of the raw log's speed", log, "1/{:.1f}".format, lambda v: v <= 3)
        goal("end to end, no sync: at least 500,000 a second on two cores", found.get(f"end to end, {FREE}"), short, lambda v: v >= 500_000)
        pair = found.get(f"latency, {FREE}")
        goal("latency at 1,000 a second, no sync: p50 below 0.3 ms, p99 below 2 ms", pair, lambda v: f"{v[0]:.2f}, {v[1]:.2f}", lambda v: v[0] < 0.3 and v[1] < 2)
        synced, sync = found.get(f"latency, {SYNCED}"), found.get("sync p50, ms")
        over = synced[0] - sync if synced and sync else None
        goal("with fsync: p50 at most 0.3 ms over the disk's sync", over, "{:+.2f} ms".format, lambda v: v <= 0.3)
        goal("Redis adds at most two round trips", found.get("round trips"), "{:.2f}".format, lambda v: v <= 2.05)
        for server in OURS:
            goal(f"10,000 idle streams, {server}: below 500 MB", found.get(f"streams, {server}"), "{:.0f} MB".format, lambda v: v < 500)
        goal("a waiting message on disk: below 40 bytes of memory", found.get(f"memory a message, {FREE}"), short, lambda v: v < 40)
        for server in OURS:
            goal(f"start with ten million waiting, {server}: below 2 s", found.get(f"start, {server}"), "{:.2f} s".format, lambda v: v < 2)
        return "## Goals\n\n" + table(["", "found", ""], rows)


def listed(rows):
    """Rows without the reasons of failures, which are texts."""
    return [row for row in rows if isinstance(row, list)]


def percentile(times, share):
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


def spread(times):
    return f"{percentile(times, 0.5) * 1000:.2f} ms, {percentile(times, 0.99) * 1000:.2f} ms"


def raw_log(path, size, seconds, pause=0):
    """Overwrites a file of zeros by writes of a size, each followed by a sync: writes a second, and the time of each."""
    room = 64 * 2**20
    path.write_bytes(bytes(room))
    times, at, block = [], 0, b"x" * size
    with open(path, "r+b", buffering=0) as file:
        os.fsync(file.fileno())
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            os.pwrite(file.fileno(), block, at)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
            at = (at + size) % (room - size)
            if pause:
                time.sleep(max(pause - times[-1], 0))
    return len(times) / sum(times), times


def bare_redis(redis, pipeline, clients, messages):
    """Commands a second, and what one costs Redis."""
    before = cpu_seconds(redis.pid)
    command = ["redis-benchmark", "-p", redis.port, "-n", messages, "-P", pipeline, "-c", clients, "-d", 170, "-r", 10_000_000]
    done = subprocess.run([str(each) for each in [*command, "-t", "set", "--csv"]], capture_output=True, text=True, timeout=120)
    line = next(line for line in done.stdout.splitlines() if line.startswith('"SET"'))
    return float(line.split(",")[1].strip('"')), (cpu_seconds(redis.pid) - before) * 1e6 / messages


class Proxy:
    """Passes bytes on to a port of this machine after a delay, each way."""

    def __init__(self, to, delay):
        self.to, self.delay = to, delay
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), daemon=True).start()
        started.wait(10)

    def _run(self, started):
        async def serve():
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()

        self.loop.run_until_complete(serve())
        self.loop.run_forever()

    async def _connection(self, reader, writer):
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.to)
        await asyncio.gather(self._pass(reader, other_writer), self._pass(other_reader, writer))

    async def _pass(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if self.delay:
                    self.loop.call_later(self.delay, writer.write, data)
                else:
                    writer.write(data)
        writer.close()

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)


def heading(seconds):
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
    version = subprocess.run([str(BINARY), "--version"], capture_output=True, text=True).stdout.strip()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return (
        f"# Performance\n\nWritten by `tests/bench/compare.py` on {time.strftime('%d %B %Y')}, {version} at {commit}, in"
        f" {seconds / 60:.0f} minutes. {os.cpu_count()} processors ({model}), Linux {platform.release().split('-')[0]}; clients and"
        " servers share them, over loopback. Redis runs with appendonly and appendfsync everysec and is not waited for."
        f" The load average was {os.getloadavg()[2]:.0f} at the end: far above {os.cpu_count()} it tells of other work on the"
        " machine, and ratios say more than figures.\n"
    )


def main():
    parts = ["speed", "latency", "delivery", "backlog", "streams", "keys", "seek", "trips"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[*parts, []], metavar="PART", help=f"{', '.join(parts)}; by default all")
    parser.add_argument("--emulator", default=EMULATOR)
    parser.add_argument("--quick", action="store_true", help="small counts and one round, for a few minutes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run of the parts speed, latency and delivery")
    parser.add_argument("--table", type=pathlib.Path, help="where the table goes")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if not BINARY.exists():
        sys.exit(f"there is no {BINARY}: cargo build --release")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen, began, run = options.part or parts, time.monotonic(), Run(options)
    targets = []
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        try:
            if {"speed", "latency"} & set(chosen):
                for name in (FLOOR, *OURS):
                    started = run.attempt("start", name, lambda: start(name, folder))
                    targets += [] if isinstance(started, str) else [started]
                started = run.attempt("start", GOOGLE, lambda: emulator(options.emulator))
                targets += [started] if isinstance(started, Target) else []
            for part in ("speed", "latency"):
                if part in chosen:
                    guarded(run, part, targets)
        finally:
            for target in targets:
                target.stop()
    for part in parts[2:]:
        if part in chosen:
            guarded(run, part, targets)
    text = "\n".join([heading(time.monotonic() - began), run.goals(), *run.text])
    print(run.goals())
    where = options.table or (None if options.quick or options.part else TABLE)
    if where:
        where.write_text(text)
    if options.out:
        options.out.write_text("".join(json.dumps(r) + "\n" for r in run.reports))


def guarded(run, part, targets):
    """Whatever goes wrong in a part, the others are measured."""
    try:
        getattr(run, part)(targets)
    except Exception as error:  # it goes into the table
        traceback.print_exc()
        run.text.append(f"## {part.capitalize()}\n\nFailed: {error}\n")


if __name__ == "__main__":
    main()
