"""A device without a tensor, and a bench that drives the scheduler on it. No torch.

The device keeps what the real one keeps: KV by block and offset, block tables and last tokens by row, changed only by a
plan's differences. Each new token is a function of the whole context **as read through the row's table**, so a stale
table, a block handed out twice, or KV taken for computed when it is not changes the reply.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from zlib import crc32

from msgspec import Struct, field

from engine.blocks import BlockPool, UncachedPool
from engine.plan import Entry, Plan, Sampled
from engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.validate import validate_request
from engine.wire import EngineInfo

VOCABULARY = 60
EOS = 2
_UNWRITTEN = -7


def next_token(context: Iterable[int]) -> int:
    """The scripted model: any token but 0 and 1; now and then EOS."""
    return EOS + crc32(array("i", context).tobytes()) % (VOCABULARY - EOS)


def expected(request: Request, most: int) -> list[int]:
    """What a request gets when it is alone, in at most `most` new tokens."""
    sampling, context, output = request.sampling, [*request.tokens, *request.output], list(request.output)
    most = most if sampling.max_tokens is None else min(most, sampling.max_tokens)
    while len(output) < most:
        output.append(next_token(context))
        context.append(output[-1])
        if output[-1] == EOS and not sampling.ignore_eos and len(output) > sampling.min_tokens:
            break
    return output[len(request.output) :]


def engine_info(**changes: object) -> EngineInfo:
    facts: dict[str, object] = {
        "model": "scripted", "numerics": "0", "device": "none", "dtype": "none", "deterministic": True,
        "vocab_size": VOCABULARY, "max_model_len": 512, "block_size": 4, "kv_blocks": 64, "capacity_tokens": 256,
        "max_sequences": 8, "eos_token_ids": [EOS],
    }  # fmt: skip
    return EngineInfo(**facts | changes)  # type: ignore[arg-type]


class Device:
    """Computes plans at launch, in launch order, as a stream does."""

    def __init__(self, blocks: int, block_size: int, rows: int) -> None:
        self.block_size = block_size
        self.kv = [[(_UNWRITTEN, _UNWRITTEN)] * block_size for _ in range(blocks)]  # (token, position)
        self.tables: list[dict[int, int]] = [{} for _ in range(rows)]
        self.last_token = [_UNWRITTEN] * rows
        self.broken: set[str] = set()  # requests whose logits come out as NaN

    def launch(self, plan: Plan) -> Sampled:
        places = [(row, index) for row, index, _ in plan.blocks]
        assert len(set(places)) == len(places), f"a table entry is written twice in one step: {plan.blocks}"
        for row, index, block in plan.blocks:
            self.tables[row][index] = block
        for entry in plan.entries:
            self._write(entry)
        count = len(plan.entries)
        sampled = Sampled([None] * count, [False] * count, [None] * count, [None] * count)
        for index, entry in enumerate(plan.entries):
            self._compute(entry, index, sampled)
        return sampled

    def _place(self, row: int, position: int) -> tuple[int, int]:
        return self.tables[row][position // self.block_size], position % self.block_size

    def _write(self, entry: Entry) -> None:
        known = entry.sequence.tokens[entry.start : entry.start + entry.count]
        tokens = [self.last_token[entry.row]] if entry.fed else list(known)
        assert len(tokens) == entry.count, f"{entry} wants tokens that the host does not know"
        for position, token in enumerate(tokens, start=entry.start):
            block, offset = self._place(entry.row, position)
            self.kv[block][offset] = (token, position)

    def _compute(self, entry: Entry, index: int, sampled: Sampled) -> None:
        sequence, end = entry.sequence, entry.start + entry.count
        read: list[tuple[int, int]] = []
        for position in range(end):
            block, offset = self._place(entry.row, position)
            read.append(self.kv[block][offset])
        assert [position for _, position in read] == list(range(end)), f"{sequence.id} reads foreign KV: {read}"
        context = [token for token, _ in read]
        sampled.broken[index] = sequence.id in self.broken
        if entry.samples:
            sampled.tokens[index] = self.last_token[entry.row] = next_token(context)
        if sequence.wants_prompt_logprobs and entry.start < sequence.prompt_length:
            last = min(end, sequence.prompt_length - 1)
            rows: list[TokenLogprob] = [(sequence.tokens[p + 1], -float(p), []) for p in range(entry.start, last)]
            sampled.prompt_logprobs[index] = rows


class Told(Struct):
    """All that was said of one request."""

    tokens: list[int] = field(default_factory=list[int])
    ends: list[Delta] = field(default_factory=list[Delta])
    cached: set[int] = field(default_factory=set[int])
    prompt_logprobs: list[list[TokenLogprob | None]] = field(default_factory=list[list[TokenLogprob | None]])

    @property
    def reason(self) -> FinishReason | None:
        return self.ends[0].finish_reason if self.ends else None


class Bench:
    """A scheduler and its device. Every operation is followed by `check`."""

    def __init__(
        self, *, blocks: int = 64, block_size: int = 4, rows: int = 8, budget: int = 64, cache: bool = True,
        depth: int = 1,
    ) -> None:  # fmt: skip
        pool = BlockPool if cache else UncachedPool
        self.pool = pool(blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_sequences=rows, max_step_tokens=budget)
        self.device = Device(blocks, block_size, rows)
        sizes = {"block_size": block_size, "kv_blocks": blocks, "capacity_tokens": blocks * block_size}
        self.info = engine_info(max_model_len=4096, **sizes)
        self.sequences: dict[str, Sequence] = {}
        self.told: dict[str, Told] = {}
        self.launched: deque[tuple[Plan, Sampled]] = deque()
        self.plans: list[dict[str, int]] = []  # tokens by request, of each step
        self._rows, self._depth = rows, depth

    def add(self, name: str, tokens: Iterable[int], max_tokens: int | None = 4, **more: object) -> Sequence:
        own = {key: more.pop(key) for key in list(more) if key in SamplingParams.__struct_fields__}
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True} | own)  # type: ignore[arg-type]
        request = Request(id=name, tokens=list(tokens), sampling=sampling, **more)  # type: ignore[arg-type]
        ends = frozenset() if sampling.ignore_eos else frozenset({EOS})
        space = (("tenant", request.tenant), ("salt", request.cache_salt))
        limit = validate_request(request, self.info)
        sequence = Sequence(request, limit=limit, end_ids=ends, namespace=space, engine_seed=0)
        self.sequences[name], self.told[name] = sequence, Told()
        self.scheduler.add(sequence)
        self.check()
        return sequence

    def launch(self) -> Plan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append({entry.sequence.id: entry.count for entry in plan.entries})
            assert plan.tokens <= self.scheduler.max_step_tokens
            self.launched.append((plan, self.device.launch(plan)))
            for sequence in self.scheduler.running:
                there = [self.device.tables[sequence.row][index] for index in range(len(sequence.table))]
                assert there == sequence.table, f"{sequence.id}: the device has {there}, the host {sequence.table}"
        self.check()
        return plan

    def collect(self) -> None:
        self.take(self.scheduler.commit(*self.launched.popleft()))

    def step(self) -> None:
        while len(self.launched) < self._depth and self.launch():
            pass
        if self.launched:
            self.collect()

    def launch_ahead(self) -> None:
        """Launch, and collect nothing, as far as the depth allows."""
        if len(self.launched) < self._depth:
            self.launch()

    def run(self, most: int = 500) -> None:
        """Until nothing is left; within `most` steps."""
        for _ in range(most):
            if not self.busy:
                self.settle()
                return
            self.step()
        raise AssertionError(f"still busy after {most} steps: {self.plans[-5:]}")

    def cancel(self, name: str) -> None:
        delta = self.scheduler.cancel(self.sequences[name])
        self.take([delta] if delta else [])

    def fail(self) -> None:
        """Everything that is launched fails."""
        while self.launched:
            self.take(self.scheduler.fail(self.launched.popleft()[0], "boom"))

    def clear(self) -> None:
        self.pool.clear()
        self.scheduler.forget_registrations()
        self.check()

    @property
    def busy(self) -> bool:
        return bool(self.launched) or any(not told.ends for told in self.told.values())

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            told = self.told[delta.id]
            assert not told.ends, f"{delta.id} goes on after its end"
            told.tokens += delta.tokens
            told.cached.add(delta.usage.cached_tokens)
            told.prompt_logprobs += [delta.prompt_logprobs] if delta.prompt_logprobs is not None else []
            told.ends += [delta] if delta.finish_reason is not None else []
        self.check()

    def check(self) -> None:
        """The books of blocks and rows."""
        scheduler = self.scheduler
        self.pool.check(scheduler.tables)
        seated = [*scheduler.running, *scheduler._retiring]
        rows = sorted([sequence.row for sequence in seated] + scheduler._rows)
        assert rows == list(range(self._rows)), f"rows leak or are shared: {rows}"
        assert all(sequence.row < 0 and not sequence.table for sequence in scheduler.waiting)
        counts = self.pool.counts
        assert counts.live + counts.reclaimable + counts.free == self.pool.size

    def settle(self) -> None:
        """Nothing runs: no block is live, every row is free, every request has ended once."""
        scheduler = self.scheduler
        assert (self.pool.counts.live, len(scheduler.running), len(scheduler.waiting)) == (0, 0, 0)
        assert len(scheduler._rows) == self._rows
        assert all(len(told.ends) == 1 for told in self.told.values())

    def prove(self, *names: str) -> None:
        """These requests (all, if none is named) got exactly what they get alone, and ended well."""
        for name in names or self.told:
            sequence, told = self.sequences[name], self.told[name]
            right = expected(sequence.request, sequence.limit - sequence.prompt_length)
            assert told.tokens == right, f"{name} got {told.tokens}, alone {right}"
            assert told.reason in (FinishReason.STOP, FinishReason.LENGTH)
