"""Redis as it is run: behind sentinels, as a cluster, with TLS, with users. Real servers, quick to notice and change.

All of them are started with the binary of the test's `server_kind`.
"""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from redis.crc import key_slot

from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.servers import Server
from worker.embedded import free_port

LAST_SLOT = 16383
WAIT_SECONDS = 20.0
SERVICE = "main"
DOWN_AFTER_MS = 300
ENABLED = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")


def until(condition: Callable[[], object], what: str) -> None:
    """Polls until the condition holds; errors of a Redis that is not there yet count as no."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < end, f"not within {WAIT_SECONDS:g} seconds: {what}"
        time.sleep(0.02)


def server_in(directory: Path, binary: Path, *options: str) -> Server:
    directory.mkdir()
    at_once = ("--repl-diskless-sync-delay", "0")  # a primary waits 5 s for a second replica
    return Server(binary, directory, "--save", "", "--appendonly", "no", *at_once, *options)


class Sentinels:
    """A primary and a replica, watched by one sentinel that decides alone."""

    def __init__(self, binary: Path, directory: Path, *options: str, sentinel: str = "") -> None:
        self.one = server_in(directory / "one", binary, *options)
        self.two = server_in(directory / "two", binary, "--replicaof", "127.0.0.1", str(self.one.port), *options)
        self.watch = server_in(directory / "watch", binary, "--sentinel")
        self._config = self.watch.directory / "sentinel.conf"
        self._settings = sentinel
        self.watch.binary = binary

    def start(self) -> None:
        self.one.start()
        self.two.start()
        until(lambda: self.replicas(self.one) == 1, "the replica to be in step")
        self.start_watch()

    def start_watch(self) -> None:
        """The sentinel, which knows of the replica by then."""
        self._config.write_text(
            f"port {self.watch.port}\nbind 127.0.0.1\ndir {self.watch.directory}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.one.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 2000\n{self._settings}\n"
        )
        with (self.watch.directory / "server.log").open("ab") as log:
            command = [str(self.watch.binary), str(self._config), "--sentinel"]
            self.watch.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.watch.wait()

    def wait_watched(self) -> None:
        with connect_sync(f"redis://127.0.0.1:{self.watch.port}") as watch:
            until(lambda: watch.execute_command("SENTINEL", "REPLICAS", SERVICE), "the sentinel to know the replica")

    @property
    def url(self) -> str:
        return f"sentinel://127.0.0.1:{self.watch.port}/{SERVICE}"

    @staticmethod
    def replicas(server: Server) -> int:
        """How many replicas of a server are in step."""
        with connect_sync(server.url) as client:
            info = client.info("replication")
            lines = [info[f"slave{number}"] for number in range(info["connected_slaves"])]
            return sum(line["state"] == "online" for line in lines)

    def stop(self) -> None:
        for server in (self.watch, self.one, self.two):
            server.stop(kill=True)


class Cluster:
    """Two primaries, which share the slots, and a replica of the one that is given `queue`."""

    def __init__(self, binary: Path, directory: Path, queue: str) -> None:
        self.buses = [free_port() for _ in range(3)]  # by default 10,000 above the port, which may be too high
        self.nodes = [
            server_in(directory / f"node{number}", binary, *ENABLED, "--cluster-port", str(bus))
            for number, bus in enumerate(self.buses)
        ]
        self.slot = key_slot(Keys(queue).base.encode())
        self.owner, self.other, self.replica = self.nodes

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self._share_slots()
        with connect_sync(self.owner.url) as owner:
            for node, bus in zip(self.nodes, self.buses, strict=True):
                owner.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
        until(lambda: all(len(self._ids(node)) == len(self.nodes) for node in self.nodes), "all nodes to know all")
        self.call(self.replica, "CLUSTER REPLICATE", self.id_of(self.owner))
        until(lambda: all(self._is_ok(node) for node in self.nodes), "the cluster to be well")
        until(lambda: Sentinels.replicas(self.owner) == 1, "the replica to be in step")

    def _share_slots(self) -> None:
        low, high = (self.owner, self.other) if self.slot <= LAST_SLOT // 2 else (self.other, self.owner)
        self.call(low, "CLUSTER ADDSLOTSRANGE", 0, LAST_SLOT // 2)
        self.call(high, "CLUSTER ADDSLOTSRANGE", LAST_SLOT // 2 + 1, LAST_SLOT)

    def _is_ok(self, node: Server) -> bool:
        return b"cluster_state:ok" in self.call(node, "CLUSTER INFO") and len(self.call(node, "CLUSTER SLOTS")) == 2

    def _ids(self, node: Server) -> list[bytes]:
        return [line.split()[0] for line in self.call(node, "CLUSTER NODES").splitlines()]

    def id_of(self, node: Server) -> str:
        return self.call(node, "CLUSTER MYID").decode()

    @staticmethod
    def call(node: Server, command: str, *args: object) -> Any:
        with connect_sync(node.url) as client:
            return client.execute_command(*command.split(), *args)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """Names one node only: not the one that has the queue."""
        return f"redis+cluster://127.0.0.1:{self.other.port}"

    def take_over(self) -> None:
        """The owner dies and its replica takes its place."""
        self.owner.stop(kill=True)
        self.call(self.replica, "CLUSTER FAILOVER", "TAKEOVER")
        self.owner = self.replica
        until(lambda: self.call(self.owner, "ROLE")[0] == b"master", "the replica to be a primary")

    def begin_move(self) -> None:
        """The queue's slot is on its way from its owner to the other primary."""
        self.call(self.other, "CLUSTER SETSLOT", self.slot, "IMPORTING", self.id_of(self.owner))
        self.call(self.owner, "CLUSTER SETSLOT", self.slot, "MIGRATING", self.id_of(self.other))

    def left(self) -> list[bytes]:
        """The keys that are still on the owner."""
        return self.call(self.owner, "CLUSTER GETKEYSINSLOT", self.slot, 1000)

    def move(self, key: bytes) -> None:
        self.call(self.owner, "MIGRATE", "127.0.0.1", self.other.port, key, 0, 5000)

    def end_move(self) -> None:
        for node in (self.other, self.owner):
            self.call(node, "CLUSTER SETSLOT", self.slot, "NODE", self.id_of(self.other))

    def stop(self) -> None:
        for node in self.nodes:
            node.stop(kill=True)


class TlsServer(Server):
    """A server that speaks TLS only, with a certificate of its own authority."""

    def __init__(self, binary: Path, directory: Path, *options: str) -> None:
        self.ca, self.cert, self.key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
        certify(directory)
        files = ("--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key), "--tls-ca-cert-file", str(self.ca))
        super().__init__(binary, directory, "--save", "", "--appendonly", "no", *files, *options)

    @property
    def url(self) -> str:
        files = f"ssl_ca_certs={quote(str(self.ca))}&ssl_certfile={quote(str(self.cert))}"
        return f"rediss://127.0.0.1:{self.port}/0?{files}&ssl_keyfile={quote(str(self.key))}"

    def start(self, *options: str) -> None:
        super().start("--port", "0", "--tls-port", str(self.port), *options)


def certify(directory: Path) -> None:
    """A new authority, and a certificate by it for 127.0.0.1: ca.pem, cert.pem, key.pem. Skips without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is needed to make certificates")

    def openssl(*command: str) -> None:
        subprocess.run(["openssl", *command], cwd=directory, check=True, capture_output=True, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *curve, "-keyout", "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=authority of a test")
    signed = ("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl("req", "-x509", *curve, *signed, "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=127.0.0.1")


def speaks_tls(binary: Path) -> bool:
    """Whether the server was built with TLS."""
    command = [str(binary), "--port", "0", "--tls-port", "1", "--tls-cert-file", "/dev/null", "--daemonize", "no"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    return "TLS support" not in done.stdout and "Missing implement" not in done.stdout
