"""Which implementation computes: the C++ kernels where they serve, plain torch everywhere else."""

from collections.abc import Callable

import torch

from kernels.backend import Backend, TorchBackend

CPU_DTYPES = (torch.bfloat16, torch.float32)  # that there are C++ kernels for
BITS = {"none": None, "int8": 8, "int4": 4}


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
    """The backend for `kernels`: "torch", "cpu" (or KernelsMissingError), or "auto", the fastest that there is.

    `quantize`: keep weights in 8 or 4 bits ("int8", "int4"), which only the C++ kernels can. Deterministic: a row's
    result never depends on the other rows. `threads` of the C++ kernels; None: the physical cores of this process.
    `on_compile` is told before a compiler starts.
    """
    kernels = "cpu" if quantize != "none" and kernels == "auto" else kernels
    if kernels == "torch":
        if quantize != "none":
            raise KernelsMissingError(f"quantize: {quantize!r} needs the C++ kernels, but kernels is 'torch'")
        return TorchBackend(deterministic=deterministic)
    if device is not None and device.type != "cpu":
        return _plain(kernels, deterministic, f"they are for a CPU, not for {device}", expected=True)
    if dtype not in CPU_DTYPES:
        return _plain(kernels, deterministic, f"there are none for {str(dtype).removeprefix('torch.')}")
    from kernels.cpu.backend import CpuBackend
    from kernels.cpu.library import Missing, load
    from kernels.cpu.threads import physical_cores

    library = load(on_compile)
    if isinstance(library, Missing):
        return _plain(kernels, deterministic, library.reason)
    threads = threads or physical_cores()
    return CpuBackend(library, deterministic=deterministic, threads=threads, dtype=dtype, bits=BITS[quantize])


def _plain(kernels: str, deterministic: bool, reason: str, *, expected: bool = False) -> TorchBackend:
    """Plain torch in place of the C++ kernels; its name says why, unless nobody would expect them."""
    if kernels == "cpu":
        raise KernelsMissingError(f"kernels: the C++ kernels were asked for, but {reason}")
    return TorchBackend(deterministic=deterministic, name="torch" if expected else f"torch (no C++ kernels: {reason})")
