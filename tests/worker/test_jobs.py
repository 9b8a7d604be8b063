"""The table of jobs: room, ids that the engine still knows, and what Redis' answers do to a job."""

import asyncio

import pytest
import structlog

from engine.request import Delta, FinishReason, Request, Stats
from gllm.protocol import Done, Error, InvalidJob, Resume, decode_event
from gllm.validate import decode_job
from tests.worker.fake_engine import script
from tests.worker.text_fixtures import byte_level_backend, engine_info, loaded
from worker.active import ActiveJob
from worker.jobs import ON_THEIR_WAY, Jobs
from worker.metrics import Metrics
from worker.queue import Claimed
from worker.replay import Replay
from worker.rows import Answer
from worker.text import ReplyText

PROMPT = [100, 101]


class Commands:
    """Writes down what the engine is told."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.said: list[tuple[str, str]] = []

    def add(self, request: Request) -> None:
        self.said.append(("add", request.id))

    def cancel(self, request_id: str) -> None:
        self.said.append(("cancel", request_id))

    def hold(self, request_id: str) -> None:
        self.said.append(("hold", request_id))

    def unhold(self, request_id: str) -> None:
        self.said.append(("unhold", request_id))


@pytest.fixture
def engine() -> Commands:
    return Commands()


@pytest.fixture
async def jobs(engine: Commands) -> Jobs:
    return Jobs("w", engine_info(max_sequences=3), engine, Metrics())


def claim(job_id: str = "a", **changes: object) -> Claimed:
    values: dict[str, object] = {"id": job_id, "stream": "jobs:normal:0", "entry": "1-0", "epoch": 1, "attempt": 0}
    values |= {"claims": 1, "published": 0, "body": b"", "deadline_ms": None, "tenant": None, "affinity": None}
    values |= {"traceparent": None, "cached_tokens": None, "suspect": False, "submitted_ms": 0, "claimed_ms": 0}
    return Claimed(**(values | {"claimed": 0.0, "taken_from": ""} | changes))  # type: ignore[arg-type]


def begin(jobs: Jobs, job_id: str = "a", **changes: object) -> ActiveJob:
    """A job in the engine."""
    job = jobs.take(claim(job_id, **changes))
    job.prepared(ReplyText(loaded(byte_level_backend()), PROMPT), len(PROMPT), Replay())
    jobs.start(job, Request(id=job_id, tokens=PROMPT))
    return job


def test_room_is_free_rows_and_none_while_the_engine_has_one_waiting(jobs: Jobs, engine: Commands) -> None:
    assert jobs.room == 3
    begin(jobs, "a")
    assert jobs.room == 2
    engine.stats = Stats(waiting=1)
    assert jobs.room == 0
    engine.stats = Stats(running=1)
    jobs.take(claim("b"))
    assert jobs.room == 1


async def test_room_is_bounded_by_what_is_on_its_way_into_the_engine(engine: Commands) -> None:
    jobs = Jobs("w", engine_info(max_sequences=100), engine, Metrics())
    for number in range(ON_THEIR_WAY):
        assert jobs.room == ON_THEIR_WAY - number
        begin(jobs, str(number))
    assert jobs.room == 0
    jobs.step([Delta(id="0"), Delta(id="1")])
    assert jobs.room == 2


async def test_room_is_announced_once_a_preempted_job_is_back_in_its_row(jobs: Jobs, engine: Commands) -> None:
    """It is not admitted for the first time, so nothing else would wake the claims before some job ends."""
    begin(jobs)
    jobs.step([Delta(id="a")])
    announced: list[int] = []
    jobs.on_room = lambda: announced.append(jobs.room)

    engine.stats = Stats(running=0, waiting=1)
    jobs.step([])
    assert announced == []
    engine.stats = Stats(running=1)
    jobs.step([Delta(id="a", tokens=script(PROMPT, 1))])
    assert announced == [2]


def test_id_that_the_engine_still_knows_is_not_claimed_again_until_its_last_word(jobs: Jobs, engine: Commands) -> None:
    job = begin(jobs)
    jobs.step([Delta(id="a", tokens=script(PROMPT, 1))])

    jobs.fenced(job)
    assert (jobs.ids, len(jobs), engine.said[-1]) == (["a"], 0, ("cancel", "a"))

    jobs.step([Delta(id="a", finish_reason=FinishReason.CANCELLED)])
    assert jobs.ids == []


def test_left_over_deltas_of_an_ended_job_change_nothing(jobs: Jobs) -> None:
    job = begin(jobs)
    jobs.step([Delta(id="a", tokens=script(PROMPT, 2))])
    jobs.cancelled(job)
    end = job.terminal

    jobs.step([Delta(id="a", tokens=script(PROMPT, 3)), Delta(id="a", finish_reason=FinishReason.CANCELLED)])

    assert (job.n, job.terminal) == (2, end)
    assert isinstance(end, Done)
    assert end.finish_reason == "cancelled"


def test_pause_holds_what_is_there_and_what_comes_and_keeps_full_buffers_held(jobs: Jobs, engine: Commands) -> None:
    first = begin(jobs, "a")
    jobs.step([Delta(id="a", tokens=script(PROMPT, 300))])
    jobs.pause()
    begin(jobs, "b")
    assert [word for word in engine.said if word[0] == "hold"] == [("hold", "a"), ("hold", "b")]

    jobs.resume()
    assert [word for word in engine.said if word[0] == "unhold"] == [("unhold", "b")]

    first.published = 300
    jobs.published(first)
    assert engine.said[-1] == ("unhold", "a")


def test_deadline_is_kept_by_the_servers_clock(jobs: Jobs) -> None:
    job = begin(jobs, deadline_ms=1000)

    jobs.end_overdue(999)
    assert job.terminal is None
    jobs.end_overdue(1000)
    assert isinstance(job.terminal, Done)
    assert job.terminal.finish_reason == "deadline"


def test_gap_within_our_tokens_is_repaired_and_beyond_them_means_fenced(jobs: Jobs) -> None:
    job = begin(jobs)
    jobs.step([Delta(id="a", tokens=script(PROMPT, 5))])
    job.published = 5

    assert job.repair(Answer("GAP", 3))
    assert [(row.first, row.to) for row in job.rows() if row.kind == "tokens"] == [(3, 5)]
    assert not job.repair(Answer("GAP", 6))


def test_mark_that_a_repair_overtakes_says_where_the_reply_really_goes_on(jobs: Jobs) -> None:
    job = begin(jobs, published=3, claims=2, cached_tokens=0)
    jobs.step([Delta(id="a", tokens=script(PROMPT, 5))])
    assert job.repair(Answer("GAP", 2))

    mark, tokens = job.rows()

    resume = decode_event(mark.event)
    assert isinstance(resume, Resume)
    assert (mark.first, mark.to, resume.first, tokens.first) == (2, 2, 2, 2)


def test_finish_row_waits_for_mark_and_tokens(jobs: Jobs) -> None:
    job = begin(jobs)
    jobs.step([Delta(id="a", tokens=script(PROMPT, 2), finish_reason=FinishReason.LENGTH)])
    assert job.finish_row() is None
    mark, tokens = job.rows()
    job.written(tokens)
    assert job.finish_row() is None
    job.written(mark)
    row = job.finish_row()
    assert row is not None
    assert row.n == 2


def test_answer_about_an_earlier_claim_is_not_taken_for_this_one(jobs: Jobs) -> None:
    old = claim()
    begin(jobs, epoch=3)

    jobs.renewed(old, "FENCED")

    assert len(jobs) == 1


def test_renewal_that_is_fenced_drops_a_job_though_it_has_no_token_to_publish(jobs: Jobs, engine: Commands) -> None:
    job = begin(jobs)

    jobs.renewed(job.claimed, "FENCED")

    assert (len(jobs), engine.said[-1]) == (0, ("cancel", "a"))


def test_suspect_is_acquitted_once_by_its_first_new_token_and_not_by_its_start(jobs: Jobs) -> None:
    acquitted: list[int] = []
    jobs.on_acquitted = lambda: acquitted.append(1)
    job = begin(jobs, suspect=True, published=3, claims=2)

    jobs.published(job)  # the mark is written
    assert acquitted == []
    for job.published in (4, 5):
        jobs.published(job)
    assert acquitted == [1]


def test_job_that_ended_is_not_taken_for_fenced_by_a_renewal_that_overtook_its_finish(jobs: Jobs) -> None:
    """The finish script has ended the record already when the renewal looks at it; its own answer comes a bit later."""
    job = begin(jobs)
    jobs.step([Delta(id="a", tokens=script(PROMPT, 1), finish_reason=FinishReason.LENGTH)])
    jobs.renewed(job.claimed, "FENCED")
    assert jobs.has(job)
    jobs.ended(job)
    assert len(jobs) == 0


@pytest.mark.parametrize("body", [b'{"prompt": "a secret', b'{"prompt": ["a secret"]}', b'{"prompts": "a secret"}'])
async def test_refusal_tells_the_client_the_value_and_the_log_only_the_field(jobs: Jobs, body: bytes) -> None:
    job = jobs.take(claim())
    with pytest.raises(InvalidJob) as refused:
        decode_job(body)
    with structlog.testing.capture_logs() as lines:
        jobs.fail(job, "invalid", str(refused.value))

    assert isinstance(job.terminal, Error)
    assert "secret" in job.terminal.message
    assert "secret" not in str(lines)
    assert lines[-1]["message"].partition(":")[0] in ("body", "prompt", "unknown field")


async def test_waiting_for_the_last_job_ends_when_it_is_gone(jobs: Jobs) -> None:
    job = begin(jobs)
    waiting = asyncio.create_task(jobs.wait_empty())
    await asyncio.sleep(0)
    assert not waiting.done()

    job.failed("internal", "x")
    assert isinstance(job.terminal, Error)
    jobs.ended(job)
    async with asyncio.timeout(5):
        await waiting


def test_regenerated_tokens_are_published_only_beyond_what_the_client_has(jobs: Jobs) -> None:
    job = begin(jobs, published=4, claims=2, cached_tokens=0)  # the reply stream was lost, its count was not
    jobs.step([Delta(id="a", tokens=script(PROMPT, 3))])
    assert [row.kind for row in job.rows()] == ["mark"]
    jobs.step([Delta(id="a", tokens=script(PROMPT, 6)[3:])])

    mark, tokens = job.rows()
    assert (mark.first, tokens.first, tokens.to) == (4, 4, 6)
