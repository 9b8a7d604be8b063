"""The compiled kernels as Python functions. ctypes releases Python's lock while one runs.

Pointers are `Tensor.data_ptr()`; nothing here checks them: kernels/cpu/backend.py does.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kernels.cpu import cache
from kernels.cpu.build import BuildError, compile_level, file_name, source_digest
from kernels.cpu.levels import Level, usable

P, I64, I32, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
# Every function of the sources' C interface: its arguments, as the .cpp file declares them.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "gllm_set_threads": (I32,),
    "gllm_advise_huge": (P, I64),
    "gllm_read": (P, I64, P),
    "gllm_pack": (I32, P, I64, I64, P),
    "gllm_unpack_rows": (I32, P, I64, P, I64, P),
    "gllm_quantize": (I32, P, I64, I64, P),
    "gllm_quantized_rows": (I32, I32, P, I64, P, I64, P),
    "gllm_linear": (I32, P, I64, I64, P, I64, I64, P, P, P, I64),
    "gllm_rms_norm": (I32, P, I64, I64, I64, I64, P, F32, P),
    "gllm_rope": (I32, P, I64, I64, I64, I64, P, P, P),
    "gllm_gate": (I32, I32, P, I64, I64, P),
    "gllm_store_kv": (I32, P, P, I64, P, P, P),
    "gllm_attention": (I32, P),
    "gllm_layers": (P, P, I64),
}
_lock = threading.Lock()
_loaded: "dict[str, Library | Missing]" = {}


class Library:
    """One loaded level. `functions` are the sources' `gllm_...`, by name without that prefix."""

    def __init__(self, level: Level, path: Path) -> None:
        handle = ctypes.CDLL(str(path))
        handle.gllm_build.restype = ctypes.c_char_p
        build, expected = handle.gllm_build().decode(), f"{level.name}-{source_digest()}"
        if build != expected:
            raise OSError(f"{path}: build {expected} expected, it is {build}")
        self.level, self.path, self.numerics = level, path, build
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


def load(on_compile: Callable[[str], None] = lambda what: None, level: str | None = None) -> Library | Missing:
    """The best level that this processor runs, compiled now if no file holds it; once per process.

    `on_compile` is told before a compiler starts. `level` asks for one by name: for tests.
    """
    chosen = [found for found in usable() if level in (None, found.name)]
    if not chosen:
        return Missing(f"this processor cannot run the level {level}")
    with _lock:
        key = chosen[0].name
        if key not in _loaded:
            _loaded[key] = _find(chosen, on_compile)
        return _loaded[key]


def _find(levels: list[Level], on_compile: Callable[[str], None]) -> Library | Missing:
    """The best level of all unless only a lower one was built ahead and there is no compiler."""
    try:
        return _open(levels[0]) or _compile(levels[0], on_compile)
    except (BuildError, OSError) as error:
        for level in levels[1:]:
            if (library := _open(level)) is not None:
                return library
        return Missing(str(error))


def _open(level: Level) -> Library | None:
    """The level from a file. One that cannot be loaded, say because it was cut short, is removed."""
    for folder in cache.folders():
        path = folder / file_name(level)
        if not path.exists():
            continue
        try:
            return Library(level, path)
        except (OSError, AttributeError):
            with suppress(OSError):
                path.unlink()
    return None


def _compile(level: Level, on_compile: Callable[[str], None]) -> Library:
    on_compile(f"the CPU kernels for {level.name}")
    folder = [*cache.folders()][-1]
    try:
        library = Library(level, compile_level(level, folder if folder != cache.BUILT else cache.scratch()))
    except AttributeError as error:
        raise OSError(str(error)) from None
    cache.remove_old(library.path.parent)
    return library
