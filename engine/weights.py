"""From a checkpoint on disk to parameters on a device: strictly. Every tensor is used, none missing or mis-shaped."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint import INDEX, files_of, fingerprint, shards_of
from engine.errors import ModelError
from engine.modelconfig import ModelConfig, load_config

REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry; it follows from the configuration
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Source(Protocol):
    """A checkpoint: named tensors with their shapes, read one by one. `place` is the file that says what it holds."""

    place: str

    def names(self) -> set[str]: ...

    def read(self, name: str) -> Tensor: ...

    def where(self, name: str) -> str: ...


class SafetensorsSource:
    """One or many safetensors files of a directory. The index decides; files that it does not name are not read."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, Path] = {}
        placed: dict[str, Path] = {}
        for path, expected in shards_of(directory):
            handle = stack.enter_context(_open_shard(path))
            held = set(handle.keys())
            if missing := sorted(expected - held):
                raise ModelError(f"{path}: tensor {missing[0]} is missing, which the index places here")
            self._files[str(path)] = handle
            self._file_of.update(dict.fromkeys(held, path))
            placed.update(dict.fromkeys(expected, path))
        self._file_of.update(placed)
        self.place = str(directory / INDEX) if placed else next(iter(self._files))

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            return self._files[str(path)].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from None

    def where(self, name: str) -> str:
        return str(self._file_of[name])


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file, although the index names it") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: not a complete safetensors file: {error}") from None


class Loader:
    """Hands out tensors by name, checked for shape and counted, into memory that the caller owns."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._left = {name for name in source.names() if not name.endswith(REDUNDANT_SUFFIX)}
        self._dtype, self._device = dtype, device
        self.bytes = 0  # of all parameters so far

    def has(self, name: str) -> bool:
        return name in self._left

    def tensor(self, name: str, rows: int, *columns: int) -> Tensor:
        return self.stacked([(name, rows)], *columns)

    def stacked(self, parts: list[tuple[str, int]], *columns: int) -> Tensor:
        """The tensors named in `parts`, each [rows, *columns], one below the other; copied once, into place."""
        shape = (sum(rows for _, rows in parts), *columns)
        parameter = torch.empty(shape, dtype=self._dtype, device=self._device)
        first = 0
        for name, rows in parts:
            parameter[first : first + rows].copy_(self._take(name, [rows, *columns]))
            first += rows
        self.bytes += parameter.nbytes
        return parameter

    def drop_tied(self, name: str, twin: Tensor) -> None:
        """Take a tensor that the files hold although it is tied to `twin`; one that differs is warned of, not used."""
        if not torch.equal(self._take(name, list(twin.shape)).to(twin.dtype).to(twin.device), twin):
            where = self._source.where(name)
            warnings.warn(
                f"{where}: {name} differs from the embedding it is tied to; the embedding is used", stacklevel=2
            )

    def close(self) -> None:
        if self._left:
            name = min(self._left)
            raise ModelError(f"{self._source.where(name)}: tensor {name} has no place in this model")

    def _take(self, name: str, shape: list[int]) -> Tensor:
        if name not in self._left:
            raise ModelError(f"{self._source.place}: tensor {name} is missing")
        self._left.discard(name)
        part = self._source.read(name)
        where = f"{self._source.where(name)}: tensor {name}"
        if list(part.shape) != shape:
            raise ModelError(f"{where} has shape {list(part.shape)}, not {shape}")
        if part.dtype not in FLOATS:
            raise ModelError(f"{where} has dtype {part.dtype}, not one of {', '.join(map(str, FLOATS))}")
        return part


@contextmanager
def open_checkpoint(model: str) -> Iterator[tuple[ModelConfig, Source, str]]:
    """The configuration, the tensors and the fingerprint of a Hugging Face directory or a .gguf file."""
    path = Path(model)
    with ExitStack() as stack:
        if path.is_dir():
            config = load_config(path)
            source = SafetensorsSource(path, stack)
            yield config, source, fingerprint(files_of(path))
        elif path.is_file():
            from engine.gguf import GgufSource  # the gguf package is needed for GGUF files only

            gguf = GgufSource(path)
            yield gguf.config, gguf, fingerprint(files_of(path))
        else:
            raise ModelError(f"{path}: no such model directory or .gguf file")
