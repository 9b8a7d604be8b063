"""Which files a checkpoint consists of, and their fingerprint: worker and engine tell models apart by it. No torch."""

from hashlib import blake2b
from pathlib import Path

from engine.errors import ModelError
from engine.modelconfig import read_json

INDEX = "model.safetensors.index.json"
SAMPLE_BYTES, SAMPLES = 1 << 16, 64  # what is hashed of a weight file: enough to tell checkpoints apart, not 16 GB


def files_of(model: Path) -> list[Path]:
    """The files that decide what a model computes: a .gguf file, or config.json and the weights of a directory."""
    return [model] if model.is_file() else [model / "config.json", *(path for path, _ in shards_of(model))]


def shards_of(directory: Path) -> list[tuple[Path, set[str]]]:
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


def fingerprint(paths: list[Path], start: bytes = b"") -> str:
    """A digest of `start` and of files: sizes, heads, tails, and samples spread evenly. 32 hex digits."""
    digest = blake2b(start, digest_size=16)
    for path in paths:
        try:
            _add(digest, path)
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            raise ModelError(f"{path}: cannot be read: {error}") from None
    return digest.hexdigest()


def _add(digest: blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{size}\0".encode())
    step = max(SAMPLE_BYTES, size // SAMPLES)
    with path.open("rb") as file:
        for offset in [*range(0, size, step), max(0, size - SAMPLE_BYTES)]:
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
