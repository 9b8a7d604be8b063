"""Whether a run has kept all promises; else a report that has what is needed to understand why not."""

import time
from collections.abc import Iterable, Iterator

import redis

from gllm.keys import Keys
from gllm.protocol import TERMINAL_ENTRY_ID, Done, Error, Tokens
from gllm.reply import read_entry
from tests.chaos.crew import Crew
from tests.chaos.diary import Diary
from tests.chaos.oracle import Expected, Oracle
from tests.chaos.witness import Witness
from tests.conftest import immortal, leftovers

KEPT_SECONDS = 540.0  # a reply's stream is kept for ten minutes
SHOWN_JOBS, SHOWN_EVENTS, SHOWN_NOTES = 3, 30, 60


def judge(witness: Witness, expected: Expected, oracle: Oracle) -> list[str]:
    """What is wrong with one reply, as its client saw it."""
    faults = list(witness.faults)
    if len(witness.terminals) != 1:
        return [*faults, f"{len(witness.terminals)} terminal events"]
    (end,) = witness.terminals
    if isinstance(end, Error):
        return [*faults, f"ended with {end.code}: {end.message}"]
    numerics = {event.numerics for event in (*witness.starts, *witness.resumes)}
    checks = {
        "starts": (len(witness.starts), min(1, len(witness.starts))),
        "numerics": (numerics, numerics & {oracle.numerics}),
        "completion_tokens": (end.usage.completion_tokens, len(witness.ids)),
    }
    cut = end.finish_reason == "cancelled"
    checks |= _cut_short(witness, end, expected, oracle) if cut else _whole(witness, end, expected)
    return faults + [
        f"{name}: got {got!r}, expected {right!r}" for name, (got, right) in checks.items() if got != right
    ]


Checks = dict[str, tuple[object, object]]


def _whole(witness: Witness, end: Done, expected: Expected) -> Checks:
    return {
        "ids": (witness.ids, expected.ids),
        "text": (witness.text, expected.text),
        "finish_reason": (end.finish_reason, expected.finish_reason),
        "stop": (end.stop, expected.stop),
        "prompt_tokens": (end.usage.prompt_tokens, len(expected.prompt)),
        "logprobs": (witness.logprobs, expected.logprobs or []),
        "prompt_logprobs": (end.prompt_logprobs or witness.prompt_logprobs, expected.prompt_logprobs),
    }


def _cut_short(witness: Witness, end: Done, expected: Expected, oracle: Oracle) -> Checks:
    """Cancelled: a prefix. Who ends a job that runs nowhere does not know what its last worker held back."""
    count = len(witness.ids)
    text, tail = oracle.part(expected, count)
    right = text + tail if end.text else text
    return {
        "cancelled": (witness.case.cancel is not None, True),
        "ids": (witness.ids, expected.ids[:count]),
        "text": (witness.text, right),
        "logprobs": (witness.logprobs, (expected.logprobs or [])[:count]),
    }


def judge_stream(client: redis.Redis, keys: Keys, witness: Witness) -> list[str]:
    """What is wrong with the stream itself: each token once, in order, one terminal event, which is the last entry."""
    if time.monotonic() > witness.end_time + KEPT_SECONDS:
        return []
    faults, n, ends = [], 0, []
    for raw, fields in client.xrange(keys.out(witness.case.id)):
        entry, event = read_entry(raw, fields)
        if isinstance(event, Tokens):
            if event.first != n or entry != f"{event.first + len(event.ids)}-0":
                faults.append(f"out: entry {entry} has tokens from {event.first}, after {n}")
            n += len(event.ids)
        elif isinstance(event, Done | Error):
            ends.append(entry)
    if ends != [TERMINAL_ENTRY_ID] or n != len(witness.ids):
        faults.append(f"out: {n} tokens and terminal entries {ends}, the client has {len(witness.ids)} tokens")
    return faults


def judge_queue(client: redis.Redis, keys: Keys, shards: int, letters: int = 0) -> list[str]:
    """What is left of the queue that should not be, once everything has ended and all workers have left."""
    faults = leftovers(client, keys, shards)
    faults += [f"no TTL: {name}" for name in immortal(client, keys)]
    faults += [f"left: {key.decode()}" for key in client.scan_iter(match=f"{keys.base}cancel:*")]
    if client.zcard(keys.delayed):
        faults.append(f"delayed: {client.zrange(keys.delayed, 0, -1)}")
    if client.xlen(keys.dead) != letters:
        faults += [f"dead: {letter}" for letter in client.xrange(keys.dead)]
    return faults


def report(title: str, faulty: dict[Witness, list[str]], others: Iterable[str], crew: Crew, diary: Diary) -> str:
    """Everything that is needed to understand a failure."""
    lines = [title, *others]
    for witness, faults in list(faulty.items())[:SHOWN_JOBS]:
        lines += _job(witness, faults)
    lines += [f"... {len(faulty) - SHOWN_JOBS} more jobs"] if len(faulty) > SHOWN_JOBS else []
    lines += ["--- what was done", *map(str, diary.notes[-SHOWN_NOTES:]), *crew.tails()]
    return "\n".join(lines)


def _job(witness: Witness, faults: list[str]) -> Iterator[str]:
    yield f"--- {witness.case}"
    yield from (f"    fault: {fault}" for fault in faults)
    yield from (f"    {event}" for event in witness.events[-SHOWN_EVENTS:])
