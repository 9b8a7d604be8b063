"""The tensors of a Hugging Face directory: one or many safetensors files, memory-mapped, each read once."""

import ctypes
import mmap
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint import INDEX, shards_of
from engine.errors import ModelError

REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry; it follows from the configuration
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SafetensorsSource:
    """One or many safetensors files of a directory. The index decides; files that it does not name are not read."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        shards = shards_of(directory)
        indexed = any(expected for _, expected in shards)
        for path, expected in shards:
            handle = stack.enter_context(_open_shard(path))
            held = {name for name in handle.keys() if not name.endswith(REDUNDANT_SUFFIX)}  # noqa: SIM118
            if indexed:
                _compare(path, expected, held)
            self._files[path] = handle
            self._file_of.update(dict.fromkeys(held, path))
        self.place = str(directory / INDEX if indexed else shards[0][0])

    def names(self) -> set[str]:
        return set(self._file_of)

    def where(self, name: str) -> str:
        return str(self._file_of[name])

    def shape(self, name: str) -> list[int]:
        return list(self._view(name).shape)

    def read(self, name: str) -> Tensor:
        """The tensor as it lies in the file: a view of its pages, to be copied. Raises ModelError."""
        found = self._view(name)
        if found.dtype not in FLOATS:
            expected = ", ".join(map(str, FLOATS))
            raise ModelError(f"{self.where(name)}: tensor {name} has dtype {found.dtype}, not one of {expected}")
        return found

    def copy(self, name: str, target: Tensor) -> None:
        """Write the tensor into `target`, which has its shape, in the dtype of `target`."""
        pages = self.read(name)
        target.copy_(pages)
        forget(pages)

    def _view(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            return self._files[path].get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: torch cannot make it
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from None


def _compare(path: Path, expected: set[str], held: set[str]) -> None:
    """What the index places in a shard and what is in it are the same, or nobody knows which of two is meant."""
    if missing := sorted(name for name in expected - held if not name.endswith(REDUNDANT_SUFFIX)):
        raise ModelError(f"{path}: tensor {missing[0]} is missing, which the index places here")
    if surplus := sorted(held - expected):
        raise ModelError(f"{path}: tensor {surplus[0]} is in it, but the index does not place it here")


def _open_shard(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file, although the index names it") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: not a complete safetensors file: {error}") from None


def forget(pages: Tensor) -> None:
    """Take pages that a file backs out of this process: they were copied, and would count as its memory until it ends.

    Only whole pages inside the tensor, and only where the system has `madvise`; a later look reads the file again.
    """
    start = -(-pages.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (pages.data_ptr() + pages.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if advise is not None and end > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


@cache
def _madvise() -> Any:
    """On Linux only: elsewhere the advice has another number, or another meaning."""
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None
