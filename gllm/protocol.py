"""The wire contract, version 1: what a producer writes and what a client reads. See docs/protocol.md."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

VERSION = 1
MAX_BODY_BYTES = 4 * 1024 * 1024  # a larger body is refused by the claim, by length, before anything parses it
TERMINAL_ENTRY_ID = "9007199254740991-0"  # the largest integer Lua holds exactly: the server refuses any entry after it

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class Message(Struct, frozen=True, kw_only=True):
    """One chat message. Fields beyond role and content go to the chat template as they are."""

    role: str
    content: str


class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a job. Exactly one of `prompt`, `messages`, `token_ids`; the other names are OpenAI's and vLLM's."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    token_ids: list[TokenId] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # None: to the model's limit; 0: the prompt only
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0  # below 1e-5: greedy
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0  # 0 and -1: off
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    include_stop: bool = False
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    parse_special: bool = True
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    metadata: dict[str, Any] | None = None


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of a job over its whole life, whoever worked on it. cached_tokens is that of its first start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0


class TokenLogprob(Struct, frozen=True):
    """Log-softmax of the model's raw logits, of the chosen token and of the `logprobs` best ones. -inf is -9999.0."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]


class Timings(Struct, frozen=True, kw_only=True):
    """Seconds on the finishing worker's monotonic clock, but for `queue`, which is Redis time from submit to claim."""

    queue: float = 0.0
    first_token: float | None = None
    total: float = 0.0


class Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all reply events are: one entry of `out:<id>`, field `d`, JSON, tagged by `type`."""


class Start(Event, frozen=True, kw_only=True, tag="start"):
    worker: str
    attempt: int
    numerics: str
    prompt_tokens: int
    cached_tokens: int


class Resume(Event, frozen=True, kw_only=True, tag="resume"):
    worker: str
    attempt: int
    numerics: str
    first: int = field(name="from")
    exact: bool


class Tokens(Event, frozen=True, kw_only=True, tag="tokens", omit_defaults=True):
    """Tokens `from` … `from + len(ids)` of the reply; `at` code points of text were published before these."""

    first: int = field(name="from")
    at: int
    ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Done(Event, frozen=True, kw_only=True, tag="done"):
    finish_reason: Literal["stop", "length", "cancelled", "deadline"]
    stop: str | int | None
    text: str
    usage: Usage
    timings: Timings
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Error(Event, frozen=True, kw_only=True, tag="error"):
    code: Literal["invalid", "unsupported", "too_large", "max_attempts", "internal"]
    message: str
    retryable: bool = False


ReplyEvent = Start | Resume | Tokens | Done | Error
Terminal = Done | Error

_event_decoder = msgspec.json.Decoder(ReplyEvent)
_json = msgspec.json.Encoder()


class InvalidJob(ValueError):
    """A job body that is not what this page says. The message names the field and the value."""


def encode_event(event: ReplyEvent) -> bytes:
    return _json.encode(event)


def decode_event(data: bytes) -> ReplyEvent:
    return _event_decoder.decode(data)


def encode_job(job: Job) -> bytes:
    return _json.encode(job)
