"""How an engine is set up. No torch here: the worker reads and prints these without loading it."""

from typing import Literal

from msgspec import Struct

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Kernels = Literal["auto", "torch", "cpu", "triton"]
Quantize = Literal["none", "int8", "int4"]


IN_FLIGHT = 2  # steps launched and not collected, where they overlap
STEP_TOKENS = {"cpu": 512, "cuda": 2048}  # how long running streams wait while a step takes in a new prompt


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of one engine.

    `kv_blocks` counts usable blocks (the padding block is extra); None sizes the pool from `kv_memory` bytes, or, when
    that is None too, from the memory that is really free; on CUDA `gpu_memory` is how much of it the engine may take in
    all: a share of the GPU's memory (at most 1) or bytes; None: 0.9. `eos_token_ids` are added to those of the model's
    files.
    `deterministic="auto"` is on where it is free (CPU). `seed` enters the default seed of requests that give none.
    """

    model: str
    device: Device = "auto"
    dtype: Dtype = "auto"
    block_size: int = 16
    kv_blocks: int | None = None
    kv_memory: int | None = None
    gpu_memory: float | None = None
    max_sequences: int = 64
    max_step_tokens: int | None = 2048  # None: STEP_TOKENS of the device
    max_model_len: int | None = None
    prefix_cache: bool = False
    share_across_tenants: bool = False
    deterministic: Literal["auto"] | bool = "auto"
    overlap: Literal["auto"] | bool = "auto"  # plan the next step while the device runs this one; auto: on CUDA
    graphs: Literal["auto"] | bool = "auto"  # keep steps' state on the device and capture them; auto: on CUDA
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    threads: int | None = None  # None: the CPUs this process may use
    quantize: Quantize = "none"  # keep weights in 8 or 4 bits, on a CPU with the C++ kernels
    kernels: Kernels = "auto"  # "cpu": C++; "triton": on CUDA; asked for by name they must serve
