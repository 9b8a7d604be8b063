"""The device: parameters, KV memory, the rows of running sequences, and the one place where a step is computed."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from platform import machine

import torch
from torch import Tensor

from engine.config import STEP_TOKENS, EngineConfig
from engine.errors import DeviceError
from engine.gpumemory import GRAPHS, Meter, Room, refusing
from engine.handle import Handle
from engine.hosted import HostedStepper
from engine.memory import available_bytes, block_bytes, kv_blocks
from engine.model import Decoder
from engine.modelconfig import ModelConfig
from engine.plan import Plan, Sampled
from engine.rehearsal import largest_step
from engine.resident import ResidentStepper
from engine.sampler import Sampler
from engine.stepper import Parts, Stepper
from engine.weights import Loader, open_checkpoint
from kernels import Backend, Heads, Resident, select

KERNEL_VERSION = 4  # part of `numerics`: raise it with any change that may change a bit of a result
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """Computes plans. `launch` starts a step and `collect` waits for it, so the next can be planned between.

    Whatever here or in a backend compiles at first use, or captures a graph, says so to `on_compile` before it begins:
    what takes minutes would be taken for a step that hangs.
    """

    def __init__(self, config: EngineConfig, on_compile: Callable[[str], None] = lambda what: None) -> None:
        self.on_compile = on_compile
        self.device = choose_device(config.device)
        if self.device.type == "cpu" and config.threads:
            torch.set_num_threads(config.threads)
        self.deterministic = self.device.type == "cpu" if config.deterministic == "auto" else config.deterministic
        meter = Meter.of(self.device)
        with (
            refusing(meter, f"the model {config.model}"),
            open_checkpoint(config.model) as (self.model_config, source, self.fingerprint),
            torch.inference_mode(),
        ):
            self.dtype = DTYPES[self.model_config.dtype if config.dtype == "auto" else config.dtype]
            self.max_model_len = model_limit(self.model_config, config.max_model_len)
            self._backend = self._select(config)
            loader = Loader(source, self.dtype, self.device, rounds=config.quantize != "none")
            rows = config.max_sequences + 1
            self.model = Decoder(self.model_config, loader, self._backend, self.max_model_len, rows)
            loader.close()
        self.weight_bytes = loader.bytes + self._backend.rounded_bytes
        self.block_size, self._seed = config.block_size, config.seed
        self.max_sequences = config.max_sequences
        self.stepper = self._make_stepper(config)
        room = None if meter is None else self._rehearse(config, meter)
        self.kv_blocks = kv_blocks(config, self.model_config, self.dtype, self.max_model_len, room)
        with refusing(meter, f"a KV pool of {self.kv_blocks} blocks, and graphs"):
            self._make_pool()
            if room is not None and isinstance(self.stepper, ResidentStepper):
                self.stepper.graphs.reserve(room.workspace)

    def _select(self, config: EngineConfig) -> Backend:
        return select(
            kernels=config.kernels, deterministic=self.deterministic, device=self.device, dtype=self.dtype,
            threads=config.threads, quantize=config.quantize, on_compile=self.on_compile,
        )  # fmt: skip

    @property
    def device_ns(self) -> int:
        """Time spent computing (on a CPU), or waiting for the device."""
        return self.stepper.device_ns

    @property
    def kernels(self) -> str:
        """Who computes, and why plain torch where faster kernels are missing; whether by graphs."""
        return f"{self._backend.name}, graphs" if self.graphs else self._backend.name

    @torch.inference_mode()
    def _make_stepper(self, config: EngineConfig) -> Stepper:
        """What computes steps, with its state of each row."""
        model = self.model_config
        self._sampler = Sampler(self.max_sequences, model.vocab_size, self.device, self._backend.best)
        self._heads = Heads(model.kv_heads, model.heads // model.kv_heads)
        parts = Parts(
            device=self.device, model=self.model, sampler=self._sampler, heads=self._heads, rows=self.max_sequences,
            columns=-(-self.max_model_len // self.block_size), block_size=self.block_size,
            windowed=any(kind.window is not None for kind in model.layer_kinds),
            logits=lambda hidden: self.logits(hidden),  # noqa: PLW0108 - looked up each time: tests replace it
        )  # fmt: skip
        resident = self._find_resident(config)
        if resident is None:
            return HostedStepper(parts)
        most_tokens = config.max_step_tokens or STEP_TOKENS[self.device.type]
        return ResidentStepper(
            parts, resident, vocab_size=model.vocab_size, most_tokens=most_tokens, on_compile=self.on_compile
        )

    def _find_resident(self, config: EngineConfig) -> Resident | None:
        """What prepares steps on the device; None where the host does. Raises DeviceError where graphs cannot be."""
        wanted = self.device.type == "cuda" if config.graphs == "auto" else config.graphs
        resident = self._backend.resident(self.device, self._heads, self.model_config.head_dim) if wanted else None
        if resident is None and config.graphs is True:
            raise DeviceError(
                f"graphs: True was asked for, but not with the kernels {self._backend.name!r} on {self.device}"
            )
        return resident

    @torch.inference_mode()
    def _make_pool(self) -> None:
        """KV memory. Block `kv_blocks` is for padding, never content.

        The memory stays as it comes: nothing reads what was not written.
        """
        config = self.model_config
        shape = (2, self.kv_blocks + 1, config.kv_heads, self.block_size, config.head_dim)
        self.cache = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(config.layers)]
        self.stepper.open_pool(self.cache, self.kv_blocks)

    def _rehearse(self, config: EngineConfig, meter: Meter) -> Room:
        """Compute the largest step that may come, on a pool of nothing but the padding block, and see what is left.

        Its sequences are as long as all of the free memory would allow, since attention's own memory grows with them.
        """
        self.kv_blocks = 0
        self._make_pool()
        size = block_bytes(self.model_config, self.block_size, self.dtype)
        longest = meter.before // size * self.block_size // self.max_sequences
        tokens = config.max_step_tokens or STEP_TOKENS[self.device.type]
        plan = largest_step(self.max_sequences, tokens, max(1, min(self.max_model_len - 1, longest)))
        what = f"a step of {plan.tokens} tokens (max_step_tokens) of {len(plan.entries)} sequences (max_sequences)"
        return meter.measure(lambda: self.collect(self.launch(plan)), what, GRAPHS if self.graphs else 0)

    @property
    def _longest(self) -> int | None:
        """The position limit where it decides bits: a request without max_tokens may grow so far, and ropes ask."""
        return self.max_model_len if any(rope.depends_on_length for rope in self.model_config.ropes) else None

    @property
    def graphs(self) -> bool:
        """Whether steps are prepared on the device, so that they can be captured."""
        return isinstance(self.stepper, ResidentStepper)

    @property
    def _lottery(self) -> tuple[str, ...]:
        """Another device's tokens are drawn by kernels then, whose logarithms are not the sampler's to the last bit."""
        return ("lottery",) if self.graphs and self.device.type != "cpu" else ()

    @property
    def numerics(self) -> str:
        """A digest of everything that decides the bits of a result. Equal numerics and deterministic: equal tokens."""
        facts = (
            KERNEL_VERSION, self.fingerprint, str(self.dtype), self.device.type, processor(self.device),
            torch.__version__, torch.get_num_threads(), self.block_size, self.deterministic, self._seed,
            self._backend.numerics, self._longest, *self._lottery,
        )  # fmt: skip
        return blake2b(repr(facts).encode(), digest_size=8).hexdigest()

    @torch.inference_mode()
    def warm_up(self) -> None:
        self.stepper.warm_up()
        # A pool that was asked for beyond what is free fills as it is used: made real at once, it might end the worker.
        if 2 * sum(layer.nbytes for layer in self.cache) <= available_bytes():
            self._backend.settle(self.cache)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Handle:
        return self.stepper.launch(plan)

    def collect(self, handle: Handle) -> Sampled:
        """Wait for a launched step and bring its few numbers to the host, in the order of the plan's entries."""
        return self.stepper.collect(handle)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, hidden]; a seam for tests that look at or break them."""
        return self.model.logits(hidden)


def choose_device(name: str) -> torch.device:
    """The device for --device. Raises DeviceError when cuda is asked for and there is none: never a silent CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"device: {name!r} was asked for, but torch {torch.__version__} sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def processor(device: torch.device) -> str:
    """What of a processor decides which code the libraries run on it, and in which order it adds up.

    Its level of vector instructions is not enough: with one level but other bfloat16 units, caches or another maker the
    libraries choose other kernels.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    details = getattr(torch.cpu, "get_capabilities", dict[str, object])()  # older versions of torch do not tell
    decisive = sorted((name, value) for name, value in details.items() if not name.startswith("num_"))
    return repr((torch.backends.cpu.get_cpu_capability(), decisive))


def device_name(device: torch.device) -> str:
    """The maker's name of the processor, for people; on a CPU that does not tell, its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, machine())


def model_limit(config: ModelConfig, asked: int | None) -> int:
    """The position limit: the checkpoint's, its rope's factor counted in, or lower when asked."""
    limit = config.position_limit
    if asked is None:
        return limit
    if not 1 <= asked <= limit:
        raise DeviceError(f"max_model_len: 1 to {limit} (the model's limit) expected, got {asked}")
    return asked
