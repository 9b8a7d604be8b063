"""What importing gllm costs, and what it offers."""

import subprocess
import sys

import pytest

import gllm


def imported_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_gllm_loads_nothing_else() -> None:
    assert not imported_by("import gllm") & {"redis", "msgspec", "asyncio", "torch", "structlog", "click"}


def test_importing_the_client_loads_what_a_producer_has() -> None:
    loaded = imported_by("from gllm import Client, SyncClient")
    assert {"redis", "msgspec"} <= loaded
    assert not loaded & {"torch", "numpy", "structlog", "click", "tokenizers", "prometheus_client", "worker", "engine"}


def test_gllm_offers_every_name_it_lists() -> None:
    for name in gllm.__all__:
        assert getattr(gllm, name).__name__ == name
    assert set(gllm.__all__) <= set(dir(gllm))


def test_gllm_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clent'"):
        _ = gllm.Clent  # type: ignore[attr-defined]
