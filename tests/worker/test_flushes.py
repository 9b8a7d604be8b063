"""When the publisher flushes: how long tokens wait for others, and what does not wait. With Redis' part a stand-in."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.worker.queue_bench import until
from worker import publisher
from worker.health import Health
from worker.link import Link
from worker.metrics import Metrics
from worker.publisher import Publisher
from worker.rows import Answer, AppendRow, FinishRow


class Stub:
    """A job as the publisher sees it: `n` tokens, `written` of them in Redis; the end of it when `ended` is set."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.n = self.done = 0
        self.ended = False

    @property
    def urgent(self) -> bool:
        return self.ended or self.done == 0

    @property
    def lacking(self) -> bool:
        return self.n > self.done

    def rows(self) -> list[AppendRow]:
        return [AppendRow("tokens", self.id, 1, self.done, self.n, b"")] if self.lacking else []

    def finish_row(self) -> FinishRow | None:
        return FinishRow(self.id, 1, self.n, "s", "1-0", b"") if self.ended else None

    def written(self, row: AppendRow) -> None:
        self.done = row.to


class Flushes:
    """A publisher over a queue whose every append takes `seconds`; `calls`: when each began, and the rows by id."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[tuple[float, dict[str, int]]] = []
        self.finished: list[str] = []
        link = Link(Health(), Metrics())
        link.restored()
        self.publisher = Publisher(self, link, self)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.publisher.run())

    async def append(self, rows: list[AppendRow]) -> list[Answer]:
        self.calls.append((time.monotonic(), {row.id: row.to - row.first for row in rows}))
        await asyncio.sleep(self.seconds)
        return [Answer("OK", row.to) for row in rows]

    async def finish(self, rows: list[FinishRow]) -> list[Answer]:
        self.finished += [row.id for row in rows]
        return [Answer("OK", row.n) for row in rows]

    def has(self, job: Stub) -> bool:
        return job.id not in self.finished

    def published(self, job: Stub) -> None:
        pass

    def buried(self, job: Stub) -> None:
        pass

    def ended(self, job: Stub) -> None:
        pass

    def token(self, job: Stub) -> None:
        job.n += 1
        self.publisher.changed(job)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def met() -> bool:
            return condition()

        await until(met, what)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_flushes_fill_half_of_the_time_and_what_comes_meanwhile_shares_an_entry() -> None:
    flushes, job = Flushes(0.01), Stub("a")
    began = time.monotonic()
    while job.n < 60:
        flushes.token(job)
        await asyncio.sleep(0.002)
    elapsed = time.monotonic() - began
    await flushes.stop()

    sizes = [rows["a"] for _, rows in flushes.calls]
    assert sizes[0] == 1
    assert max(sizes) > 3
    assert len(sizes) <= elapsed / (2 * 0.01) + 2


async def test_no_flush_is_put_off_beyond_the_bound_however_long_the_one_before_took() -> None:
    flushes, job = Flushes(1.0), Stub("a")
    flushes.token(job)
    await flushes.until(lambda: job.done == 1, "the first token")
    flushes.token(job)
    await flushes.until(lambda: len(flushes.calls) == 2, "the second one")
    await flushes.stop()

    (first, _), (second, _) = flushes.calls
    assert 1.0 <= second - first < 1.9  # twice the flush would have been 2.0


async def test_first_tokens_and_ends_do_not_wait_and_take_no_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MERGE_FACTOR", 10_000)
    monkeypatch.setattr(publisher, "MERGE_SECONDS", 300.0)
    flushes, old, new = Flushes(0.03), Stub("old"), Stub("new")
    flushes.token(old)
    await flushes.until(lambda: old.done == 1, "the first token of all")
    flushes.token(old)  # from here on nothing but what is urgent is written for five minutes
    flushes.token(new)
    await flushes.until(lambda: new.done == 1, "the first token of the other job")
    old.ended = True
    flushes.token(old)
    await flushes.until(lambda: bool(flushes.finished), "the end")
    await flushes.stop()

    assert [rows for _, rows in flushes.calls] == [{"old": 1}, {"new": 1}, {"old": 2}]
    assert flushes.finished == ["old"]
