"""The tensors of a GGUF file: where they lie is checked first; then they are dequantised in small pieces."""

import math
import mmap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.errors import ModelError
from engine.gguf_head import TensorInfo

# Numbers in a piece: it and what its dequantisation needs beside it stay in a processor's cache (three times as fast as
# whole tensors), and it is below the 32,768 from which on torch wakes its threads for a copy.
PIECE = 32_000


class GgufTensors:
    """The tensors of one file by their GGUF names, memory-mapped. Raises ModelError naming file and tensor."""

    def __init__(self, path: Path, infos: list[TensorInfo], alignment: int) -> None:
        self.path = path
        self._infos = {info.name: info for info in infos}
        self._kinds = {info.name: self._kind(info) for info in infos}
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = np.frombuffer(self._map, np.uint8)
        self._check_places(infos, alignment)

    def shape(self, name: str) -> list[int]:
        """Rows first."""
        return self._infos[name].shape[::-1]

    def copy(self, name: str, target: Tensor, rows: Tensor | None = None) -> None:
        """Write a tensor into `target`, in the dtype of `target`. `rows[i]`: where row i of the file belongs."""
        first = 0
        for values in self._pieces(name):
            part = torch.from_numpy(values).reshape(-1, *target.shape[1:]).to(target.dtype)
            last = first + len(part)
            target[slice(first, last) if rows is None else rows[first:last]] = part.to(target.device)
            first = last
        self._forget(name)

    def _pieces(self, name: str) -> Iterator[np.ndarray]:
        """Whole rows in float32, in the file's order."""
        info, kind = self._infos[name], self._kinds[name]
        raw = self._data[info.offset : info.offset + _bytes(info, kind)]
        row = len(raw) // math.prod(info.shape[1:])
        step = row * max(1, PIECE // info.shape[0])
        return (_floats(raw[at : at + step], kind) for at in range(0, len(raw), step))

    def _forget(self, name: str) -> None:
        """Give the file's pages back: they were copied, and would count as memory of this process."""
        info = self._infos[name]
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + _bytes(info, self._kinds[name]) - start)

    def _kind(self, info: TensorInfo) -> GGMLQuantizationType:
        try:
            kind = GGMLQuantizationType(info.kind)
            block, size = GGML_QUANT_SIZES[kind]
            dequantize(np.zeros((1, size), np.uint8), kind)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: tensor {info.name} cannot be dequantised: {error}") from None
        if not info.shape or min(info.shape) < 1 or info.shape[0] % block:
            message = f"has shape {info.shape[::-1]}, which {kind.name} with its blocks of {block} does not allow"
            raise ModelError(f"{self.path}: tensor {info.name} {message}")
        return kind

    def _check_places(self, infos: list[TensorInfo], alignment: int) -> None:
        """Each tensor inside the file, aligned, none over another, and nothing behind the last but padding."""
        ends = {info.name: info.offset + _bytes(info, self._kinds[info.name]) for info in infos}
        for info in infos:
            if info.offset % alignment or ends[info.name] > len(self._data):
                place = f"lies at byte {info.offset} to {ends[info.name]}"
                size = f"the file has {len(self._data)} bytes, aligned to {alignment}"
                raise ModelError(f"{self.path}: tensor {info.name} {place}, {size}")
        for before, after in pairwise(sorted(infos, key=lambda info: info.offset)):
            if ends[before.name] > after.offset:
                raise ModelError(f"{self.path}: tensors {before.name} and {after.name} lie over each other")
        if infos and len(self._data) >= max(ends.values()) + alignment:
            raise ModelError(f"{self.path}: {len(self._data) - max(ends.values())} bytes follow the last tensor")


def _bytes(info: TensorInfo, kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return math.prod(info.shape) // block * size


def _floats(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks do not depend on one another, so a piece is one row: short ones the package would take by the dozen."""
    values = dequantize(raw.reshape(1, -1), kind)
    return values if values.flags.writeable else values.copy()  # torch takes no read-only memory
