"""The synchronous heart: add, cancel, step, stats."""

from collections import deque
from collections.abc import Callable
from functools import cached_property

from engine.blocks import BlockPool, Namespace, UncachedPool
from engine.config import IN_FLIGHT, STEP_TOKENS, EngineConfig
from engine.handle import Handle
from engine.plan import Plan
from engine.request import Delta, Request, Stats
from engine.runner import Runner, device_name
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.timing import StepTimes
from engine.validate import longest_length, validate_config, validate_request
from engine.wire import EngineInfo


class Engine:
    """Continuous batching of many requests on one device. Not thread-safe; `step` blocks while the device works.

    `on_launch` is told the requests of all steps in flight before each launch; `on_compile` is told what is compiled or
    captured, before that begins, while loading or in a step. Raises ModelError and DeviceError (both ValueErrors) when
    the model or the settings are at fault.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_launch: Callable[[list[str]], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ) -> None:
        validate_config(config)
        self._on_launch = on_launch
        self.config = config
        self.runner = Runner(config, on_compile or (lambda what: None))
        pool_kind = BlockPool if config.prefix_cache else UncachedPool
        self.pool = pool_kind(self.runner.kv_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens or STEP_TOKENS[self.runner.device.type],
        )
        self.eos_token_ids = frozenset(self.runner.model_config.eos_token_ids) | frozenset(config.eos_token_ids)
        self.failure: Exception | None = None  # what the last failed step raised
        self._sequences: dict[str, Sequence] = {}
        self._ended: list[Delta] = []  # endings that no step brought: cancels
        self._launched: deque[Handle] = deque()
        overlap = self.runner.device.type == "cuda" if config.overlap == "auto" else config.overlap
        self._depth = IN_FLIGHT if overlap else 1
        self._steps = 0
        self.runner.warm_up()
        self._times = StepTimes(lambda: self.runner.device_ns)

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError naming field and value for what can be known to be wrong at once."""
        if request.id in self._sequences:
            raise ValueError(f"id: {request.id!r} is already running")
        limit = validate_request(request, self.info)
        sequence = Sequence(
            request,
            limit=limit,
            end_ids=self._end_ids(request),
            namespace=self._namespace(request),
            engine_seed=self.config.seed,
            longest=longest_length(request, self.info),
        )
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request with FinishReason.CANCELLED; one that has ended (or never was) is left alone."""
        sequence = self._sequences.get(request_id)
        delta = self.scheduler.cancel(sequence) if sequence is not None else None
        if delta is not None:
            self._ended.append(delta)

    def hold(self, request_id: str) -> None:
        """Do not step this request for now; it keeps its place and its KV."""
        if request_id in self._sequences:
            self._sequences[request_id].held = True

    def unhold(self, request_id: str) -> None:
        if request_id in self._sequences:
            self._sequences[request_id].held = False

    # -- stepping -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has anything left to do: requests that have not ended, endings to return, steps in flight."""
        return bool(self._sequences or self._launched)

    def step(self) -> list[Delta]:
        """Plan, compute and commit one step; what it brought to each request, endings included."""
        self.launch_ahead()
        return self.collect()

    def launch_ahead(self) -> bool:
        """Launch as many steps as may be in flight at once. False when none is."""
        while len(self._launched) < self._depth and self.launch():
            pass
        return bool(self._launched)

    def launch(self) -> bool:
        """Plan a step and start it on the device. False when there is nothing to step, or the step failed at once."""
        self._times.begin()
        plan = self.scheduler.schedule()
        if plan is None:
            if not self._launched:
                self._times.idle()
            return False
        if self._on_launch is not None:
            plans = [*(handle.plan for handle in self._launched), plan]
            self._on_launch(list(dict.fromkeys(entry.sequence.id for plan in plans for entry in plan.entries)))
        try:
            self._launched.append(self.runner.launch(plan))
        except Exception as error:  # whatever a kernel raises: the books must stay right, and the caller is told
            self._fail([*(handle.plan for handle in self._launched), plan], error)
            return False
        return True

    def collect(self) -> list[Delta]:
        """Wait for the oldest launched step and commit it."""
        deltas = self._commit_oldest() if self._launched else []
        deltas, self._ended = self._ended + deltas, []
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._sequences[delta.id]
        if not self.busy:
            self._times.idle()
        return deltas

    def _commit_oldest(self) -> list[Delta]:
        handle = self._launched.popleft()
        try:
            sampled = self.runner.collect(handle)
        except Exception as error:  # a device reports its errors here
            self._fail([handle.plan, *(later.plan for later in self._launched)], error)
            return []
        deltas = self.scheduler.commit(handle.plan, sampled)
        self._steps += 1
        self._times.end()
        return deltas

    def _fail(self, plans: list[Plan], error: Exception) -> None:
        """Nothing of a failed step is published: its requests end with an error, and its blocks are given back."""
        self.failure = error
        self._launched.clear()
        for plan in plans:
            self._ended.extend(self.scheduler.fail(plan, f"the step failed: {error}"))

    # -- looking --------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        counts, counters = self.pool.counts, self.scheduler.counters
        return Stats(
            blocks_live=counts.live,
            blocks_reclaimable=counts.reclaimable,
            blocks_free=counts.free,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            prefix_evictions=self.pool.evictions,
            steps=self._steps,
            step_ns=self._times.total_ns,
            step_host_ns=self._times.host_ns,
            step_counts=tuple(self._times.counts),
            **{name: getattr(counters, name) for name in counters.__struct_fields__},
        )

    def check(self) -> None:
        """Re-derive the books of the pool; raises AssertionError with the arithmetic."""
        self.pool.check(self.scheduler.tables)

    def clear_cache(self) -> None:
        """Forget all cached prefixes; what runs goes on undisturbed."""
        self.pool.clear()
        self.scheduler.forget_registrations()

    @cached_property
    def info(self) -> EngineInfo:
        """What this engine is; none of it changes."""
        runner = self.runner
        return EngineInfo(
            model=self.config.model,
            numerics=runner.numerics,
            device=str(runner.device),
            dtype=str(runner.dtype).removeprefix("torch."),
            deterministic=runner.deterministic,
            vocab_size=runner.model_config.vocab_size,
            max_model_len=runner.max_model_len,
            block_size=self.config.block_size,
            kv_blocks=runner.kv_blocks,
            capacity_tokens=runner.kv_blocks * self.config.block_size,
            max_sequences=self.config.max_sequences,
            eos_token_ids=sorted(self.eos_token_ids),
            device_name=device_name(runner.device),
            weight_bytes=runner.weight_bytes,
            kv_bytes=sum(layer.nbytes for layer in runner.cache),
            kernels=runner.kernels,
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _end_ids(self, request: Request) -> frozenset[int]:
        own = frozenset(request.sampling.stop_token_ids)
        return own if request.sampling.ignore_eos else own | self.eos_token_ids

    def _namespace(self, request: Request) -> Namespace:
        """Everything that must not be shared: the root of a request's prefix chain."""
        tenant = None if self.config.share_across_tenants else request.tenant
        longest, ropes = longest_length(request, self.info), self.runner.model_config.ropes
        return (
            ("model", self.runner.fingerprint),
            ("adapter", request.adapter),
            ("tenant", tenant),
            ("salt", request.cache_salt),
            *(("rope", rope.regime(longest)) for rope in ropes if rope.depends_on_length),
        )
