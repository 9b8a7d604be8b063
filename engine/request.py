"""What goes into the engine and what comes out. Plain structs, no torch: they also cross the process boundary."""

from enum import StrEnum
from typing import Literal

from msgspec import Struct, field

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: dividing logits by it would only overflow
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
# Upper bounds by which steps are counted: a decode on a GPU takes milliseconds, a long prefill on a CPU seconds.
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class FinishReason(StrEnum):
    """Every way a sequence can end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen; names and meanings are those of the wire protocol (docs/protocol.md)."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list[int])
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Request(Struct, frozen=True, kw_only=True):
    """A generation request. `output` are tokens already published by an earlier worker; sampling goes on after them.

    `isolate` gives the request steps of its own until its first new token (for one suspected of killing workers).
    """

    id: str
    tokens: list[int]
    output: list[int] = field(default_factory=list[int])
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None
    tenant: str | None = None
    adapter: str | None = None
    isolate: bool = False


class Usage(Struct, frozen=True, kw_only=True):
    """Counts of one request in this engine. cached_tokens is that of its first admission here."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0


TokenLogprob = tuple[int, float, list[tuple[int, float]]]  # id, log-probability, the best (id, log-probability) pairs


class Delta(Struct, frozen=True, kw_only=True):
    """What one step added to one request. Without tokens and reason: admitted, its prefill goes on.

    `prompt_logprobs` comes once, whole, and its first entry is None. `error` is set when `finish_reason` is ERROR, and
    `refusal` with it when the request was at fault and never began.
    """

    id: str
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    refusal: Literal["invalid", "too_large"] | None = None


class Stats(Struct, frozen=True, kw_only=True):
    """An atomic snapshot of the engine's counters (totals since start) and gauges. Plain ints.

    `step_counts`: steps by STEP_SECONDS, the last for longer ones. `step_ns`, `step_host_ns`: see engine.timing.
    """

    blocks_live: int = 0
    blocks_reclaimable: int = 0
    blocks_free: int = 0
    running: int = 0
    waiting: int = 0
    prefix_hit_tokens: int = 0
    prefix_prompt_tokens: int = 0
    prefix_evictions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    recomputed_tokens: int = 0
    resumed_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    step_ns: int = 0
    step_host_ns: int = 0
    step_counts: tuple[int, ...] = (0,) * (len(STEP_SECONDS) + 1)
