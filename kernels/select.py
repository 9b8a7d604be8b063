"""Which implementation computes: C++ kernels on a CPU and Triton's on CUDA where they serve, plain torch elsewhere."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.backend import Backend, TorchBackend

CPU_DTYPES = (torch.bfloat16, torch.float32)  # that there are C++ kernels for
BITS = {"none": None, "int8": 8, "int4": 4}
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_GPU = (8, 0)  # compute capability: the first with bfloat16 matrix units and copies to shared memory


class KernelsMissingError(ValueError):
    """Kernels were asked for that cannot be had here; the message says why."""


def select(
    *,
    deterministic: bool,
    kernels: str = "torch",
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    quantize: str = "none",
    on_compile: Callable[[str], None] = lambda what: None,
) -> Backend:
    """The backend for `kernels`: "torch", "cpu" or "triton" (or KernelsMissingError), or "auto", the fastest there is.

    `quantize`: keep weights in 8 or 4 bits ("int8", "int4"), which only the C++ kernels can. Deterministic: a row's
    result never depends on the other rows. `threads` of the C++ kernels; None: the physical cores of this process.
    `on_compile` is told before a compiler starts.
    """
    kernels = "cpu" if quantize != "none" and kernels == "auto" else kernels
    if quantize != "none" and kernels != "cpu":
        raise KernelsMissingError(f"quantize: {quantize!r} needs the C++ kernels, but kernels is {kernels!r}")
    if kernels == "torch":
        return TorchBackend(deterministic=deterministic)
    if kernels == "triton" or (kernels == "auto" and device is not None and device.type == "cuda"):
        return _select_triton(kernels, deterministic, device, dtype, on_compile)
    if device is not None and device.type != "cpu":
        return _plain(kernels, deterministic, f"they are for a CPU, not for {device}", expected=True)
    if dtype not in CPU_DTYPES:
        return _plain(kernels, deterministic, f"there are none for {str(dtype).removeprefix('torch.')}")
    from kernels.cpu.backend import CpuBackend
    from kernels.cpu.library import Missing, load
    from kernels.cpu.threads import physical_cores

    library = load(on_compile, dtype=str(dtype).removeprefix("torch."))
    if isinstance(library, Missing):
        return _plain(kernels, deterministic, library.reason)
    threads = threads or physical_cores()
    return CpuBackend(library, deterministic=deterministic, threads=threads, dtype=dtype, bits=BITS[quantize])


def _select_triton(
    kernels: str,
    deterministic: bool,
    device: torch.device | None,
    dtype: torch.dtype,
    on_compile: Callable[[str], None],
) -> Backend:
    plain = partial(_plain, kernels, deterministic, kind="Triton")
    if device is None or device.type != "cuda":
        return plain(f"they are for CUDA, not for {device or 'a CPU'}")
    if dtype not in TRITON_DTYPES:
        return plain(f"there are none for {str(dtype).removeprefix('torch.')}")
    if capability(device) < OLDEST_GPU:
        return plain("they need compute capability 8.0, not {}.{}".format(*capability(device)))
    try:
        from kernels.triton.backend import TritonBackend
    except ImportError as error:
        return plain(str(error))
    return TritonBackend(deterministic=deterministic, on_compile=on_compile)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def _plain(
    kernels: str, deterministic: bool, reason: str, *, kind: str = "C++", expected: bool = False
) -> TorchBackend:
    """Plain torch in place of compiled kernels; its name says why, unless nobody would expect them."""
    if kernels != "auto":
        raise KernelsMissingError(f"kernels: {kernels!r} was asked for, but {reason}")
    name = "torch" if expected else f"torch (no {kind} kernels: {reason})"
    return TorchBackend(deterministic=deterministic, name=name)
