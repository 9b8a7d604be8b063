"""Error classes, the digest of a model, what a reply stream holds, and tasks whose cancellation is swallowed."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from redis import exceptions as errors

from gllm.protocol import ReplyEvent, Resume, Start, TokenLogprob, Tokens, encode_event
from worker.connection import cancelled, classify
from worker.health import Health
from worker.link import Link
from worker.metrics import Metrics
from worker.replay import Replay, replay
from worker.startup import model_digest

FAULTS = {
    "transient": [
        errors.ConnectionError("Connection refused"),
        errors.TimeoutError("Timeout reading from socket"),
        errors.BusyLoadingError("Redis is loading the dataset in memory"),
        errors.ReadOnlyError("You can't write against a read only replica."),
        errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        errors.MasterDownError("Link with MASTER is down"),
        errors.ClusterDownError("CLUSTERDOWN The cluster is down"),
        errors.TryAgainError("Multiple keys request during rehashing of slot"),
        errors.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        errors.ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL"),
        errors.ResponseError("NOREPLICAS Not enough good replicas to write."),
        errors.ResponseError("OOM command not allowed when used memory > 'maxmemory'. script: f00"),
        ConnectionResetError("reset"),
        TimeoutError(),
    ],
    "group_lost": [
        errors.ResponseError("NOGROUP No such key 'x' or consumer group 'workers'"),
        errors.ResponseError("UNBLOCKED the stream key no longer exists"),
    ],
    "fatal": [
        errors.AuthenticationError("invalid username-password pair or user is disabled."),
        errors.NoPermissionError("this user has no permissions to run the 'evalsha' command"),
        errors.ResponseError("ERR unknown command 'XADD'"),
        errors.ResponseError("BUSYGROUP Consumer Group name already exists"),
        errors.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
    ],
}


@pytest.mark.parametrize(("fault", "error"), [(fault, error) for fault, group in FAULTS.items() for error in group])
def test_every_redis_error_has_one_class(fault: str, error: Exception) -> None:
    assert classify(error) == fault


async def test_link_says_lost_and_restored_once_and_a_fatal_error_ends_the_worker() -> None:
    health, metrics = Health(), Metrics()
    health.to("ready")
    link = Link(health, metrics)
    link.restored()
    assert (health.ready, link.fatal.done()) == (True, False)

    for _ in range(3):
        link.lost(errors.ConnectionError("refused"))
    assert (health.ready, health.live, link.up) == (False, True, False)

    link.restored()
    assert (health.ready, link.up) == (True, True)
    assert 'gllm_recoveries_total{path="reconnected"} 1.0' in metrics.render().decode()

    link.lost(errors.AuthenticationError("wrong password"))
    assert isinstance(link.fatal.result(), errors.AuthenticationError)


async def test_loop_around_something_that_swallows_its_cancellation_ends_all_the_same() -> None:
    turns = 0

    async def swallow() -> None:
        with suppress(asyncio.CancelledError):  # as redis-py does while it connects
            await asyncio.sleep(60)

    async def loop() -> None:
        nonlocal turns
        while not cancelled():
            turns += 1
            await swallow()

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        await task
    assert turns == 1


def tokens(first: int, *ids: int, logprobs: bool = False) -> Tokens:
    scores = [TokenLogprob(token, -1.0) for token in ids] if logprobs else None
    return Tokens(first=first, at=0, ids=list(ids), text="", logprobs=scores)


def start(numerics: str = "n") -> Start:
    return Start(worker="w", attempt=1, numerics=numerics, prompt_tokens=3, cached_tokens=2)


def resume(numerics: str) -> Resume:
    return Resume(worker="w", attempt=2, numerics=numerics, first=2, exact=True)


def read(*events: ReplyEvent) -> Replay:
    return replay(encode_event(event) for event in events)


def test_replay_joins_tokens_and_their_logprobs() -> None:
    found = read(start(), tokens(0, 5, 6, logprobs=True), resume("m"), tokens(2, 7, logprobs=True))

    assert found.ids == [5, 6, 7]
    assert [item.id for item in found.logprobs] == [5, 6, 7]
    assert found.numerics == {"n", "m"}
    assert found.start is not None
    assert found.start.cached_tokens == 2


def test_replay_takes_repeated_tokens_once_and_stops_at_a_hole() -> None:
    assert read(tokens(0, 1, 2), tokens(1, 2, 3)).ids == [1, 2, 3]
    assert read(tokens(0, 1, 2), tokens(4, 5, 6)).ids == [1, 2]
    assert read(tokens(3, 4)).ids == []


def test_replay_ignores_what_is_no_event() -> None:
    assert replay([b"", b"{", b'{"type":"?"}', encode_event(tokens(0, 1))]).ids == [1]


def test_digest_of_a_model_depends_on_weights_config_and_tokenizer(tmp_path: Path) -> None:
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(300_000))
    config.write_text("{}")
    digests = {model_digest(tmp_path, "t")}

    digests.add(model_digest(tmp_path, "other"))
    weights.write_bytes(bytes(299_999) + b"x")
    digests.add(model_digest(tmp_path, "t"))
    weights.write_bytes(bytes(150_000) + b"y" + bytes(150_000))
    digests.add(model_digest(tmp_path, "t"))
    config.write_text('{"a":1}')
    digests.add(model_digest(tmp_path, "t"))

    assert len(digests) == 5
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "adapter.safetensors").write_text("neither the index nor its absence names this one")
    assert model_digest(tmp_path, "t") in digests
    assert len(model_digest(weights, "t")) == 32
