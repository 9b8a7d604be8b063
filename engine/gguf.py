"""GGUF checkpoints: metadata to flags, and tensors under the names that Hugging Face gives them, as it stores them."""

from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.families import FAMILIES
from engine.gguf_config import EMBEDDING, MetadataReader, architecture_of
from engine.gguf_families import ARCHITECTURES, BLOCK_NAMES, FACTORS, TOP_NAMES
from engine.gguf_head import ALIGNMENT, read_head
from engine.gguf_tensors import GgufTensors
from engine.settings import Settings

ROPE_FACTORS = {name for names in FACTORS.values() for name in names}  # part of the configuration, although tensors


class GgufSource:
    """The tensors of one .gguf file under their Hugging Face names, dequantised as they are read."""

    def __init__(self, path: Path) -> None:
        self._path, self.place = path, str(path)
        metadata, infos = read_head(path)
        self._settings = Settings(metadata, path)
        self._refuse_parts()
        self._architecture = ARCHITECTURES[architecture_of(self._settings)]
        self._blocks = BLOCK_NAMES | self._architecture.names
        self._names = {self._hf_name(info.name): info.name for info in infos}
        if len(self._names) < len(infos):
            raise ModelError(f"{path}: two tensors have the same name")
        self._tensors = GgufTensors(path, infos, metadata.get("general.alignment", ALIGNMENT))
        if EMBEDDING not in self._names:
            raise ModelError(f"{path}: tensor token_embd.weight is missing")
        vocab_size = int(self.shape(EMBEDDING)[0])
        self.config = MetadataReader(self._settings, self._names, vocab_size, self._rope_factors).config()

    def names(self) -> set[str]:
        return set(self._names) - ROPE_FACTORS

    def where(self, name: str) -> str:
        return str(self._path)

    def shape(self, name: str) -> list[int]:
        return self._tensors.shape(self._names[name])

    def read(self, name: str) -> Tensor:
        """The whole tensor in float32."""
        found = torch.empty(self.shape(name))
        self.copy(name, found)
        return found

    def copy(self, name: str, target: Tensor) -> None:
        """Write the tensor into `target`, which has its shape, in the dtype of `target`."""
        if not self._adds_one(name):
            self._tensors.copy(self._names[name], target, self._rows(name))
            return
        stored = torch.empty(self.shape(name))  # in float32: what is left is small, and exact in few bits
        self._tensors.copy(self._names[name], stored)
        target.copy_(stored - 1)

    def _adds_one(self, name: str) -> bool:
        """Converters add to the norms' weights what the family's own code would."""
        return FAMILIES[self._architecture.family].unit_offset and name.endswith("norm.weight")

    def _rows(self, name: str) -> Tensor | None:
        """Where each row belongs, if q and k are stored for a rope of neighbours: ours (and HF's) rotates halves."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        if part not in ("q_proj", "k_proj") or not self._architecture.interleaved:
            return None
        heads = self.config.heads if part == "q_proj" else self.config.kv_heads
        halves = torch.arange(self.shape(name)[0]).view(heads, 2, -1)
        return halves.transpose(1, 2).reshape(-1)

    def _refuse_parts(self) -> None:
        count = self._settings.raw.get("split.count", 1)
        if count != 1:
            message = f"it is one of {count} parts (split.count); join them first, with llama-gguf-split --merge"
            raise ModelError(f"{self._path}: {message}")

    def _hf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{suffix}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in self._blocks:
            return f"model.layers.{parts[1]}.{self._blocks[parts[2]]}.{suffix}"
        return name

    def _rope_factors(self, name: str) -> tuple[float, ...]:
        """What each plane's frequency is divided by."""
        factors = self.read(name)
        if factors.dim() != 1 or not bool(((factors > 0) & torch.isfinite(factors)).all()):
            raise ModelError(f"{self._path}: tensor {name}: a list of positive numbers expected")
        return tuple(factors.tolist())
