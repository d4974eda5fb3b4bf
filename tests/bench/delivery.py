#!/usr/bin/env python3
"""Measures what delivery costs on both brokers: ordered and filtered against plain, seeks over a large backlog, and ordering keys.

    cargo build --release && tests/bench/delivery.py [--quick] [--rounds N] [--messages N] [--out FILE]

Ratios are medians over rounds in which the three take turns. Redis runs with appendonly and without waiting for its disk. Prints
Markdown tables; --out also writes every report as a line of JSON.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile

from compare import BINARY, ROOT, Server, free_port, wait_for

KEYS = 100_000
# So many messages may be outstanding, where that is what is measured.
ROOM = {"CONNECTORS_GCP_MAX_OUTSTANDING_MESSAGES": "200000", "CONNECTORS_GCP_MAX_INFLIGHT_PER_SUBSCRIPTION": "200000"}


class Redis:
    def __init__(self, directory):
        self.port = free_port()
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", directory, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(self.port, self.process)

    def memory_mb(self, field):
        info = subprocess.run(["redis-cli", "-p", str(self.port), "info", "memory"], capture_output=True, text=True).stdout
        return int(next(line for line in info.splitlines() if line.startswith(f"{field}:")).split(":")[1]) / 2**20


@contextlib.contextmanager
def running(broker, environment=None):
    """A fresh server on a fresh store; the Redis is none on the embedded broker."""
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as directory:
        redis = Redis(directory) if broker == "redis" else None
        url = f"redis://127.0.0.1:{redis.port}" if redis else f"embedded:{directory}/data"
        own = {"CONNECTORS_GCP_PORT": "PORT", "CONNECTORS_GCP_BROKER_URL": url, "CONNECTORS_GCP_ADMIN_ADDRESS": ""}
        if redis:
            own["CONNECTORS_GCP_DURABILITY"] = "none"
        server = Server(broker, [str(BINARY), "serve"], {**own, **(environment or {})})
        try:
            yield server, redis
        finally:
            server.stop()
            if redis:
                redis.process.kill()
                redis.process.wait()


def checked(report):
    if "error" in report:
        raise SystemExit(report["error"])
    for problem in ("lost", "out_of_order"):
        if report[problem]:
            raise SystemExit(f"{report['scenario']}: {problem} {report[problem]}")
    return report


def ratios(broker, messages, rounds, reports):
    """Messages a second and processor time of ordered and filtered delivery, against plain in the same round."""
    # Ordered publishing has one request under way; so has the rest.
    load = ["--batch", "100", "--bytes", "100", "--publishers", "1", "--keys", "100"]
    seen = {name: [] for name in ("end-to-end", "ordered", "filtered")}
    with running(broker) as (server, _):
        for number in range(rounds + 1):
            for name, runs in seen.items():
                report = checked(server.run([name, *load], messages, False))
                if number:  # the first round warms up
                    runs.append(report)
                    reports.append({"broker": broker, **report})
    for name, runs in seen.items():
        speed = [r["messages_per_second"] / p["messages_per_second"] for r, p in zip(runs, seen["end-to-end"])]
        cpu = [r["server_cpu_us_per_message"] / p["server_cpu_us_per_message"] for r, p in zip(runs, seen["end-to-end"])]
        rate = statistics.median(r["messages_per_second"] for r in runs)
        spread = f"{min(speed):.2f} to {max(speed):.2f}"
        yield f"| {broker} | {name} | {rate:,.0f} | {statistics.median(speed):.2f} ({spread}) | {statistics.median(cpu):.2f} |"


def seeks(broker, messages, batch, reports):
    with running(broker) as (server, _):
        report = server.run(["seek", "--batch", str(batch), "--bytes", "100", "--publishers", "32"], messages, False)
        reports.append({"broker": broker, **checked(report)})
        for phase in report["phases"]:
            other = phase.get("neighbour_us") or {"p50": 0, "p99": 0, "max": 0}
            times = " | ".join(f"{other[p] / 1000:.1f}" for p in ("p50", "p99", "max"))
            yield f"| {broker} | {messages:,} in batches of {batch} | {phase['step']} | {phase['seconds']:.3f} | {times} |"


def keys(broker, reports):
    """Memory of messages that are all outstanding, by the number of their keys."""
    for count in (1, KEYS):
        with running(broker, ROOM) as (server, redis):
            before = redis.memory_mb("used_memory") if redis else 0
            report = checked(server.run(["hold", "--bytes", "100", "--keys", str(count)], KEYS, False))
            grown = report["server_resident_mb"] - server.idle_mb
            # The run has removed its subscription when it ends; Redis tells its peak.
            peak = redis.memory_mb("used_memory_peak") - before if redis else 0
            reports.append({"broker": broker, **report})
            yield f"| {broker} | {KEYS:,} messages of {count:,} keys | {grown:.0f} | {f'{peak:.0f}' if redis else ''} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the messages, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1_200_000, help="of the seeks")
    parser.add_argument("--out")
    options = parser.parse_args()
    rounds, share = (1, 20) if options.quick else (options.rounds, 1)
    brokers = ["embedded", "redis"] if shutil.which("redis-server") else ["embedded"]
    reports = []

    def table(head, rows):
        print(f"\n| {head} |\n" + "|---" * (head.count("|") + 1) + "|", flush=True)
        for row in rows:
            print(row, flush=True)

    table(
        "broker | delivery | messages/s | speed against plain (spread) | processor time against plain",
        (row for broker in brokers for row in ratios(broker, 300_000 // share, rounds, reports)),
    )
    # Messages that were published one by one are the hardest case; a tenth of them shows what they cost.
    sizes = [(options.messages // share, 100), (options.messages // share // 10, 1)]
    table(
        "broker | retained messages | step | seconds | another subscription, publish to ack: p50, ms | p99 | max",
        (row for broker in brokers for messages, batch in sizes for row in seeks(broker, messages, batch, reports)),
    )
    table(
        "broker | outstanding | memory of the server, MB | of Redis, MB",
        (row for broker in brokers for row in keys(broker, reports)),
    )
    if options.out:
        pathlib.Path(options.out).write_text("".join(json.dumps(r) + "\n" for r in reports))


if __name__ == "__main__":
    main()
