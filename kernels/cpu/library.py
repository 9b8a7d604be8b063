"""The compiled kernels as Python functions. ctypes releases Python's lock while one runs.

Pointers are `Tensor.data_ptr()`; nothing here checks them: kernels/cpu/backend.py does.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path

from kernels.cpu import cache
from kernels.cpu.build import BuildError, build_name, compile_level, file_name
from kernels.cpu.levels import Level, usable

P, I64, I32, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
# Every function of the sources' C interface: its arguments, as the .cpp file declares them.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "gllm_set_threads": (I32,),
    "gllm_advise_huge": (P, I64),
    "gllm_populate": (P, I64),
    "gllm_read": (P, I64, P),
    "gllm_pack": (I32, P, I64, I64, P),
    "gllm_unpack_rows": (I32, P, I64, P, I64, P),
    "gllm_quantize": (I32, P, I64, I64, P),
    "gllm_quantized_rows": (I32, I32, P, I64, P, I64, P),
    "gllm_linear": (I32, P, I64, I64, P, I64, I64, P, P, I64, I32),
    "gllm_rms_norm": (I32, P, I64, I64, I64, I64, P, F32, P),
    "gllm_rope": (I32, P, I64, I64, I64, I64, P, P, P),
    "gllm_gate": (I32, I32, P, I64, I64, P),
    "gllm_best": (P, I64, I64, I64, P, P),
    "gllm_store_kv": (I32, P, P, I64, P, P, P),
    "gllm_attention": (I32, P),
    "gllm_layers": (P, P, I64),
}
_lock = threading.Lock()
_loaded: "dict[tuple[str, str | None], Library | Missing]" = {}


class Library:
    """One loaded level. `functions` are the sources' `gllm_...`, by name without that prefix.

    `dtype`: the only one that it multiplies and attends in; None: all that there are kernels for. It changes no bit.
    """

    def __init__(self, level: Level, path: Path, dtype: str | None = None) -> None:
        handle = ctypes.CDLL(str(path))
        handle.gllm_build.restype = ctypes.c_char_p
        build, expected = handle.gllm_build().decode(), build_name(level, dtype)
        if build != expected:
            raise OSError(f"{path}: build {expected} expected, it is {build}")
        self.level, self.path, self.dtype, self.numerics = level, path, dtype, build_name(level)
        for name, arguments in SIGNATURES.items():
            function = getattr(handle, name)
            function.argtypes, function.restype = arguments, None
            setattr(self, name.removeprefix("gllm_"), function)

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(f"the kernels have no function gllm_{name}")


class Missing:
    """Why there are no kernels, in one line."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def load(
    on_compile: Callable[[str], None] = lambda what: None, level: str | None = None, dtype: str | None = None
) -> Library | Missing:
    """The best level that this processor runs, compiled now if no file holds it; once per process.

    `on_compile` is told before a compiler starts, or is waited for. `dtype`: the only one that is needed; None: all.
    `level` asks for one by name: for tests.
    """
    chosen = [found for found in usable() if level in (None, found.name)]
    if not chosen:
        return Missing(f"this processor cannot run the level {level}")
    with _lock:
        key = chosen[0].name, dtype
        if key not in _loaded:
            _loaded[key] = _find(chosen, dtype, on_compile)
        return _loaded[key]


def _find(levels: list[Level], dtype: str | None, on_compile: Callable[[str], None]) -> Library | Missing:
    """The best level of all unless only a lower one was built ahead and there is no compiler."""
    try:
        return _open(levels[0], dtype) or _compile(levels[0], dtype, on_compile)
    except (BuildError, OSError) as error:
        for level in levels[1:]:
            if (library := _open(level, dtype)) is not None:
                return library
        return Missing(str(error))


def _open(level: Level, dtype: str | None) -> Library | None:
    """The level from a file. One that cannot be loaded, say because it was cut short, is removed."""
    for folder, served in product(cache.folders(), dict.fromkeys((None, dtype))):
        path = folder / file_name(level, served)
        if not path.exists():
            continue
        try:
            return Library(level, path, served)
        except (OSError, AttributeError):
            with suppress(OSError):
                path.unlink()
    return None


def _compile(level: Level, dtype: str | None, on_compile: Callable[[str], None]) -> Library:
    on_compile(f"the CPU kernels for {level.name}")
    kept = [*cache.folders()][-1]
    with cache.scratch() if kept == cache.BUILT else nullcontext(kept) as folder:
        try:
            library = Library(level, compile_level(level, folder, dtype=dtype), dtype)
        except AttributeError as error:
            raise OSError(str(error)) from None
        cache.remove_old(folder)
        return library
