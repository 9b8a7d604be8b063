"""The health port: states, pages, bad clients, and a port that is taken."""

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from worker import health as health_module
from worker.health import Address, Health, PortError, serve
from worker.metrics import Metrics


async def fetch(address: Address, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to raw bytes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, body


async def get(address: Address, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    return await fetch(address, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [("starting", 200, 503), ("ready", 200, 200), ("draining", 200, 503), ("failed", 503, 503)],
)
async def test_probes_follow_the_state(state: health_module.State, live: int, ready: int) -> None:
    health = Health()
    health.to(state, "because")
    async with serve("127.0.0.1", 0, health, Metrics()) as address:
        assert (await get(address, "/livez"))[0] == live
        status, headers, body = await get(address, "/readyz")
    assert status == ready
    assert state in body.decode()
    assert int(headers["content-length"]) == len(body)
    assert headers["connection"] == "close"


async def test_lost_redis_makes_a_worker_unready_but_keeps_it_alive() -> None:
    health = Health()
    health.to("ready")
    async with serve("127.0.0.1", 0, health, Metrics()) as address:
        health.block("redis", "connection refused")
        status, _, body = await get(address, "/readyz")
        assert (status, body) == (503, b"ready, but not now; redis: connection refused\n")
        assert (await get(address, "/livez"))[0] == 200
        health.unblock("redis")
        assert (await get(address, "/readyz"))[0] == 200


def test_two_blocks_are_lifted_one_by_one() -> None:
    health = Health()
    health.to("ready")
    health.block("redis", "away")
    health.block("engine", "held")
    health.unblock("redis")
    health.unblock("redis")
    assert not health.ready
    assert health.describe() == "ready, but not now; engine: held"
    health.unblock("engine")
    assert health.ready


def test_nothing_leads_out_of_failed_or_back_from_draining() -> None:
    health = Health()
    health.to("draining")
    health.to("ready")
    assert health.state == "draining"
    health.to("failed", "the engine died")
    health.to("ready")
    assert (health.state, health.reason, health.live) == ("failed", "the engine died", False)


async def test_metrics_page_parses_and_shows_what_was_counted() -> None:
    metrics = Metrics()
    metrics.jobs("stop")
    async with serve("127.0.0.1", 0, Health(), metrics) as address:
        status, headers, body = await get(address, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert {s.labels["outcome"]: s.value for s in families["gllm_jobs"].samples}["stop"] == 1


async def test_query_is_ignored_and_head_has_no_body() -> None:
    async with serve("127.0.0.1", 0, Health(), Metrics()) as address:
        assert (await get(address, "/livez?verbose=1"))[0] == 200
        status, headers, body = await get(address, "/livez", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"rubbish\r\n\r\n", 400),
        (b"\xff\xfe\x00 /livez HTTP/1.1\r\n\r\n", 405),
        (b"\r\n\r\n", 400),
        (b"GET /livez SMTP\r\n\r\n", 400),
    ],
)
async def test_bad_requests_get_an_answer_and_the_next_one_is_served(request_bytes: bytes, status: int) -> None:
    async with serve("127.0.0.1", 0, Health(), Metrics()) as address:
        assert (await fetch(address, request_bytes))[0] == status
        assert (await get(address, "/livez"))[0] == 200


async def test_endless_header_and_half_a_request_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "REQUEST_SECONDS", 0.2)
    async with serve("127.0.0.1", 0, Health(), Metrics()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /livez HTTP/1.1\r\n")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /livez HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 10)
        writer.close()
        assert (await get(address, "/livez"))[0] == 200


async def test_page_that_cannot_be_made_is_a_500_and_serving_goes_on() -> None:
    metrics = Metrics()

    class Broken:
        def describe(self) -> list[object]:
            return []

        def collect(self) -> list[object]:
            raise RuntimeError("no numbers today")

    metrics.registry.register(Broken())  # type: ignore[arg-type]
    async with serve("127.0.0.1", 0, Health(), metrics) as address:
        status, _, body = await get(address, "/metrics")
        assert (status, body) == (500, b"RuntimeError: no numbers today\n")
        assert (await get(address, "/livez"))[0] == 200


async def test_open_connection_does_not_hold_up_the_exit() -> None:
    async with serve("127.0.0.1", 0, Health(), Metrics()) as address:
        reader, writer = await asyncio.open_connection(*address)
        assert (await get(address, "/livez"))[0] == 200  # so that the first connection is accepted too
        begin = time.monotonic()
    assert time.monotonic() - begin < health_module.REQUEST_SECONDS / 2
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(*address)
    assert len(asyncio.all_tasks()) == 1


# MX-H5: the port is taken


async def test_occupied_port_is_one_error_that_names_port_and_setting() -> None:
    async with serve("127.0.0.1", 0, Health(), Metrics()) as address:
        with pytest.raises(PortError, match=rf"metrics port {address.port} on 127.0.0.1 is taken.*--metrics-port"):
            async with serve("127.0.0.1", address.port, Health(), Metrics()):
                pass
        assert (await get(address, "/livez"))[0] == 200  # the first owner does not notice


async def test_port_zero_lets_many_workers_live_on_one_host() -> None:
    async with (
        serve("127.0.0.1", 0, Health(), Metrics()) as one,
        serve("127.0.0.1", 0, Health(), Metrics()) as two,
    ):
        assert one.port != two.port
        assert 0 not in (one.port, two.port)
        assert (await get(one, "/livez"))[0] == (await get(two, "/livez"))[0] == 200


async def test_port_is_free_again_after_the_exit() -> None:
    async with serve("127.0.0.1", 0, Health(), Metrics()) as address:
        await get(address, "/livez")
    async with serve("127.0.0.1", address.port, Health(), Metrics()) as again:
        assert again.port == address.port


@pytest.mark.parametrize("port", [-1, 65536, 10**9])
async def test_impossible_port_is_refused_by_name(port: int) -> None:
    with pytest.raises(PortError, match=rf"--metrics-port \(GLLM_METRICS_PORT\): 0 to 65535 expected, got {port}"):
        async with serve("127.0.0.1", port, Health(), Metrics()):
            pass


async def test_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(PortError, match=r"metrics host '192\.0\.2\.1'.*--metrics-host"):
        async with serve("192.0.2.1", 0, Health(), Metrics()):  # TEST-NET-1 (RFC 5737): nobody's
            pass
