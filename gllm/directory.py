"""Who is asked which server to talk to: sentinels, or the nodes of a cluster. Pure: what to ask, and what it says.

A queue lies in one slot, and so on one node of a cluster: its users need a connection to that node and no more. They do
not follow ASK redirections: while a slot is being moved, part of its keys is on either side, and a script that runs on
one of them finds no record of jobs that are on the other. They wait until the slot has moved as a whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import ConnectionError  # noqa: A004 (redis-py's name)

from gllm.keys import Keys
from gllm.urls import Address

DOWN = frozenset((b"s_down", b"o_down", b"disconnected"))


class Directory(ABC):
    """Whom to ask for a server's address. The one that answered well is asked first, until its answer proves wrong."""

    command: tuple[str, ...]

    def __init__(self, known: Sequence[Address]) -> None:
        self._known = list(known)

    def to_ask(self) -> list[Address]:
        return list(self._known)

    def prefer(self, address: Address) -> None:
        """It answered, or somebody said that it knows."""
        self._known = [address, *(known for known in self._known if known != address)]

    def distrust(self) -> None:
        """The server was not where the last answer said: one that is cut off gives old answers."""
        self._known.append(self._known.pop(0))

    @abstractmethod
    def read(self, asked: Address, reply: Any) -> Address:
        """What an answer says. Raises ConnectionError when it names no server."""


class SentinelDirectory(Directory):
    """The primary of `service`, from its sentinels."""

    command = ("SENTINEL", "MASTERS")

    def __init__(self, sentinels: Sequence[Address], service: str) -> None:
        super().__init__(sentinels)
        self._service = service

    def read(self, asked: Address, reply: Any) -> Address:
        services: list[dict[bytes, bytes]] = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in reply]
        fields = next((fields for fields in services if fields[b"name"] == self._service.encode()), None)
        if fields is None:
            names = ", ".join(fields[b"name"].decode() for fields in services) or "none"
            raise ConnectionError(f"sentinel {asked} knows no service {self._service!r}; it knows {names}")
        if down := DOWN.intersection(fields[b"flags"].split(b",")):
            raise ConnectionError(f"sentinel {asked}: the primary of {self._service!r} is {min(down).decode()}")
        return Address(fields[b"ip"].decode(), int(fields[b"port"]))


class ClusterDirectory(Directory):
    """The node that has the slot of `queue` (without one: any primary), from all nodes that we have heard of."""

    command = ("CLUSTER", "SLOTS")

    def __init__(self, nodes: Sequence[Address], queue: str | None) -> None:
        super().__init__(nodes)
        self._seeds = list(nodes)  # never forgotten: names may lead to other addresses later
        self._slot = None if queue is None else key_slot(Keys(queue).base.encode())

    def read(self, asked: Address, reply: Any) -> Address:
        ranges = [(first, last, [_node(asked, node) for node in nodes]) for first, last, *nodes in reply]
        learned = [node for _, _, nodes in ranges for node in nodes]
        still = [node for node in self._known if node in learned]
        self._known = list(dict.fromkeys([*still, *learned, *self._seeds]))
        for first, last, nodes in ranges:
            if self._slot is None or first <= self._slot <= last:
                return nodes[0]
        raise ConnectionError(f"cluster node {asked}: no node has slot {self._slot}")


def _node(asked: Address, node: Any) -> Address:
    """A node names itself without a host when it does not know its own: then it has the one that was asked."""
    return Address((node[0] or b"").decode() or asked.host, node[1])
