"""Several servers on one Redis, behind a balancer as deploy/balancers describes it."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

from conftest import Server

RECIPES = pathlib.Path(__file__).parents[3] / "deploy" / "balancers"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        return taken.getsockname()[1]


def wait_until(condition, seconds: float = 30.0, what: str = "the condition") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.05)


def status(url: str) -> int:
    """The status of a GET, 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Process:
    """A program that ends with the test."""

    def __init__(self, arguments: list[str], log: pathlib.Path):
        self.log = log
        with open(log, "a", encoding="utf-8") as file:
            self.process = subprocess.Popen(arguments, stdout=file, stderr=file)

    def wait_until_ready(self) -> None:
        """For balancers: until an answer comes through."""
        try:
            wait_until(lambda: status(f"http://{self.rest}/") == 200 or self.process.poll() is not None, what="the balancer")
            assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Redis(Process):
    def __init__(self, folder: pathlib.Path):
        self.port = free_port()
        settings = ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--dir", str(folder)]
        super().__init__(["redis-server", "--port", str(self.port), *settings], folder / "redis.log")
        wait_until(self._answers, what="Redis")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


class Node(Server):
    """A server on an address of its own, so that all of them have the same ports, as on machines of their own."""

    def __init__(self, folder: pathlib.Path, host: str, port: int, admin_port: int, redis: Redis, settings: dict[str, str]):
        self.host = host
        self.admin = f"http://{host}:{admin_port}"
        own = {
            "CONNECTORS_GCP_BROKER_URL": f"redis://127.0.0.1:{redis.port}",
            "CONNECTORS_GCP_BIND": host,
            "CONNECTORS_GCP_PORT": str(port),
            "CONNECTORS_GCP_ADMIN_ADDRESS": f"{host}:{admin_port}",
            "CONNECTORS_GCP_NODE_ID": host,
        }
        folder.mkdir()
        super().__init__(folder, {**own, **settings})

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def is_ready(self) -> bool:
        return status(f"{self.admin}/readyz") == 200

    def stop(self) -> int:
        """Asks the process to stop, and answers how it ended."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def sent_messages(self) -> float:
        """Messages this node has sent to clients."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        found = re.findall(r"^landline_subscription_sent_messages_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))


class HAProxy(Process):
    """HAProxy with the recipe, its names and ports exchanged."""

    def __init__(self, folder: pathlib.Path, nodes: list[Node]):
        port = free_port()
        self.address = self.rest = f"127.0.0.1:{port}"
        text = (RECIPES / "haproxy.cfg").read_text(encoding="utf-8")
        assert text.count("bind :8085") == text.count("port 9090") == 1
        text = text.replace("bind :8085", f"bind {self.address}").replace("port 9090", f"port {nodes[0].admin.rsplit(':', 1)[1]}")
        servers = re.findall(r"(?m)^    server node-a .*\n|^    server node-b .*\n", text)
        assert len(servers) == 2
        for line in servers:
            text = text.replace(line, "")
        text += "".join(servers[0].replace("node-a:8085", node.address).replace("node-a", node.host) for node in nodes)
        config = folder / "haproxy.cfg"
        config.write_text(text, encoding="utf-8")
        super().__init__(["haproxy", "-db", "-f", str(config)], folder / "haproxy.log")
        self.wait_until_ready()


class Nginx(Process):
    """nginx with the recipe, its names and ports exchanged."""

    def __init__(self, folder: pathlib.Path, nodes: list[Node]):
        self.address, self.rest = (f"127.0.0.1:{free_port()}" for _ in range(2))
        text = (RECIPES / "nginx.conf").read_text(encoding="utf-8")
        assert text.count("listen 8085 http2") == text.count("listen 8086") == 1
        text = text.replace("listen 8085 http2", f"listen {self.address} http2").replace("listen 8086", f"listen {self.rest}")
        servers = re.findall(r"(?m)^        server node-a:8085 .*\n|^        server node-b:8085 .*\n", text)
        assert len(servers) == 4
        own = "".join(servers[0].replace("node-a:8085", node.address) for node in nodes)
        text = text.replace(servers[0], own).replace(servers[1], "")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "".join(f"    {kind}_temp_path {folder / kind};\n" for kind in kinds)
        text = text.replace("http {\n", "http {\n" + folders, 1)
        config = folder / "nginx.conf"
        config.write_text(f"daemon off;\npid {folder / 'nginx.pid'};\nerror_log stderr;\n{text}", encoding="utf-8")
        super().__init__(["nginx", "-c", str(config), "-p", str(folder)], folder / "nginx.log")
        self.wait_until_ready()

    def close(self) -> None:
        # Its workers end with the master only when it is asked.
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)


class Cluster:
    """Servers on one Redis."""

    def __init__(self, folder: pathlib.Path, count: int, settings: dict[str, str]):
        self.folder, self.count, self.settings = folder, count, settings
        self.redis = self.balancer = None
        self.nodes = []

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def start(self) -> None:
        self.redis = Redis(self.folder)
        port, admin_port = free_port(), free_port()
        # The loopback network is of one machine alone, and the process id keeps runs on it apart.
        third = os.getpid() % 250 + 1
        for number in range(1, self.count + 1):
            host = f"127.0.{third}.{number}"
            self.nodes.append(Node(self.folder / f"node-{number}", host, port, admin_port, self.redis, self.settings))

    def behind(self, balancer):
        self.balancer = balancer(self.folder, self.nodes)
        return self.balancer

    def close(self) -> None:
        if self.balancer:
            self.balancer.close()
        for node in self.nodes:
            node.kill()
        if self.redis:
            self.redis.close()
