"""Where compiled kernels are kept: beside the package when an image brings them, else in the user's cache folder."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ABANDONED_SECONDS = 3600.0  # no compiler takes as long: what is older was left by a process that was killed
KEPT = 12  # files in the user's folder: some levels and dtypes of some versions
SCRATCH = ".build-"  # how the names of folders begin that a build works in
BUILT = Path(__file__).with_name("built")  # filled by `python -m kernels.cpu.compile` when an image is built


def folders() -> Iterator[Path]:
    """Folders that may hold kernels, in the order to look; each is ours alone, because code is loaded from it."""
    yield BUILT
    for folder in _candidates():
        if _make_private(folder):
            yield folder
            return


@contextmanager
def scratch() -> Iterator[Path]:
    """A fresh folder, for when no folder can be kept. What was loaded from it stays loaded."""
    with tempfile.TemporaryDirectory(prefix="gllm-kernels-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def remove_old(folder: Path) -> None:
    """Leave the newest files of the user's folder. Who has one of the others loaded keeps what it has.

    What a build that was killed has left goes, too.
    """
    files = sorted(folder.glob("gllm-cpu-*.so"), key=_age)
    for path in files[KEPT:]:
        for old in (path, folder / f".{path.name}.lock"):
            with suppress(OSError):
                old.unlink()
    for path in folder.glob(f"{SCRATCH}*"):
        if time.time() + _age(path) > ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    """Sorts the newest first; one that another process has just removed last."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get("GLLM_CACHE"):
        yield Path(chosen) / "kernels"
        return
    if cache := os.environ.get("XDG_CACHE_HOME"):
        yield Path(cache) / "gllm" / "kernels"
    if os.environ.get("HOME"):
        yield Path(os.environ["HOME"]) / ".cache" / "gllm" / "kernels"
    yield Path(tempfile.gettempdir()) / f"gllm-kernels-{os.geteuid()}"


def _make_private(folder: Path) -> bool:
    """Whether the folder is (now) there, writable, and nobody else's: others could put code into a shared one."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _is_ours(folder) and _is_ours(folder.parent) and os.access(folder, os.W_OK)
    except OSError:
        return False


def _is_ours(folder: Path) -> bool:
    """Whether nobody but us (and root) can replace what is in it."""
    facts = folder.stat()
    shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX
    return facts.st_uid in (0, os.geteuid()) and not shared
