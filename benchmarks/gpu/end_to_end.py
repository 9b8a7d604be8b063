"""The engine on random weights, shaped as models that people know: steps, prefills, a workload, shared prefixes."""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Struct

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Line, not_built
from benchmarks.ours import Prompt, random_prompts
from benchmarks.random_model import SHAPES, make_engine
from engine import Engine, Request, SamplingParams
from engine.graphs import Graphs
from engine.resident import ResidentStepper
from engine.work import StepWork


class Sizes(Struct, frozen=True, kw_only=True):
    """Tokens and requests. The defaults are those of the targets."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    context: int = 1024
    steps: int = 40
    prefills: tuple[int, ...] = (512, 2048, 8192)
    requests: int = 256
    longest: int = 1024  # of a prompt and of a reply; the shortest is 100, or all
    shared: int = 2048
    sharing: int = 64
    suffix: int = 32


DRY = Sizes(batches=(1, 2), context=20, steps=4, prefills=(16,), requests=3, longest=12, shared=48, sharing=3, suffix=5)
STEP_BOUNDS_MS = {  # weights and keys of the batch read once at the bandwidth of an H200
    "llama-8b": {1: 3.52, 8: 3.74, 32: 4.49, 128: 7.49},
    "qwen3-0.6b": {1: 0.305, 32: 1.15, 128: 3.77},
}
STEP_TARGETS_MS = {
    "llama-8b": {1: 4.1, 8: 4.4, 32: 5.5, 128: 9.4},
    "qwen3-0.6b": {1: 0.9, 32: 1.7, 128: 4.7},
}
WORKLOAD_BOUNDS = {"llama-8b": (13_700.0, 0.70), "qwen3-0.6b": (36_400.0, 0.65)}  # tokens/s, and the share wanted
PREFILL_TARGET = {"llama-8b": {2048: 38_000.0}}
LEAST_SECONDS = {"llama-8b": 65.0, "qwen3-0.6b": 40.0}  # to be left for a model to begin


class Run(NamedTuple):
    """`ends` are the times of the steps' ends, `firsts` of each request's first token: seconds from the start."""

    seconds: float
    tokens: int
    ends: list[float]
    firsts: list[float]


def stage(machine: Machine) -> Iterator[Line]:
    for shape in ("tiny",) if machine.dry else ("qwen3-0.6b", "llama-8b"):
        yield from machine.attempt(shape, partial(_collect, machine, shape), 0 if machine.dry else LEAST_SECONDS[shape])


def _collect(machine: Machine, shape: str) -> Iterator[Line]:
    return Bench(machine, shape, DRY if machine.dry else Sizes()).lines()


class Bench:
    """One model's engine, and what is measured on it."""

    def __init__(self, machine: Machine, shape: str, sizes: Sizes) -> None:
        self._machine, self._shape, self._sizes = machine, shape, sizes
        machine.release()  # what the model before this one took
        began = time.monotonic()
        self.engine = self._make()
        self._started = time.monotonic() - began
        self._seed = 0

    def _make(self) -> Engine:
        most = max(*self._sizes.batches, self._sizes.requests)
        small: dict[str, Any] = {"kv_blocks": 400, "threads": 1, "kernels": "torch", "graphs": True}
        small = small if self._machine.dry else {}
        return make_engine(
            self._shape, device=self._machine.device.type, dtype=str(self._machine.dtype).removeprefix("torch."),
            max_sequences=most, max_step_tokens=None, prefix_cache=True, overlap=True, **small,
        )  # fmt: skip

    def lines(self) -> Iterator[Line]:
        info, name, attempt = self.engine.info, self._shape, self._machine.attempt
        said = f"kernels {info.kernels}; {info.kv_blocks} blocks of {info.block_size}; started in {self._started:.1f} s"
        yield Line(name=f"{name}: engine", value=info.weight_bytes / 1e9, unit="GB", said=said)
        for batch in self._sizes.batches:
            yield from attempt(f"{name}: step, batch {batch}", partial(self.step, batch), 3)
        for length in self._sizes.prefills:
            yield from attempt(f"{name}: prefill {length}", partial(self.prefill, length), 3)
        yield from attempt(f"{name}: shared prefix", self.shared_prefix, 5)
        yield from attempt(f"{name}: forms of steps", self.forms, 20)
        yield from attempt(f"{name}: workload", self.workload, 15)
        yield from attempt(f"{name}: without overlap", self.without_overlap, 10)
        yield from attempt(f"{name}: without graphs", self.without_graphs, 10)

    def prompts(self, lengths: Sequence[int]) -> list[Prompt]:
        self._seed += 1
        vocab = SHAPES[self._shape]["vocab_size"]
        return [random_prompts(1, length, vocab, self._seed * 1000 + n)[0] for n, length in enumerate(lengths)]

    def step(self, batch: int) -> list[Line]:
        name = f"{self._shape}: step, batch {batch}"
        took = statistics.median(self.decode_steps(self.engine, batch)) * 1e3
        bound = STEP_BOUNDS_MS.get(self._shape, {}).get(batch)
        wanted = STEP_TARGETS_MS.get(self._shape, {}).get(batch)
        target = self._machine.wanted(bound / wanted if bound and wanted else None)
        return [
            Line(name=name, value=took, unit="ms", bound=bound, target=target, said=f"{batch / took * 1e3:,.0f} tok/s")
        ]

    def decode_steps(self, engine: Engine, batch: int) -> list[float]:
        """Seconds between the ends of steps in which every request decodes, in the middle of its context."""
        prompts = self.prompts([self._sizes.context - self._sizes.steps // 2] * batch)
        run_to_end = run(engine, prompts, [self._sizes.steps] * batch)
        settled = [end for end in run_to_end.ends if end > max(run_to_end.firsts)][1:]
        return [later - end for end, later in pairwise(settled)]

    def prefill(self, length: int) -> list[Line]:
        name = f"{self._shape}: prefill {length}"
        rates = [length / run(self.engine, self.prompts([length]), [1]).seconds for _ in range(3)]
        shape, info = SHAPES[self._shape], self.engine.info
        vocabulary = shape["vocab_size"] * shape["hidden_size"] * (1 if shape["tie_word_embeddings"] else 2)
        bound = self._machine.flops / (2 * (info.weight_bytes / self._machine.dtype.itemsize - vocabulary))
        wanted = PREFILL_TARGET.get(self._shape, {}).get(length)
        target = self._machine.wanted(wanted / bound if wanted else None)
        return [Line(name=name, value=max(rates), unit="tok/s", bound=bound, target=target, said="products alone")]

    def workload(self) -> list[Line]:
        """Lengths as nano-vllm's benchmark draws them: prompts first, each token by token, then the replies'."""
        prompts, news = workload(self._sizes.requests, self._sizes.longest)
        vocab = SHAPES[self._shape]["vocab_size"]
        done = run(self.engine, [[token % vocab for token in prompt] for prompt in prompts], news, temperature=0.6)
        bound, target = WORKLOAD_BOUNDS.get(self._shape, (None, None))
        said = f"{sum(map(len, prompts))} tokens in, {done.tokens} out, {done.seconds:.1f} s"
        name = f"{self._shape}: workload of {len(prompts)} requests"
        return [Line(name=name, value=done.tokens / done.seconds, unit="tok/s", bound=bound, target=target, said=said)]

    def shared_prefix(self) -> list[Line]:
        sizes, lines = self._sizes, list[Line]()
        (prefix,) = self.prompts([sizes.shared])
        for state in ("cold", "warm"):
            prompts = [prefix + suffix for suffix in self.prompts([sizes.suffix] * sizes.sharing)]
            done = run(self.engine, prompts, [16] * sizes.sharing)
            first = f"first tokens after {min(done.firsts) * 1e3:.0f} to {max(done.firsts) * 1e3:.0f} ms"
            name = f"{self._shape}: {sizes.sharing} requests share {sizes.shared} tokens, {state}"
            lines.append(Line(name=name, value=done.seconds * 1e3, unit="ms", said=first))
        return lines

    def forms(self) -> list[Line]:
        """A small workload, so that the forms of steps that the real one has are captured before it is timed."""
        graphs, began = self._graphs(), time.perf_counter()
        if graphs is None:
            return [not_built(f"{self._shape}: graphs", f"none with the kernels {self.engine.info.kernels}")]
        prompts, news = workload(self._sizes.requests, max(8, self._sizes.longest // 8))
        run(self.engine, [[token % 400 for token in prompt] for prompt in prompts], news, temperature=0.6)
        took = f"a small workload, with its captures: {time.perf_counter() - began:.1f} s"
        said = f"captured so far, {len(graphs.refused)} refused; {took}"
        return [Line(name=f"{self._shape}: graphs", value=graphs.captured, unit="graphs", said=said)]

    def _graphs(self) -> Graphs[StepWork] | None:
        stepper = self.engine.runner.stepper
        return stepper.graphs if isinstance(stepper, ResidentStepper) else None

    def without_overlap(self) -> list[Line]:
        return self._steps("without overlap", depth=1)

    def without_graphs(self) -> list[Line]:
        """The same works, launched kernel by kernel."""
        graphs = self._graphs()
        if graphs is None:
            return [not_built(f"{self._shape}: step without graphs", "all steps above are launched kernel by kernel")]
        graphs.replays = False
        try:
            return [*self._steps("without graphs", depth=2), *self._steps("without graphs and overlap", depth=1)]
        finally:
            graphs.replays = True

    def _steps(self, how: str, depth: int) -> list[Line]:
        engine, lines = self.engine, list[Line]()
        before = engine._depth  # pyright: ignore[reportPrivateUsage]  (as `overlap` decides it)
        engine._depth = depth  # pyright: ignore[reportPrivateUsage]  (a new engine takes long)
        for batch in self._sizes.batches[::2]:
            took = statistics.median(self.decode_steps(engine, batch)) * 1e3
            lines.append(Line(name=f"{self._shape}: step {how}, batch {batch}", value=took, unit="ms"))
        engine._depth = before  # pyright: ignore[reportPrivateUsage]
        return lines


def workload(requests: int, longest: int) -> tuple[list[Prompt], list[int]]:
    """142,827 tokens in and 133,966 out at 256 requests of at most 1,024."""
    source, shortest = random.Random(0), min(100, longest)
    prompts = [[source.randint(0, 10000) for _ in range(source.randint(shortest, longest))] for _ in range(requests)]
    return prompts, [source.randint(shortest, longest) for _ in range(requests)]


def run(engine: Engine, prompts: list[Prompt], news: list[int], temperature: float = 0.0) -> Run:
    """All requests at once, to the end. Raises RuntimeError when one fails."""
    began, left, tokens = time.perf_counter(), dict[str, int](), 0
    ends, firsts = list[float](), dict[str, float]()
    for number, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
        sampling = SamplingParams(max_tokens=new, temperature=temperature, seed=number, ignore_eos=True)
        engine.add(Request(id=f"{number}", tokens=prompt, sampling=sampling))
        left[f"{number}"] = new
    while engine.busy:
        for delta in engine.step():
            if delta.error is not None:
                raise RuntimeError(f"request {delta.id}: {delta.error}")
            tokens += len(delta.tokens)
            if delta.tokens:
                firsts.setdefault(delta.id, time.perf_counter() - began)
        ends.append(time.perf_counter() - began)
    return Run(ends[-1], tokens, ends, list(firsts.values()))
