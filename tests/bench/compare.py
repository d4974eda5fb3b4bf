#!/usr/bin/env python3
"""Runs the same load against Landline and, where it is installed, Google's Java emulator, in one run.

    cargo build --release && tests/bench/compare.py [--emulator DIR] [--quick] [--out FILE]

Prints a Markdown table; --out also writes every report as a line of JSON. DIR is the emulator's folder, the one that holds
lib/cloud-pubsub-emulator-*.jar (default: the place of the Debian package google-cloud-cli-pubsub-emulator).
"""

import argparse
import glob
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "landline"
EMULATOR = "/usr/lib/google-cloud-sdk/platform/pubsub-emulator"

# Name, arguments, messages for Landline, messages for the emulator (which is slower and keeps everything in memory).
SCENARIOS = [
    ("publish, 1 KB, batch 1", ["publish", "--batch", "1", "--bytes", "1000", "--publishers", "32"], 100_000, 20_000),
    ("publish, 1 KB, batch 100", ["publish", "--batch", "100", "--bytes", "1000"], 500_000, 100_000),
    ("publish, 100 B, batch 100", ["publish", "--batch", "100", "--bytes", "100"], 1_000_000, 100_000),
    ("drain, 1 KB", ["drain", "--batch", "100", "--bytes", "1000"], 300_000, 20_000),
    ("end to end, 100 B, batch 100", ["end-to-end", "--batch", "100", "--bytes", "100"], 1_000_000, 50_000),
    ("ordered, 100 keys, 100 B", ["ordered", "--batch", "100", "--bytes", "100", "--keys", "100"], 500_000, 20_000),
    ("fan-out to 10, 100 B", ["fan-out", "--batch", "100", "--bytes", "100", "--subscriptions", "10"], 50_000, 5_000),
    ("latency at 1,000/s, 1 KB", ["latency", "--bytes", "1000", "--rate", "1000"], 10_000, 10_000),
]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port, process, seconds=60):
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if process.poll() is not None:
            raise SystemExit(f"server ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return time.monotonic() - started
        except OSError:
            time.sleep(0.002)
    raise SystemExit(f"nothing listens on port {port} after {seconds} s")


def resident_mb(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(next(l for l in status.splitlines() if l.startswith("VmRSS:")).split()[1]) / 1024


class Server:
    def __init__(self, name, command, environment=None):
        self.name = name
        self.port = free_port()
        command = [part.replace("PORT", str(self.port)) for part in command]
        environment = {k: v.replace("PORT", str(self.port)) for k, v in (environment or {}).items()}
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.start_seconds = wait_for(self.port, self.process)
        time.sleep(1)
        self.idle_mb = resident_mb(self.process.pid)

    def run(self, arguments, messages, quick):
        count = max(messages // 20, 1000) if quick else messages
        command = [str(BINARY), "bench", *arguments, "--messages", str(count)]
        command += ["--endpoint", f"http://127.0.0.1:{self.port}", "--pid", str(self.process.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            return {"error": done.stderr.strip()[-200:]}
        return json.loads(done.stdout.strip().splitlines()[-1])

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def servers(emulator):
    def landline(name, broker, durability):
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as directory:
            environment = {
                "CONNECTORS_GCP_PORT": "PORT",
                "CONNECTORS_GCP_BROKER_URL": broker.replace("DIR", directory),
                "CONNECTORS_GCP_DURABILITY": durability,
            }
            yield Server(name, [str(BINARY), "serve"], environment)

    yield from landline("memory", "memory:", "none")
    yield from landline("disk, no sync", "embedded:DIR", "none")
    yield from landline("disk, fsync", "embedded:DIR", "fsync")
    jars = glob.glob(f"{emulator}/lib/cloud-pubsub-emulator-*.jar")
    if jars:
        main = "com.google.cloud.pubsub.testing.v1.Main"
        yield Server("emulator", ["java", "-cp", jars[0], main, "--host=127.0.0.1", "--port=PORT"])


def cell(report):
    if "error" in report:
        return report["error"]
    if report.get("latency_us") and report["scenario"] == "latency":
        text = f"p50 {report['latency_us']['p50']} us, p99 {report['latency_us']['p99']} us"
    else:
        text = f"{report['messages_per_second']:,.0f}/s, {report['server_cpu_us_per_message']:.2f} us"
    for problem in ("lost", "duplicates", "out_of_order"):
        if report[problem]:
            text += f", {problem} {report[problem]}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--emulator", default=EMULATOR)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the messages")
    parser.add_argument("--out")
    options = parser.parse_args()
    names, rows, reports = [], {name: [] for name, *_ in SCENARIOS}, []
    facts = {"start-up, ms": [], "idle memory, MB": [], "memory after, MB": []}
    for server in servers(options.emulator):
        names.append(server.name)
        facts["start-up, ms"].append(f"{server.start_seconds * 1000:.0f}")
        facts["idle memory, MB"].append(f"{server.idle_mb:.0f}")
        for name, arguments, messages, fewer in SCENARIOS:
            report = server.run(arguments, fewer if server.name == "emulator" else messages, options.quick)
            rows[name].append(cell(report))
            reports.append({"server": server.name, "name": name, **report})
            print(f"{server.name}: {name}: {rows[name][-1]}", flush=True)
        facts["memory after, MB"].append(f"{resident_mb(server.process.pid):.0f}")
        server.stop()
    print("\n| | " + " | ".join(names) + " |\n|---" * 1 + "|---" * len(names) + "|")
    for name, cells in {**rows, **facts}.items():
        print(f"| {name} | " + " | ".join(cells) + " |")
    if options.out:
        pathlib.Path(options.out).write_text("".join(json.dumps(r) + "\n" for r in reports))


if __name__ == "__main__":
    main()
