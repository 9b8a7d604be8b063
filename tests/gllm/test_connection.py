"""The door to Redis: what a URL may say and what it may not change; how long a lost server is borne with."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import SSLConnection

from gllm.connection import connect, connect_sync
from tests.servers import Server, binaries


def settings_of(client: object) -> dict:
    return client.connection_pool.connection_kwargs  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [connect, connect_sync])
def test_connection_url_cannot_change_what_gllm_stands_on(make: Callable) -> None:
    client = make("redis://h:1/3?protocol=3&decode_responses=true&socket_timeout=99", socket_timeout=7.0, name="me")
    settings = settings_of(client)
    assert (settings["protocol"], settings["decode_responses"], settings["db"]) == (2, False, 3)
    assert (settings["socket_timeout"], settings["socket_connect_timeout"]) == (7.0, 5.0)
    assert settings["client_name"] == "me"
    assert settings["retry"]._retries == 0


@pytest.mark.parametrize("make", [connect, connect_sync])
def test_connection_url_brings_user_password_and_tls(make: Callable) -> None:
    settings = settings_of(make("rediss://ann:p%40ss@h:1/0?ssl_cert_reqs=none"))
    assert (settings["username"], settings["password"], settings["host"]) == ("ann", "p@ss", "h")
    assert issubclass(make("rediss://h:1/0").connection_pool.connection_class, SSLConnection | AsyncSSLConnection)


@pytest.mark.parametrize("make", [connect, connect_sync])
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:6379", "scheme"),
        ("http://localhost", "scheme"),
        ("", "scheme"),
        ("redis://h:99999", "[Pp]ort"),
        ("redis://h?speed=9", "'speed'"),
        ("rediss://h?ssl_ca_certs=/no/such.pem", "ssl_ca_certs: No such file or directory: '/no/such.pem'"),
        ("rediss://h?ssl_cert_reqs=perhaps", "perhaps"),
    ],
)
def test_connection_url_that_is_none_is_refused_by_name(make: Callable, url: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"redis: .*{message}.*, got {url!r}".replace("?", r"\?")):
        make(url)


def test_connection_error_hides_the_password() -> None:
    with pytest.raises(ValueError, match=r"ann:\*\*\*@h") as caught:
        connect("redis://ann:secret@h?speed=9")
    assert "secret" not in str(caught.value)


async def test_connection_speaks_resp2_with_bytes(redis_url: str) -> None:
    async with connect(redis_url, name="speaker") as client:
        assert await client.ping()
        assert await client.execute_command("CLIENT", "GETNAME") == b"speaker"
        assert await client.execute_command("HGETALL", "nobody") == {}
        await client.set("resp", "x", ex=60)
        assert await client.get("resp") == b"x"
    with connect_sync(redis_url) as plain:
        assert plain.get("resp") == b"x"


async def test_connection_through_a_unix_socket(server_kind: str, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    server = Server(binaries()[server_kind], tmp_path, "--unixsocket", str(path), "--save", "")
    server.start()
    try:
        async with connect(f"unix://{path}?db=0") as client:
            assert await client.ping()
        with connect_sync(f"unix://{path}") as plain:
            assert plain.ping()
    finally:
        server.stop()


async def test_connection_sends_a_command_once_when_its_answer_is_lost() -> None:
    """redis-py 8 would send it eleven times: the server here takes each command and hangs up."""
    seen: list[bytes] = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            seen.append(data)
            if b"XADD" in data:
                break
            writer.write(b"+OK\r\n" * data.count(b"*"))
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, connect(f"redis://127.0.0.1:{port}/0") as client:
        with pytest.raises(redis.ConnectionError):
            await client.xadd("s", {"a": "b"})
    assert b"".join(seen).count(b"XADD") == 1
