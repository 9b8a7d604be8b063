"""Backends on each level that this processor runs; compiled once and kept in the user's cache."""

from collections.abc import Callable, Iterator

import pytest

from kernels.cpu import levels, library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.build import BuildError, compiler
from tests.engine.conftest import checkpoints, make_engine  # noqa: F401 - fixtures

LEVELS = [level.name for level in levels.usable()]
EXTRA = set(LEVELS[1:]) & {"avx512"}  # what differs of it is in the levels above and below: compiled in long runs only


def make_backend(level: str, threads: int = 2) -> CpuBackend:
    found = library.load(level=level)
    if isinstance(found, library.Missing):
        pytest.skip(f"no kernels for {level}: {found.reason}")
    return CpuBackend(found, deterministic=True, threads=threads)


@pytest.fixture(scope="session")
def a_compiler() -> str:
    try:
        return compiler()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def cpu(request: pytest.FixtureRequest) -> CpuBackend:
    """The backend on the best level, or on the level that a test is parametrised with."""
    return make_backend(getattr(request, "param", LEVELS[0]))


@pytest.fixture
def pool_threads(cpu: CpuBackend) -> Iterator[Callable[[int], None]]:
    """pool_threads(count): compute on so many threads from here to the test's end."""
    yield cpu.library.set_threads
    cpu.library.set_threads(2)


every_level = pytest.mark.parametrize(
    "cpu", [pytest.param(name, marks=[pytest.mark.slow] if name in EXTRA else []) for name in LEVELS], indirect=True
)
