"""What every reply must be: the same jobs in an engine that nobody disturbs, with the workers' model and settings."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Delta
from gllm.protocol import Job, TokenLogprob
from gllm.validate import decode_job, encoded, job_from
from tests.chaos.workload import Case
from worker.active import logprob_of
from worker.intake import Intake
from worker.startup import load_model
from worker.text import ReplyText


class Expected(Struct, kw_only=True):
    """A whole reply, and what is needed to say what a part of it looks like."""

    job: Job
    prompt: list[int]
    ids: list[int]
    text: str = ""
    finish_reason: str = ""
    stop: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Oracle:
    """Computes replies in this process."""

    def __init__(self, model: Path, **settings: Any) -> None:
        found = load_model(str(model))
        ends = tuple(sorted(found.tokenizer.eos_ids))
        self._engine = Engine(EngineConfig(model=str(found.path), eos_token_ids=ends, **settings))
        self._intake = Intake(found.tokenizer, self._engine.info)
        self._open: dict[str, tuple[ReplyText, Expected]] = {}

    @property
    def numerics(self) -> str:
        return self._engine.info.numerics

    def replies(self, cases: Iterable[Case]) -> dict[str, Expected]:
        """By job id; all of them at once, as the engine can."""
        expected = {case.id: self._begin(case) for case in cases}
        while self._engine.busy:
            for delta in self._engine.step():
                if delta.id in self._open:
                    self._take(*self._open[delta.id], delta)
        return expected

    def part(self, expected: Expected, count: int) -> tuple[str, str]:
        """The text that the first `count` tokens let out, and the tail that they hold back."""
        text = self._intake.reply_text(expected.job, expected.prompt)
        text.push(expected.ids[:count])
        return text.text, text.tail()

    def _begin(self, case: Case) -> Expected:
        job = decode_job(encoded(job_from(**case.job)))
        prompt = self._intake.prepare(job)
        expected = Expected(job=job, prompt=prompt, ids=[])
        self._open[case.id] = self._intake.reply_text(job, prompt), expected
        self._engine.add(self._intake.request(case.id, job, prompt, tenant=case.labels.get("tenant")))
        return expected

    def _take(self, text: ReplyText, expected: Expected, delta: Delta) -> None:
        before = len(text.ids)
        ending = text.push(delta.tokens)
        if delta.prompt_logprobs is not None:
            expected.prompt_logprobs = [None if item is None else logprob_of(item) for item in delta.prompt_logprobs]
        if delta.logprobs is not None:
            made = delta.logprobs[: len(text.ids) - before]
            expected.logprobs = (expected.logprobs or []) + [logprob_of(item) for item in made]
        if ending is None and delta.finish_reason is None:
            return
        assert delta.error is None, f"{delta.id}: {delta.error}"
        self._engine.cancel(delta.id)
        del self._open[delta.id]
        expected.ids, expected.text = text.ids, text.text + text.tail()
        expected.finish_reason, expected.stop = ending or (str(delta.finish_reason), None)


@contextmanager
def undisturbed(model: Path, **settings: Any) -> Iterator[Oracle]:
    """An oracle; afterwards torch has as many threads as before."""
    threads = torch.get_num_threads()
    try:
        yield Oracle(model, **settings)
    finally:
        torch.set_num_threads(threads)
