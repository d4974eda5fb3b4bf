"""Servers to measure: Landline on each of its brokers, the Redis beneath it, and what the system says of their processes."""

import os
import pathlib
import socket
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("LANDLINE_BINARY", ROOT / "target" / "release" / "landline"))
TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A step that could not be measured, with the reason."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def status_of(pid, field):
    """A number of /proc/PID/status: kilobytes, or a count."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def resident_mb(pid):
    return status_of(pid, "VmRSS") / 1024


def cpu_seconds(pid):
    """Processor time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def folder_mb(folder):
    """What a folder takes of the disk; files may go while they are counted."""
    total = 0
    for path in pathlib.Path(folder).rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            pass
    return total / 2**20


class Process:
    """A server on a free loopback port. PORT in its command and environment is replaced by it."""

    def __init__(self, command, environment=None, log=subprocess.DEVNULL, seconds=60):
        self.port = free_port()
        command = [part.replace("PORT", str(self.port)) for part in command]
        environment = {k: v.replace("PORT", str(self.port)) for k, v in (environment or {}).items()}
        started = time.monotonic()
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=log)
        self.pid = self.process.pid
        while not self._answers():
            if self.process.poll() is not None:
                raise Failed(f"{command[0]} ended with {self.process.returncode}")
            if time.monotonic() - started > seconds:
                self.kill()
                raise Failed(f"{command[0]} does not listen after {seconds} s")
            time.sleep(0.002)
        self.start_seconds = time.monotonic() - started

    def _answers(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        except OSError:
            return False

    def stop(self, seconds=60):
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()


class Redis(Process):
    """A Redis with an append-only file in `folder`; `sync` is its appendfsync."""

    def __init__(self, folder, sync="no"):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["redis-server", "--bind", "127.0.0.1", "--port", "PORT", "--dir", str(folder), "--save", ""]
        super().__init__([*command, "--appendonly", "yes", "--appendfsync", sync])

    def info(self):
        done = subprocess.run(["redis-cli", "-p", str(self.port), "info"], capture_output=True, text=True, timeout=60)
        return dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)

    def keys(self):
        done = subprocess.run(["redis-cli", "-p", str(self.port), "dbsize"], capture_output=True, text=True, timeout=60)
        return int(done.stdout)


def landline(broker_url, settings=None, log=subprocess.DEVNULL, seconds=60):
    """A running Landline; the address of its metrics is off unless a setting gives one."""
    environment = {"PORT": "PORT", "BIND": "127.0.0.1", "ADMIN_ADDRESS": "", "BROKER_URL": broker_url, **(settings or {})}
    environment = {f"CONNECTORS_GCP_{name}": value for name, value in environment.items()}
    return Process([str(BINARY), "serve"], environment, log, seconds)
