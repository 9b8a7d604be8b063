"""What sentinels and nodes of a cluster say, without servers."""

from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError

from gllm.directory import ClusterDirectory, Directory, SentinelDirectory
from gllm.keys import Keys
from gllm.urls import Address

A, B, C = Address("a", 1), Address("b", 2), Address("c", 3)
HALF = 8192


def primary(name: bytes = b"main", flags: bytes = b"master") -> list[bytes]:
    return [b"name", name, b"ip", b"10.0.0.9", b"port", b"6380", b"flags", flags]


def node(address: Address | None, *, host: Any = "", port: int = 0) -> list[Any]:
    return [address.host.encode(), address.port, b"id", []] if address else [host, port, b"id", []]


def test_sentinel_names_the_primary_of_its_service() -> None:
    directory = SentinelDirectory([A, B], "main")
    assert directory.read(A, [primary(b"other"), primary()]) == ("10.0.0.9", 6380)


@pytest.mark.parametrize("flags", [b"s_down,master", b"master,o_down", b"master,disconnected"])
def test_sentinel_that_sees_the_primary_down_names_none(flags: bytes) -> None:
    with pytest.raises(RedisConnectionError, match="sentinel a:1: the primary of 'main' is "):
        SentinelDirectory([A], "main").read(A, [primary(flags=flags)])


def test_sentinel_of_other_services_says_which() -> None:
    with pytest.raises(RedisConnectionError, match="sentinel a:1 knows no service 'mian'; it knows main, x"):
        SentinelDirectory([A], "mian").read(A, [primary(), primary(b"x")])
    with pytest.raises(RedisConnectionError, match="it knows none"):
        SentinelDirectory([A], "main").read(A, [])


@pytest.mark.parametrize("directory", [SentinelDirectory([A, B, C], "main"), ClusterDirectory([A, B, C], "q")])
def test_one_that_answers_is_asked_first_until_it_is_distrusted(directory: Directory) -> None:
    assert directory.to_ask() == [A, B, C]
    directory.prefer(B)
    assert directory.to_ask() == [B, A, C]
    directory.distrust()
    assert directory.to_ask() == [A, C, B]


@pytest.mark.parametrize("queue", ["chat", "batch", "default", "a", "b"])
def test_cluster_names_the_node_of_the_queues_slot(queue: str) -> None:
    reply = [[0, HALF - 1, node(A), node(C)], [HALF, 16383, node(B)]]
    slots = {key_slot(key.encode()) for key in (Keys(queue).base, Keys(queue).jobs("low", 3), Keys(queue).out("x"))}
    (slot,) = slots
    assert ClusterDirectory([C], queue).read(C, reply) == (A if slot < HALF else B)


def test_cluster_without_a_queue_names_a_primary() -> None:
    assert ClusterDirectory([C], None).read(C, [[0, 16383, node(B), node(C)]]) == B


def test_cluster_without_a_node_for_the_slot_names_none() -> None:
    slot = key_slot(Keys("q").base.encode())
    with pytest.raises(RedisConnectionError, match=f"cluster node a:1: no node has slot {slot}"):
        ClusterDirectory([A], "q").read(A, [[0, slot - 1, node(A)], [slot + 1, 16383, node(B)]])


@pytest.mark.parametrize("host", [b"", None])
def test_cluster_node_that_does_not_know_its_name_has_the_one_we_used(host: bytes | None) -> None:
    assert ClusterDirectory([A], "q").read(A, [[0, 16383, node(None, host=host, port=7)]]) == ("a", 7)


def test_cluster_learns_its_nodes_and_forgets_those_that_left_but_never_its_seeds() -> None:
    directory = ClusterDirectory([A], "q")
    directory.read(A, [[0, 16383, node(B), node(C)]])
    assert sorted(directory.to_ask()) == [A, B, C]
    directory.read(B, [[0, 16383, node(C)]])
    assert sorted(directory.to_ask()) == [A, C]
