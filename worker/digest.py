"""What all workers of a queue must have in common: the digest of weights and tokenizer, on any device."""

from hashlib import blake2b
from pathlib import Path

SAMPLES = 64
SAMPLE_BYTES = 64 * 1024  # 4 MiB of each file in all: tens of gigabytes are not read just to name them


def model_digest(path: Path, tokenizer_digest: str) -> str:
    """32 hex digits from the tokenizer and from samples of the weights and the config, spread over each file."""
    digest = blake2b(tokenizer_digest.encode(), digest_size=16)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    for file in files:
        _add(digest, file)
    return digest.hexdigest()


def _add(digest: blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{size}\0".encode())
    step = max(SAMPLE_BYTES, size // SAMPLES)
    with file.open("rb") as content:
        for offset in [*range(0, size, step), max(0, size - SAMPLE_BYTES)]:
            content.seek(offset)
            digest.update(content.read(SAMPLE_BYTES))
