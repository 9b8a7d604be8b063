"""Between two steps nothing may ask the device for a number: `launch` runs here on tensors that have none.

A meta tensor has a shape and no numbers, so that whatever needs one raises (`.item()`, `nonzero`, a boolean index, a
repeat whose total is not told); and code that looks at the device takes the way that it takes on CUDA.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Engine, Request, SamplingParams
from engine.graphs import Form, Tail
from engine.handle import Handle
from engine.masks import pack
from engine.plan import Plan, Sampled
from engine.runner import Runner
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.weights import Loader
from engine.work import StepWork
from kernels import AttentionBatch, ResidentBatch, TorchBackend, transfer

META = torch.device("meta")
RICH = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.1,
    "logit_bias": {5: 1.0, 6: -1.0}, "min_tokens": 3, "stop_token_ids": [7], "logprobs": 3, "prompt_logprobs": 2,
}  # fmt: skip


class Bodiless(TorchBackend):
    """Plain torch without attention's products; a batch of the host's is laid out for it."""

    def attention(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch | ResidentBatch, scale: float, window: int | None = None,
        *_: Any,
    ) -> Tensor:  # fmt: skip
        if isinstance(batch, AttentionBatch):
            batch.parts(window)
        return torch.empty_like(q)


MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer, Tensor.new_tensor)


class Watch(TorchDispatchMode):
    """Counts what goes to the device, and refuses what goes there any way but by `kernels.transfer`."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {part.device.type for part in _tensors((args, kwargs))}
        made = {part.device.type for part in _tensors(out)}
        if "cpu" in given and META.type in made | given and not _is_number(args):
            assert self.inside, f"{func} copies to the device outside of kernels.transfer"
            self.uploads += 1
        return out


class Makers(TorchFunctionMode):
    """Refuses tensors that are made of the host's numbers straight on the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert func not in MAKERS or out.device != META, f"{func} copies to the device, and waits for it"
        return out


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _tensors(part)
    elif isinstance(found, dict):
        yield from _tensors(tuple(found.values()))


def _is_number(args: Any) -> bool:
    """A number of the host's beside tensors of the device is an argument of the kernel: no copy."""
    return all(part.device.type == META.type or part.dim() == 0 for part in _tensors(args))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, to_device = Watch(), transfer.to_device

    def watched(host: Tensor, device: torch.device) -> Tensor:
        watch.inside = True
        try:
            return to_device(host, device)
        finally:
            watch.inside = False

    monkeypatch.setattr(transfer, "to_device", watched)
    for name in ("engine.batch", "engine.rope", "engine.sampling.adjust"):
        monkeypatch.setattr(f"{name}.to_device", watched)

    def sent(source: Tensor, target: Tensor) -> None:
        if target.device == META:
            watched(source, META)

    monkeypatch.setattr("engine.resident.send", sent)
    return watch


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, watch: Watch, make_engine: Any) -> Any:
    """steps(requests, **settings): run them on the meta device; the uploads of each step."""
    monkeypatch.setattr("engine.runner.choose_device", lambda name: META)
    monkeypatch.setattr("engine.runner.select", lambda **_: Bodiless(deterministic=False))
    monkeypatch.setattr(Loader, "_refuse_infinite", lambda *_: None)

    def collect(self: Runner, handle: Handle) -> Sampled:
        entries = handle.plan.entries
        tokens = [9 if entry.samples else None for entry in entries]
        return Sampled(tokens, [False] * len(entries), [None] * len(entries), [None] * len(entries))

    monkeypatch.setattr(Runner, "collect", collect)

    def run(requests: list[Request], **settings: Any) -> list[int]:
        engine: Engine = make_engine(device="cuda", max_step_tokens=32, overlap=True, kv_blocks=64, **settings)
        launch, uploads = engine.runner.launch, list[int]()

        def watched(plan: Plan) -> Handle:
            before = watch.uploads
            with watch, Makers():
                handle = launch(plan)
            uploads.append(watch.uploads - before)
            return handle

        engine.runner.launch = watched
        for asked in requests:
            engine.add(asked)
        while engine.busy:
            engine.step()
        assert engine.failure is None, engine.failure
        return uploads

    return run


def asked(name: str, length: int, **sampling: Any) -> Request:
    return Request(
        id=name, tokens=[3 + n % 90 for n in range(length)],
        sampling=SamplingParams(**{"max_tokens": 6, "ignore_eos": True} | sampling),
    )  # fmt: skip


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> list[Form]:
    """The forms of all works that were done; in none of them anything came from the host: it would be captured."""
    forms, work = list[Form](), StepWork.__call__

    def watched(self: StepWork) -> None:
        before = watch.uploads
        work(self)
        assert watch.uploads == before, "a number of the host's goes into a graph"
        forms.append(self.form)

    monkeypatch.setattr(StepWork, "__call__", watched)
    return forms


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_resident_step_asks_the_device_nothing(steps, captured, kind):
    """As below, by works that can be captured; those who need the sampler come in the middle."""
    requests = [asked("greedy", 70, temperature=0.0, max_tokens=30), asked("rich", 50, **RICH),
                asked("drawn", 50, top_k=9, top_p=0.9, min_p=0.1, max_tokens=20)]  # fmt: skip
    uploads = steps(requests, kind=kind, prefix_cache=True, graphs=True)
    assert len(uploads) == len(captured)
    assert {(form.decodes, form.tail) for form in captured} >= {
        (False, Tail.GREEDY), (False, Tail.LOGITS), (True, Tail.GREEDY), (True, Tail.RANDOM), (True, Tail.LOGITS),
    }  # fmt: skip


def test_a_resident_step_sends_one_buffer_and_where_nothing_is_new_none(steps, captured):
    """Blocks are of four tokens, so that each fourth position is the first of a new one."""
    uploads = steps([asked("a", 8, max_tokens=17), asked("b", 8, temperature=0.7, max_tokens=17)], graphs=True)
    # The first step's places are told in the second one; a count of none is sent after each one with differences.
    assert uploads == [1, *[1, 1, 0, 0] * 4]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_step_asks_the_device_nothing(steps, kind):
    """Chunks, decodes, every way to sample, a prefix that is there already; greedy steps copy once for the batch."""
    requests = [asked("greedy", 70, temperature=0.0), asked("rich", 50, **RICH), asked("plain", 50)]
    uploads = steps(requests, kind=kind, prefix_cache=True)
    assert len(uploads) > 6


def test_a_decode_step_of_greedy_rows_sends_few_buffers(steps):
    uploads = steps([asked(name, 8, temperature=0.0, max_tokens=16) for name in "abc"])
    assert set(uploads[2:]) == {3, 4}  # the batch, two of plain attention's, and new blocks where there are any


def test_masks_ask_the_device_nothing(steps, monkeypatch):
    """The source's own mask is on the host; it is sent as all else is."""
    mask = pack(range(50), 160)
    source = SimpleNamespace(mask=lambda: mask, advance=lambda token: None)
    open_row = Sampler.open

    def masked(self: Sampler, sequence: Sequence) -> None:
        sequence.mask_source = source
        open_row(self, sequence)

    monkeypatch.setattr(Sampler, "open", masked)
    assert len(steps([asked("x", 9), asked("y", 12, temperature=0.0)])) > 5


def test_sequences_that_wait_for_memory_ask_the_device_nothing(steps):
    uploads = steps([asked(name, 40, max_tokens=30) for name in "abcdef"])
    assert len(uploads) > 30


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x + torch.ones(3),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: torch.ones(3).to(x.device),
        lambda x: x.repeat_interleave(x.to(torch.int64)),
    ],
)
def test_what_waits_is_seen(watch, work):
    """The watch itself: each of these would wait for a GPU."""
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), watch, Makers():
        work(torch.empty(3, device=META))
