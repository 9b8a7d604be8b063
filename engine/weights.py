"""From a checkpoint on disk to parameters on a device: strictly. Every tensor is used, none missing or mis-shaped."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.modelconfig import ModelConfig, load_config, read_json

REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry; it follows from the configuration
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX = "model.safetensors.index.json"
SAMPLE_BYTES, SAMPLES = 1 << 16, 64  # what is hashed of a weight file: enough to tell checkpoints apart, not 16 GB


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
        for path, expected in _shards(directory):
            handle = stack.enter_context(_open_shard(path))
            held = set(handle.keys())
            if missing := sorted(expected - held):
                raise ModelError(f"{path}: tensor {missing[0]} is missing, which the index places here")
            self._files[str(path)] = handle
            self._file_of.update(dict.fromkeys(held, path))
            placed.update(dict.fromkeys(expected, path))
        self._file_of.update(placed)
        self.paths = [Path(name) for name in self._files]
        self.place = str(directory / INDEX if placed else self.paths[0])

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


def _shards(directory: Path) -> list[tuple[Path, set[str]]]:
    """The files of a checkpoint with the tensors that the index places in each (none if there is no index)."""
    index = directory / INDEX
    if not index.exists():
        path = directory / "model.safetensors"
        if not path.exists():
            raise ModelError(f"{path}: no such file, and no {index.name} beside it")
        return [(path, set())]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map: an object expected, got {weight_map!r}")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise ModelError(f"{index}: {name} is placed in {file!r}, which is no file name in this directory")
        shards.setdefault(file, set()).add(name)
    return [(directory / file, names) for file, names in sorted(shards.items())]


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
            yield config, source, fingerprint([path / "config.json", *source.paths])
        elif path.is_file():
            from engine.gguf import GgufSource  # the gguf package is needed for GGUF files only

            gguf = GgufSource(path)
            yield gguf.config, gguf, fingerprint([path])
        else:
            raise ModelError(f"{path}: no such model directory or .gguf file")


def fingerprint(paths: list[Path]) -> str:
    """A digest of checkpoint files: sizes, heads, tails, and samples spread evenly. 32 hex digits."""
    digest = blake2b(digest_size=16)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{size}\0".encode())
        with path.open("rb") as file:
            step = max(SAMPLE_BYTES, size // SAMPLES)
            for offset in [*range(0, size, step), max(0, size - SAMPLE_BYTES)]:
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
