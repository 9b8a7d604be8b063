"""The largest step that may come, computed once before the KV pool is made: no later one lacks memory. No torch."""

from msgspec.structs import replace

from engine.plan import Entry, Plan
from engine.request import MAX_LOGPROBS, Request, SamplingParams
from engine.sequence import Sequence

# Every way to choose a token that takes memory of its own.
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, logprobs=MAX_LOGPROBS, logit_bias={0: 1.0},
    repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
)  # fmt: skip


def largest_step(rows: int, tokens: int, length: int) -> Plan:
    """A step of `tokens` tokens, of at most `rows` sequences that are `length` long and sample in every way.

    The first ones take in whole prompts, while one token is left for each other. Their blocks are the padding block.
    """
    rows = min(rows, tokens)
    plan = Plan()
    for row in range(rows):
        count = min(length, tokens - plan.tokens - (rows - row - 1))
        sequence = _sequence(row, length)
        plan.opened.append(sequence)
        plan.entries.append(Entry(sequence, 0, row, length - count, count, True, False))
    return plan


def _sequence(row: int, length: int) -> Sequence:
    sampling = replace(EVERYTHING, prompt_logprobs=1) if row == 0 else EVERYTHING
    request = Request(id=f"rehearsal {row}", tokens=[0] * length, sampling=sampling)
    sequence = Sequence(request, limit=length + 1, end_ids=frozenset(), namespace=(), engine_seed=0, longest=length)
    sequence.row, sequence.pending = row, 1
    return sequence
