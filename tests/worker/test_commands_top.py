"""`gllm top`: rates against looks that are known, the page, the terminal, and real workers on real servers."""

import asyncio
import json
import re
import signal
from typing import Any

import msgspec
import pytest

from engine.request import Stats
from tests.servers import first_kind
from tests.worker.command_bench import Commands
from tests.worker.fake_engine import FakeEngine
from tests.worker.queue_bench import QueueBench
from tests.worker.service_bench import ServiceBench
from worker.commands.tables import Page
from worker.commands.top_page import ORDERS, Layout, as_json, ordered, screen
from worker.commands.top_rates import HITS_MS, Look, Rates, Watch
from worker.inspection.records import EngineView, JobList, JobRow, QueueView, WorkerRow

EVIL = "x\x1b[2J\x9b\u202e\n"


@pytest.fixture
def server_kind() -> str:
    """One kind is enough: what the scripts say is the same on each, as their own tests show."""
    return first_kind()


def engine(tokens: int = 0, prompt: int = 0, hit: int = 0, asked: int = 0, **more: int) -> EngineView:
    counts = {"running": 0, "waiting": 0, "blocks_live": 0, "blocks": 100, "vocabulary": 300, "context": 128}
    return EngineView(
        generation_tokens=tokens, prompt_tokens=prompt, prefix_hit_tokens=hit, prefix_prompt_tokens=asked,
        **{**counts, **more},
    )  # fmt: skip


def worker(name: str, view: EngineView | None, beat_ms: int = 0, state: Any = "alive") -> WorkerRow:
    return WorkerRow(name=name, state=state, jobs=1, heartbeat_ms=beat_ms, capacity="8", engine=view)


def job(job_id: str, tokens: int = 0, state: Any = "running", **more: Any) -> JobRow:
    values = {"priority": "normal", "stream": "jobs:normal:0", "entry": f"{job_id}-0", "age_ms": 0, "attempts": 0}
    return JobRow(
        **{"id": job_id, "state": state, "tokens": tokens, "claims": 1, "cancelling": False, **values, **more}
    )


def look(now_ms: int, *rows: WorkerRow | JobRow, **counts: int) -> Look:
    workers = [row for row in rows if isinstance(row, WorkerRow)]
    jobs = [row for row in rows if isinstance(row, JobRow)]
    alive = sum(row.state == "alive" for row in workers)
    view = QueueView(
        queue="chat",
        priorities=[],
        delayed=0,
        due_in_ms=None,
        dead=0,
        workers_alive=alive,
        workers_silent=0,
        problems=[],
    )
    listed = {"held": len(jobs), "orphaned": 0, "released": 0, "waiting": 0, "delayed": 0} | counts
    return Look(now_ms=now_ms, queue=view, workers=workers, jobs=JobList(jobs=jobs, **listed))


def watched(*looks: Look) -> Watch:
    watch = Watch()
    for one in looks:
        watch.take(one)
    return watch


# --- rates ---


def test_rates_are_those_between_two_heartbeats_not_between_two_looks() -> None:
    first = look(10_000, worker("a", engine(100, 40), beat_ms=1000))  # its heartbeat came at 9,000
    same = look(11_000, worker("a", engine(100, 40), beat_ms=2000))
    assert watched(first, same).worker("a") == Rates(hit_rate=None)
    later = look(15_000, worker("a", engine(600, 140), beat_ms=1000))  # at 14,000
    found = watched(first, same, later).all()
    assert (found.tokens_per_second, found.prompt_tokens_per_second) == (100.0, 20.0)


def test_rates_are_summed_over_living_workers_only() -> None:
    looks = [
        look(at, worker("a", engine(at // 10)), worker("b", engine(at // 20)), worker("c", engine(at), state="silent"))
        for at in (0, 5000)
    ]
    watch = watched(*looks)
    assert watch.all().tokens_per_second == 100.0 + 50.0
    assert watch.worker("c") == Rates()
    assert watched(*looks, look(6000)).all() == Rates(), "who has left is forgotten"


def test_rate_is_of_the_last_ten_seconds_and_history_is_bounded() -> None:
    watch, tokens = Watch(), 0
    for at in range(0, 10 * HITS_MS, 5000):
        tokens += 0 if at < 9 * HITS_MS else 500
        watch.take(look(at, worker("a", engine(tokens))))
    assert watch.all().tokens_per_second == 100.0
    (kept,) = watch._engines._values.values()
    assert len(kept) == HITS_MS // 5000 + 1


def test_hit_rate_is_of_the_last_minute_else_since_the_start() -> None:
    start = look(0, worker("a", engine(hit=10, asked=100)), worker("b", engine(hit=0, asked=100)))
    watch = watched(start)
    assert (watch.all().hit_rate, watch.hit_rate_total(), watch.worker("a").hit_rate) == (0.05, 0.05, 0.1)
    watch.take(look(5000, worker("a", engine(hit=90, asked=200)), worker("b", engine(hit=0, asked=100))))
    assert (watch.all().hit_rate, watch.hit_rate_total(), watch.worker("b").hit_rate) == (0.8, 0.3, 0.0)


def test_rate_of_a_job_needs_two_looks_and_never_is_negative() -> None:
    looks = [look(at, job("a", tokens), job("b", 50 - tokens)) for at, tokens in ((0, 10), (500, 20), (1000, 40))]
    assert watched(looks[0]).job(job("a")) is None
    watch = watched(*looks)
    assert (watch.job(job("a")), watch.job(job("b")), watch.running()) == (30.0, 0.0, 30.0)
    assert watched(*looks, look(1500, job("a", 40, state="orphaned"))).running() is None


def test_jobs_are_sorted_by_what_was_asked_for() -> None:
    rows = [job("a", 5, age_ms=10), job("b", 50, age_ms=30), job("c", 20, age_ms=20)]
    watch = watched(look(0, job("a", 0), job("b", 49), job("c", 10)), look(1000, *rows))
    found = {order: "".join(row.id for row in ordered(rows, watch, order)) for order in ORDERS}
    assert found == {"turn": "abc", "age": "bca", "tokens": "bca", "rate": "cab"}


# --- the page ---


def page_of(seen: Look, height: int | None, watch: Watch | None = None) -> list[str]:
    return screen(seen, watch or watched(seen), Layout(Page(), height, "turn"))


def test_page_of_top_says_what_is_known() -> None:
    seen = [
        look(at, worker("host-1", engine(tokens, 10, 30, 40, running=2, waiting=1, blocks_live=50)), job("a", tokens),
             waiting=3)
        for at, tokens in ((0, 0), (2000, 25))
    ]  # fmt: skip
    text = page_of(seen[1], None, watched(*seen))
    assert [re.sub("  +", "  ", line) for line in text] == [
        "queue  chat",
        "workers  1 alive",
        "jobs  1 running, 3 waiting",
        "tokens/s  12.5 of the running jobs; 12.5 out and 0.0 of prompts by the last heartbeats",
        "hit rate  75% of the last minute, 75% since the workers' start",
        "kv cache  ██████████░░░░░░░░░░ 50%, 2 sequences in it, 1 wait for room",
        "",
        "WORKER  STATE  JOBS  TOKENS/S  PROMPT/S  HITS  KV  HEARTBEAT  UP  DEVICE",
        "host-1  alive  1/8  12.5  0.0  75%  50%  0ms  -  -",
        "",
        "JOB  STATE  PRIORITY  AGE  TOKENS  TOKENS/S  ATTEMPTS  WORKER",
        "a  running  normal  0ms  25  12.5  0  -",
        "… and 3 more",
    ]


@pytest.mark.parametrize("height", [24, 40, 60])
def test_page_fits_the_terminal_and_counts_what_it_leaves_out(height: int) -> None:
    rows = [worker(f"w{number}", engine()) for number in range(100)]
    text = page_of(look(0, *rows, *(job(f"j{number}") for number in range(100)), waiting=900), height)
    assert len(text) == height
    workers = sum(line.startswith("w") and "1/8" in line for line in text)
    jobs = sum(line.startswith("j") and "normal" in line for line in text)
    assert workers >= 3
    assert jobs >= 3
    assert f"… and {100 - workers} more" in text
    assert text[-1] == f"… and {1000 - jobs:,} more"


def test_page_counts_jobs_that_were_not_looked_at_within_its_height() -> None:
    pages = [page_of(look(0, *(job(f"j{number}") for number in range(count)), waiting=7), 24) for count in (13, 14, 15)]
    assert [(len(text), text[-1]) for text in pages] == [
        (23, "… and 7 more"),
        (24, "… and 7 more"),
        (24, "… and 8 more"),
    ]


def test_nothing_in_a_look_steers_the_terminal() -> None:
    evil = msgspec.structs.replace(worker(EVIL, engine()), device=EVIL, capacity=EVIL)
    seen = look(0, evil, job(EVIL, worker=EVIL, priority=EVIL))
    seen = msgspec.structs.replace(seen, queue=msgspec.structs.replace(seen.queue, problems=[EVIL]))
    assert [line for line in page_of(seen, None) if not line.isprintable()] == []
    assert as_json(seen, Watch(), "turn")["jobs"][0]["id"] == EVIL


# --- real servers ---


async def test_heartbeat_has_the_engines_newest_numbers(crew: ServiceBench, commands: Commands) -> None:
    engine = FakeEngine(step_seconds=0.02)
    await crew.start(engine=engine)

    async def said() -> Any:
        workers = (await asyncio.to_thread(commands.json, "top", "--count", "1"))["workers"]
        return workers[0]["engine"] if workers else None

    first = await crew.until_async(said, "the first heartbeat")
    assert (first["blocks"], first["vocabulary"], first["context"], first["generation_tokens"]) == (16, 300, 4096, 0)
    engine.stats = Stats(generation_tokens=70, prefix_hit_tokens=30, prefix_prompt_tokens=40, running=3, blocks_live=5)

    async def fresh() -> Any:
        now = await said()
        return now if now and now["generation_tokens"] else None

    now = await crew.until_async(fresh, "a heartbeat with the new numbers")
    assert [now[name] for name in ("generation_tokens", "prefix_hit_tokens", "running", "blocks_live")] == [
        70,
        30,
        3,
        5,
    ]


async def test_top_adds_up_two_workers(crew: ServiceBench, commands: Commands) -> None:
    engines = [FakeEngine(step_seconds=0.02, max_sequences=1) for _ in range(2)]
    for one in engines:
        await crew.start(engine=one)
    for name in ("a", "b", "c"):
        await crew.submit(name, max_tokens=2000)
    await crew.published("a", 1)
    await crew.published("b", 1)
    process = commands.process("top", "--json", "--interval", "0.1", stdout=-1, stderr=-1)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(10):
            while True:
                for one in engines:
                    one.stats = Stats(generation_tokens=one.stats.generation_tokens + 10, prefix_prompt_tokens=10)
                shown = json.loads(await asyncio.to_thread(process.stdout.readline))
                if shown["tokens_per_second"] and all(w["tokens_per_second"] for w in shown["workers"]):
                    break
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, b"")
    assert (len(shown["workers"]), shown["held"], shown["waiting"], shown["hit_rate"]) == (2, 2, 1, 0.0)
    each = [worker["tokens_per_second"] for worker in shown["workers"]]
    assert shown["tokens_per_second"] == pytest.approx(sum(each), abs=0.001)
    assert [row["state"] for row in shown["jobs"]] == ["running", "running", "waiting"]
    assert shown["jobs"][0]["tokens_per_second"] > 0


def test_top_without_a_terminal_prints_a_page_per_look(commands: Commands) -> None:
    result = commands("top", "--count", "2", "--interval", "0.1")
    assert result.exit_code == 0
    assert result.stdout.count("no workers\n") == 2
    assert "\x1b" not in result.stdout


async def test_top_bears_what_others_have_written_to_heartbeats(bench: QueueBench, commands: Commands) -> None:
    await bench.worker("w1", lease=20)
    await bench.redis.hset(bench.keys.worker("w1"), mapping={"generation_tokens": "9" * 40, "blocks": EVIL})
    await bench.redis.expire(bench.keys.worker("w1"), 60)
    shown = commands.json("top", "--count", "1")
    assert (shown["workers"][0]["engine"], shown["tokens_per_second"]) == (None, None)
