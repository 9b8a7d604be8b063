"""What a worker can be told, once: settings, their flags, their environment names and where each value came from.

A flag wins over the environment, the environment over the default. An empty environment variable counts as unset,
because `GLLM_X=${X:-}` is how compose files pass on what nobody set.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from engine.config import Device, Dtype, EngineConfig, Kernels, Quantize
from engine.request import MAX_SEED
from gllm.keys import Keys

DEFAULT_REDIS = "redis://localhost:6379/0"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Settings(Struct, frozen=True, kw_only=True):
    """Settings of one worker. `lease` and `grace` are seconds, `kv_memory` is bytes; `kv_blocks` wins over it.

    `gpu_memory` is a share (at most 1), or bytes.
    """

    model: str = "smollm2"
    redis: str = DEFAULT_REDIS
    queue: str = "default"
    device: Device = "auto"
    dtype: Dtype = "auto"
    prefix_cache: bool = True
    share_across_tenants: bool = False
    deterministic: Literal["auto"] | bool = "auto"
    block_size: int = 16
    kv_blocks: int | None = None
    kv_memory: int | None = None
    gpu_memory: float | None = None
    max_sequences: int = 64
    max_step_tokens: int | None = None
    max_model_len: int | None = None
    model_defaults: bool = False
    threads: int | None = None
    kernels: Kernels = "auto"
    graphs: Literal["auto"] | bool = "auto"
    quantize: Quantize = "none"
    seed: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9400
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    lease: float = 15.0
    grace: float = 30.0

    def engine_config(self, model_path: Path | str, eos_token_ids: tuple[int, ...] = ()) -> EngineConfig:
        """The engine's share of the settings, with the model found on disk and the tokenizer's end ids."""
        shared = [name for name in EngineConfig.__struct_fields__ if name in Settings.__struct_fields__]
        values = {name: getattr(self, name) for name in shared if name != "model"}
        return EngineConfig(**values, model=str(model_path), eos_token_ids=tuple(eos_token_ids))


class SettingsError(ValueError):
    """A setting that cannot be; the message names the flag or variable, what was expected, and the value."""


class Option(Struct, frozen=True, kw_only=True):
    """One setting as people give it. `read` takes text and raises ValueError saying what it expected.

    `switch`: given as --x / --no-x. `bare`: the text that the flag means when no value follows it.
    """

    name: str
    read: Callable[[str], object]
    help: str
    switch: bool = False
    bare: str | None = None
    also: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        return (f"GLLM_{self.name.upper()}", *self.also)


class Resolved(Struct, frozen=True, kw_only=True):
    """The settings, and for each of their names where its value came from."""

    settings: Settings
    sources: dict[str, str]

    def lines(self) -> list[str]:
        """`name = value  # source`, one line a setting; the password in a Redis URL is hidden."""
        values = {name: getattr(self.settings, name) for name in self.sources}
        values["redis"] = _redacted(values["redis"])
        shown = {name: f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()}
        width = max(map(len, shown.values()))
        return [f"{line:<{width}}  # {self.sources[name]}" for name, line in shown.items()]


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def read(text: str) -> int:
        value = int(text) if re.fullmatch(r"-?[0-9]{1,20}", text.strip()) else None
        if value is None or value < low or (high is not None and value > high):
            raise ValueError(wanted)
        return value

    return read


def seconds(low: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            raise ValueError(f"seconds, at least {low:g},")
        return value

    return read


def choice(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text

    return read


def boolean(text: str) -> bool:
    if text.lower() not in YES + NO:
        raise ValueError("true or false")
    return text.lower() in YES


def automatic(text: str) -> Literal["auto"] | bool:
    if text.lower() == "auto":
        return "auto"
    if text.lower() not in YES + NO:
        raise ValueError("auto, true or false")
    return boolean(text)


def size(text: str) -> int:
    """Bytes from `2GiB`, `512 MB`, `1.5g` or a plain number."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in UNITS or (value := int(float(match[1]) * UNITS[match[2]])) < 1:
        raise ValueError("a size in bytes, like 2GiB or 512MB,")
    return value


def share(text: str) -> float:
    """At most 1: that share of something; else bytes as in `size`."""
    wanted = "a share above 0 and at most 1, or a size like 40GiB,"
    if re.fullmatch(r"[0-9]*\.[0-9]+|1", text.strip()):
        if not 0 < float(text) <= 1:
            raise ValueError(wanted)
        return float(text)
    try:
        return size(text)
    except ValueError:
        raise ValueError(wanted) from None


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("a name")
    return value


def redis_url(value: str) -> str:
    from gllm.connection import connect_sync  # redis-py is slow to load, and `gllm --help` has no use for it

    connect_sync(value).close()
    return value


def _redacted(url: str) -> str:
    from gllm.connection import redact

    return redact(url)


def queue_name(value: str) -> str:
    return Keys(value).queue


OPTIONS: tuple[Option, ...] = (
    Option(name="model", read=text, help="smollm2, a GGUF file, a Hugging Face directory or a hub id."),
    Option(
        name="redis",
        read=redis_url,
        help="Redis URL: redis://, rediss:// (TLS), unix://, sentinel:// or redis+cluster://.",
        also=("GLLM_REDIS_URL",),
    ),
    Option(name="queue", read=queue_name, help="Name of the queue; one queue serves one model."),
    Option(name="device", read=choice("auto", "cpu", "cuda"), help="Where the engine runs: auto, cpu or cuda."),
    Option(
        name="dtype",
        read=choice("auto", "float32", "bfloat16", "float16"),
        help="Number format of weights and KV: auto, float32, bfloat16 or float16.",
    ),
    Option(name="prefix_cache", read=boolean, switch=True, help="Reuse the KV of prefixes that jobs share."),
    Option(name="share_across_tenants", read=boolean, switch=True, help="Let tenants hit each other's prefixes."),
    Option(
        name="deterministic",
        read=automatic,
        bare="true",
        help="Rows independent of their batch: auto (where it is free), true or false; alone it means true.",
    ),
    Option(name="block_size", read=integer(1, 4096), help="Tokens per KV block."),
    Option(name="kv_blocks", read=integer(1), help="Usable KV blocks; wins over --kv-memory."),
    Option(name="kv_memory", read=size, help="Memory for the KV pool, like 2GiB; default: what is free."),
    Option(
        name="gpu_memory",
        read=share,
        help="Most of a GPU's memory to take in all: a share, or a size like 40GiB; default: 0.9.",
    ),
    Option(name="max_sequences", read=integer(1), help="Sequences that run at the same time."),
    Option(
        name="max_step_tokens",
        read=integer(1),
        help="Most tokens that one step computes; default: 512 on a CPU, 2048 on a GPU.",
    ),
    Option(name="max_model_len", read=integer(1), help="Lowers the model's own limit of tokens per job."),
    Option(
        name="model_defaults",
        read=boolean,
        switch=True,
        help="Jobs that give no temperature, top_p … get those of the model's generation_config.json.",
    ),
    Option(name="threads", read=integer(1), help="CPU threads of the engine; default: the CPUs it may use."),
    Option(
        name="kernels",
        read=choice("auto", "torch", "cpu", "triton"),
        help="Who computes: cpu (C++ kernels), triton (on CUDA), torch, or auto: C++ or Triton where it can be had.",
    ),
    Option(name="graphs", read=automatic, bare="true", help="CUDA graphs of whole steps: auto, true or false."),
    Option(
        name="quantize",
        read=choice("none", "int8", "int4"),
        help="Keep weights in 8 or 4 bits: less memory, faster, not the same replies; C++ kernels only.",
    ),
    Option(name="seed", read=integer(0, MAX_SEED), help="Enters the seed of jobs that give none."),
    Option(name="metrics_host", read=text, help="Address of /metrics, /livez and /readyz."),
    Option(name="metrics_port", read=integer(0, 65535), help="Port of /metrics, /livez and /readyz; 0: any free one."),
    Option(name="log_format", read=choice("json", "console"), help="json or console, on stderr."),
    Option(name="log_level", read=choice("debug", "info", "warning", "error"), help="debug, info, warning or error."),
    Option(name="lease", read=seconds(0.05), help="Seconds after which a silent worker's jobs go to others."),
    Option(name="grace", read=seconds(0.0), help="Seconds that jobs get to finish after SIGTERM."),
)


def resolve(
    flags: Mapping[str, str | bool | None], environ: Mapping[str, str], options: Sequence[Option] = OPTIONS
) -> Resolved:
    """The settings that follow from flags (by setting name; None: not given) and environment. Raises SettingsError.

    Only what `options` names is looked at: a producer's command is not disturbed by a worker's variables.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in options:
        given, source = _given(option, flags, environ)
        sources[option.name] = source
        if given is not None:
            values[option.name] = given if isinstance(given, bool) else _read(option, given, source)
    return Resolved(settings=Settings(**values), sources=sources)


def _given(
    option: Option, flags: Mapping[str, str | bool | None], environ: Mapping[str, str]
) -> tuple[str | bool | None, str]:
    if (value := flags.get(option.name)) is not None:
        no = "--no-" + option.flag[2:]
        return value, f"flag {no if value is False else option.flag}"
    for variable in option.variables:
        if environ.get(variable):
            return environ[variable], f"environment {variable}"
    return None, "default"


def _read(option: Option, given: str, source: str) -> object:
    try:
        return option.read(given)
    except ValueError as error:
        where, wanted = source.rpartition(" ")[2], str(error).removeprefix(f"{option.name}: ")
        got = "" if ", got " in wanted else f" expected, got {given!r}"
        raise SettingsError(f"{where}: {wanted}{got}") from None
