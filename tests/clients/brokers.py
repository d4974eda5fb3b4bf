"""The servers that the scenarios run against: Landline on each of its brokers, and what goes down in the middle."""

import itertools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import time

READY = "landline listening on "
# Longest wait for a process to start, to take a role or to answer.
LONGEST_START_SECONDS = 60
SYNCED = ["--appendfsync", "always"]
# How a Sentinel's list of replicas shows one that is not down.
ALIVE = "\r\nflags\r\n$5\r\nslave\r\n"
# Connections go to the nodes in turn, past one that is down, whatever they carry.
BALANCER = """
defaults
    mode tcp
    balance roundrobin
    option redispatch 1
    retries 3
    timeout connect 2s
    timeout client 1h
    timeout server 1h
listen nodes
"""


class Node:
    """One server process."""

    def __init__(self, folder: pathlib.Path, number: int, broker_url: str, settings: dict[str, str]):
        self.log = folder / f"node-{number}.log"
        self.settings = {
            "CONNECTORS_GCP_BROKER_URL": broker_url,
            "CONNECTORS_GCP_BIND": "127.0.0.1",
            "CONNECTORS_GCP_ADMIN_ADDRESS": "",
            **settings,
        }
        self.port = "0"
        self.start()

    def start(self) -> None:
        """Starts the process, on the port it had before if there was one."""
        settings = {**self.settings, "CONNECTORS_GCP_PORT": self.port}
        with open(self.log, "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [os.environ["LANDLINE_BINARY"]], env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=log, text=True
            )
        line = self.process.stdout.readline()
        if not line.startswith(READY):
            raise RuntimeError(f"the server did not start: {self.log.read_text(encoding='utf-8')}")
        self.port = line.strip().rsplit(":", 1)[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Embedded:
    """One server on the embedded broker."""

    def __init__(self, folder: pathlib.Path, settings: dict[str, str]):
        self.node = Node(folder, 0, f"embedded:{folder / 'data'}", settings)
        self.address = f"127.0.0.1:{self.node.port}"

    def disturb(self) -> None:
        """Kills the server and starts it again."""
        self.node.kill()
        self.node.start()

    def stop(self) -> None:
        self.node.kill()


class RedisProcess:
    """A Redis server, or a Sentinel, with a folder of its own."""

    def __init__(self, folder: pathlib.Path, options: list[str], sentinel: str = ""):
        if shutil.which("redis-server") is None:
            raise RuntimeError("redis-server is missing")
        self.port = free_port()
        self.folder = folder / f"redis-{self.port}"
        self.folder.mkdir()
        common = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if sentinel:
            # Sentinel keeps its state in its configuration, which has to be a file.
            config = self.folder / "sentinel.conf"
            config.write_text(sentinel, encoding="utf-8")
            self.command = ["redis-server", str(config), "--sentinel", *common]
        else:
            self.command = ["redis-server", *common, "--appendonly", "yes", "--save", ""]
            self.command += ["--repl-diskless-sync-delay", "0"]
        self.start(options)

    def start(self, options: list[str]) -> None:
        with open(self.folder / "log", "a", encoding="utf-8") as log:
            self.process = subprocess.Popen([*self.command, *options], stdout=log, stderr=log)
        # A server that is still loading its data does not answer with PONG.
        wait_until(lambda: "PONG" in self.ask("PING"), "Redis")

    def ask(self, *words: str) -> str:
        """What the server answers to a command, raw; nothing when it can't be reached."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
                # Where an answer ends is hard to tell from it, but not where the next one does.
                connection.sendall(f"*{len(words)}\r\n{parts}*1\r\n$4\r\nPING\r\n".encode())
                answer = b""
                while not answer.endswith(b"+PONG\r\n") and b"-LOADING" not in answer:
                    if not (part := connection.recv(1 << 16)):
                        break
                    answer += part
                return answer.decode()
        except OSError:
            return ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class OnRedis:
    """Servers on Redis, behind an address that sends connections to them in turn."""

    COUNT = 2

    def __init__(self, folder: pathlib.Path, settings: dict[str, str]):
        url = self.start_redis(folder)
        self.nodes = [Node(folder, number, url, settings) for number in range(self.COUNT)]
        self.victims = itertools.cycle(self.nodes)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        config = folder / "haproxy.cfg"
        servers = "".join(f"    server node-{n} 127.0.0.1:{node.port}\n" for n, node in enumerate(self.nodes))
        config.write_text(f"{BALANCER}    bind {self.address}\n{servers}", encoding="utf-8")
        with open(folder / "haproxy.log", "w", encoding="utf-8") as log:
            self.balancer = subprocess.Popen(["haproxy", "-db", "-f", str(config)], stdout=log, stderr=log)
        wait_until(lambda: accepts(port), "HAProxy")

    def start_redis(self, folder: pathlib.Path) -> str:
        self.redis = [RedisProcess(folder, SYNCED)]
        return f"redis://127.0.0.1:{self.redis[0].port}"

    def disturb(self) -> None:
        """Kills one server; the clients go on with the other. Both are there in the end."""
        node = next(self.victims)
        node.kill()
        node.start()

    def stop(self) -> None:
        self.balancer.kill()
        self.balancer.wait()
        for process in self.nodes + self.redis:
            process.kill()


class OneNode(OnRedis):
    """One server on Redis."""

    COUNT = 1


class RedisCrash(OnRedis):
    """Two servers whose Redis is killed."""

    def disturb(self) -> None:
        self.redis[0].kill()
        self.redis[0].start(SYNCED)


class Failover(OnRedis):
    """Two servers on a master with two replicas, watched by a Sentinel; a change counts once a replica has it."""

    def __init__(self, folder: pathlib.Path, settings: dict[str, str]):
        super().__init__(folder, {**settings, "CONNECTORS_GCP_DURABILITY": "replicas:1"})

    def start_redis(self, folder: pathlib.Path) -> str:
        self.master = RedisProcess(folder, [])
        self.redis = [self.master] + [RedisProcess(folder, self._following()) for _ in range(2)]
        self._wait_for_replicas()
        sentinel = f"sentinel monitor main 127.0.0.1 {self.master.port} 1\n"
        for option in ["down-after-milliseconds main 1000", "failover-timeout main 5000", "parallel-syncs main 2"]:
            sentinel += f"sentinel {option}\n"
        self.sentinel = RedisProcess(folder, [], sentinel)
        self._wait_for_sentinel()
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/main"

    def disturb(self) -> None:
        """Kills the master, and lets it come back as a replica of the one that takes over."""
        old = self.master
        old.kill()
        wait_until(lambda: self._leader() not in (None, old), "another master")
        self.master = self._leader()
        wait_until(lambda: "role:master" in self.master.ask("INFO", "replication"), "the role of a master")
        # The Sentinel would tell it whom to follow as well, but takes its time.
        old.start(self._following())
        self._wait_for_replicas()
        self._wait_for_sentinel()

    def stop(self) -> None:
        self.sentinel.kill()
        super().stop()

    def _following(self) -> list[str]:
        return ["--replicaof", "127.0.0.1", str(self.master.port)]

    def _leader(self):
        answer = self.sentinel.ask("SENTINEL", "get-master-addr-by-name", "main")
        return next((server for server in self.redis if f"\r\n{server.port}\r\n" in answer), None)

    def _wait_for_replicas(self) -> None:
        info = lambda: self.master.ask("INFO", "replication")
        wait_until(lambda: info().count("state=online") == 2, "two replicas", info)

    def _wait_for_sentinel(self) -> None:
        """The Sentinel must know both replicas as alive to choose one of them."""
        info = lambda: self.sentinel.ask("SENTINEL", "replicas", "main")
        wait_until(lambda: info().count(ALIVE) == 2, "the Sentinel", info)


class Secured:
    """Files of a server that speaks TLS and enforces authentication, with keys of an admin and a reader."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.root = folder / "root.crt"
        # Without extensions of its own, which those given would come on top of.
        (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = name\n[name]\n", encoding="utf-8")
        self._certificate("root", "critical,CA:TRUE")
        signer = ["-CA", self.root, "-CAkey", folder / "root.key", "-addext", "subjectAltName=DNS:localhost"]
        self._certificate("localhost", "critical,CA:FALSE", *signer)
        bindings = [
            {"role": f"roles/pubsub.{role}", "members": [f"serviceAccount:{name}@shop.example"]}
            for name, role in {"admin": "admin", "reader": "viewer"}.items()
        ]
        policy = folder / "policy.json"
        policy.write_text(json.dumps({"projects": {"*": bindings}}), encoding="utf-8")
        self.settings = {
            "CONNECTORS_GCP_TLS_CERT_FILE": str(folder / "localhost.crt"),
            "CONNECTORS_GCP_TLS_KEY_FILE": str(folder / "localhost.key"),
            "CONNECTORS_GCP_AUTH": "enforce",
            "CONNECTORS_GCP_AUTH_POLICY_FILE": str(policy),
            "CONNECTORS_GCP_AUTH_KEYS_FILE": str(folder / "keys.json"),
        }
        for name in ["admin", "reader"]:
            self._keys("create", "--out", str(folder / f"{name}.json"), "--email", f"{name}@shop.example")

    def delete_key(self) -> None:
        """Takes the admin's key back."""
        key = json.loads((self.folder / "admin.json").read_text(encoding="utf-8"))
        self._keys("delete", key["private_key_id"])

    def environment(self, address: str) -> dict[str, str]:
        """What the program is told: the address, the keys, and whom to trust, as each of the languages wants it."""
        for file in [self.folder / "admin.json", self.folder / "reader.json"]:
            key = json.loads(file.read_text(encoding="utf-8"))
            # Where tokens are to be had; gcloud signs none itself.
            key["token_uri"] = f"https://localhost:{address.rsplit(':', 1)[1]}/token"
            file.write_text(json.dumps(key), encoding="utf-8")
        names = ["SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"]
        trust = {name: str(self.root) for name in names}
        return {"LANDLINE_ADDRESS": f"localhost:{address.rsplit(':', 1)[1]}", "LANDLINE_KEYS": str(self.folder), **trust}

    def _certificate(self, name: str, constraints: str, *options) -> None:
        """Makes NAME.crt and NAME.key."""
        files = ["-config", self.folder / "openssl.cnf", "-keyout", self.folder / f"{name}.key", "-out", self.folder / f"{name}.crt"]
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        command = ["openssl", "req", "-x509", *kind, *files, "-addext", f"basicConstraints={constraints}", *options]
        subprocess.run(command, check=True, capture_output=True)

    def _keys(self, *arguments: str) -> None:
        command = [os.environ["LANDLINE_BINARY"], "keys", *arguments]
        subprocess.run(command, env={**os.environ, **self.settings}, check=True, stdout=subprocess.DEVNULL)


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until(condition, what: str, state=lambda: "") -> None:
    until = time.monotonic() + LONGEST_START_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"waited in vain for {what} {state()}")
        time.sleep(0.02)
