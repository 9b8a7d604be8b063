"""From a checkpoint on disk to parameters on a device: strictly. Every tensor is used, none missing or mis-shaped."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint import files_of, fingerprint
from engine.errors import ModelError
from engine.memory import returning_memory
from engine.modelconfig import ModelConfig, load_config
from engine.shards import SafetensorsSource


class Source(Protocol):
    """A checkpoint: named tensors with their shapes, read one by one. `place` is the file that says what it holds."""

    place: str

    def names(self) -> set[str]: ...

    def where(self, name: str) -> str: ...

    def shape(self, name: str) -> list[int]: ...

    def read(self, name: str) -> Tensor: ...

    def copy(self, name: str, target: Tensor) -> None: ...


class Loader:
    """Hands out tensors by name, checked for shape and counted, in memory of the device, in one dtype.

    Shapes are compared before memory is taken: a wrong number in a configuration must not cost a terabyte.
    """

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device, *, rounds: bool = False) -> None:
        """`rounds`: matrices are kept in few bits later, and come in float32 until then."""
        self._source, self._rounds = source, rounds
        self._left = source.names()
        self._dtype, self._device = dtype, device
        self.bytes = 0  # of all parameters so far, but those that a backend rounds: it knows their bytes

    def has(self, name: str) -> bool:
        return name in self._left

    def tensor(self, name: str, rows: int, *columns: int) -> Tensor:
        return self.stacked([(name, rows)], *columns)

    def stacked(self, parts: list[tuple[str, int]], *columns: int) -> Tensor:
        """The tensors named in `parts`, each [rows, *columns], one below the other; copied once, into place."""
        for name, rows in parts:
            self._take(name, [rows, *columns])
        shape = (sum(rows for _, rows in parts), *columns)
        rounded = self._rounds and len(shape) == 2
        parameter = torch.empty(shape, dtype=torch.float32 if rounded else self._dtype, device=self._device)
        first = 0
        for name, rows in parts:
            self._source.copy(name, parameter[first : first + rows])
            first += rows
        self._refuse_infinite(parameter, [name for name, _ in parts])
        self.bytes += 0 if rounded else parameter.nbytes
        return parameter

    def drop_tied(self, name: str, twin: Tensor) -> None:
        """Take a tensor that the files hold although it is tied to `twin`; one that differs is warned of, not used."""
        self._take(name, list(twin.shape))
        if not torch.equal(self._source.read(name).to(twin.dtype).to(twin.device), twin):
            where = self._source.where(name)
            warnings.warn(
                f"{where}: {name} differs from the embedding it is tied to; the embedding is used", stacklevel=2
            )

    def close(self) -> None:
        if self._left:
            name = min(self._left)
            raise ModelError(f"{self._source.where(name)}: tensor {name} has no place in this model")

    def _take(self, name: str, shape: list[int]) -> None:
        if name not in self._left:
            raise ModelError(f"{self._source.place}: tensor {name} is missing")
        self._left.discard(name)
        if (found := self._source.shape(name)) != shape:
            raise ModelError(f"{self._source.where(name)}: tensor {name} has shape {found}, not {shape}")

    def _refuse_infinite(self, parameter: Tensor, names: list[str]) -> None:
        """One NaN in the weights, or a number that float16 does not hold, would make every reply an error."""
        least, greatest = parameter.aminmax()  # a NaN among the numbers is both
        if not bool(torch.isfinite(least) & torch.isfinite(greatest)):
            where, dtype = self._source.where(names[0]), str(parameter.dtype).removeprefix("torch.")
            message = f"tensor {' or '.join(names)} has numbers that are NaN, or infinite in {dtype}"
            raise ModelError(f"{where}: {message}")


@contextmanager
def open_checkpoint(model: str) -> Iterator[tuple[ModelConfig, Source, str]]:
    """The configuration, the tensors and the fingerprint of a Hugging Face directory or a .gguf file."""
    path = Path(model)
    with ExitStack() as stack, returning_memory():
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
