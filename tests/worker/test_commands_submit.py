"""`gllm submit --wait-replicas` against a primary with and without replicas."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gllm.connection import connect_sync
from gllm.keys import Keys
from tests.redis_kinds import Sentinels, until
from tests.servers import binaries
from tests.worker.command_bench import Commands


@pytest.fixture
def pair(server_kind: str, tmp_path: Path) -> Iterator[Sentinels]:
    """A primary, and a replica that is in step; no sentinel runs."""
    pair = Sentinels(binaries()[server_kind], tmp_path)
    pair.one.start()
    pair.two.start()
    until(lambda: pair.replicas(pair.one) == 1, "the replica to be in step")
    yield pair
    pair.stop()


def test_submit_waits_until_replicas_have_the_job(pair: Sentinels, keys: Keys) -> None:
    result = Commands(pair.one.url, keys)("submit", "x", "--id", "a", "--wait-replicas", "1", "--detach")
    assert (result.exit_code, result.stdout) == (0, "a\n")
    with connect_sync(pair.two.url) as replica:
        assert replica.xlen(keys.jobs("normal", 0)) == 1


def test_submit_says_when_too_few_replicas_have_the_job(
    redis_url: str, keys: Keys, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gllm.client.REPLICAS_SECONDS", 0.05)
    result = commands("submit", "x", "--id", "a", "--wait-replicas", "1", "--detach")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: job a is submitted, but 0 of 1 replicas acknowledged it"), result.stderr
    with connect_sync(redis_url) as server:
        assert server.xlen(keys.jobs("normal", 0)) == 1


def test_submit_takes_token_ids_in_place_of_a_prompt(redis_url: str, keys: Keys, commands: Commands) -> None:
    assert commands("submit", "--set", "token_ids=[1,2]", "--detach").exit_code == 0
    with connect_sync(redis_url) as server:
        assert server.xlen(keys.jobs("normal", 0)) == 1
