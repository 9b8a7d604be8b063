"""A request on its way through the engine: its tokens, how far their KV is computed, and its block table. No torch.

Positions of one sequence, and who moves each mark:

    0 ......... kv ......... computed ......... len(tokens) ......... len(tokens) + pending
    committed    │ in flight  │ not yet planned  │ sampled in flight: not known to the host yet
                 └ commit     └ schedule         └ commit appends real tokens
"""

from array import array
from hashlib import blake2b

from engine.blocks import Namespace
from engine.masks import MaskSource
from engine.request import GREEDY_BELOW, Delta, FinishReason, Request, TokenLogprob, Usage


def default_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that gives none: a digest of the engine's seed and its id, 64 bits."""
    digest = blake2b(f"{engine_seed}\0{request_id}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class Sequence:
    """The engine's own record of one request. `limit` is the total length (prompt and output) at which it must end.

    `longest` is the length that ropes which depend on it reckon with: the same in every engine, whatever its pool.
    """

    __slots__ = (
        "admissions",
        "cached",
        "cached_first",
        "computed",
        "done",
        "end_ids",
        "fed",
        "finish_reason",
        "greedy",
        "held",
        "in_flight",
        "kv",
        "limit",
        "longest",
        "mask_source",
        "namespace",
        "pending",
        "preemptions",
        "prompt_length",
        "prompt_logprobs",
        "registered",
        "request",
        "row",
        "seed",
        "table",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        *,
        limit: int,
        end_ids: frozenset[int],
        namespace: Namespace,
        engine_seed: int,
        longest: int = 0,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens = array("i", request.tokens)
        self.tokens.extend(request.output)
        self.prompt_length = len(request.tokens)
        self.limit, self.longest = limit, longest
        self.end_ids = end_ids
        self.namespace = namespace
        self.greedy = sampling.temperature < GREEDY_BELOW
        self.seed = default_seed(engine_seed, request.id) if sampling.seed is None else sampling.seed
        self.table: list[int] = []
        self.row = -1
        self.computed = 0  # positions planned so far, in flight ones included
        self.kv = 0  # positions whose KV is known to be computed
        self.registered = 0  # blocks of the table that are in the index
        self.pending = 0  # tokens sampled in flight
        self.fed = False  # the next input token is on the device, in this sequence's row
        self.in_flight = 0  # launched steps that are not yet collected
        self.done = 0  # positions that were once computed, or found in the cache at the first admission
        self.held = False
        self.mask_source: MaskSource | None = None  # what its next token may be, where not anything
        self.admissions = 0
        self.preemptions = 0
        self.cached = 0  # tokens found in the cache at the current admission
        self.cached_first: int | None = None
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.finish_reason: FinishReason | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def length(self) -> int:
        """Positions that exist: known tokens and those sampled in flight."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions still to plan before the next token is sampled. Zero once all that may be sampled is in flight."""
        return min(self.length, self.last_position) - self.computed

    @property
    def waits(self) -> bool:
        """Not to be stepped now: its client is behind, or its next mask depends on a token that is in flight."""
        return self.held or (self.mask_source is not None and self.pending > 0)

    @property
    def last_position(self) -> int:
        """How many positions ever need KV: the last token of a reply is sampled but never fed."""
        return self.limit - 1 if self.limit > self.prompt_length else self.limit

    @property
    def isolated(self) -> bool:
        """On trial: it takes steps of its own until its first new token is known."""
        return self.request.isolate and len(self.tokens) == self.prompt_length + len(self.request.output)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def ending(self, token: int) -> FinishReason | None:
        """Why the reply ends with this token, its newest; None: it goes on."""
        if token in self.end_ids and self.output_length > self.request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached_first or 0,
            completion_tokens=self.output_length,
            preemptions=self.preemptions,
        )

    def delta(
        self,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        prompt_logprobs: list[TokenLogprob | None] | None = None,
        error: str | None = None,
    ) -> Delta:
        """News of this request, with its end if it has ended."""
        return Delta(
            id=self.id,
            tokens=tokens or [],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=self.finish_reason,
            usage=self.usage(),
            error=error,
        )

    def gather_prompt_logprobs(self, start: int, rows: list[TokenLogprob] | None) -> list[TokenLogprob | None] | None:
        """Add those of the tokens after position `start`. The whole list, once, when the last one is there."""
        if rows is None or len(self.prompt_logprobs) >= self.prompt_length:
            return None
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)
        skip = len(self.prompt_logprobs) - 1 - start  # positions already gathered before a preemption
        self.prompt_logprobs.extend(rows[max(0, skip) :])
        return self.prompt_logprobs if len(self.prompt_logprobs) >= self.prompt_length else None

    def leave_row(self) -> None:
        """Forget everything that belonged to the current admission (its blocks are given back by the scheduler)."""
        self.table = []
        self.row = -1
        self.computed = self.kv = self.registered = self.cached = 0
        self.fed = False
