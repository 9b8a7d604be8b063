"""Who computes on CUDA; no card is needed to ask, and no Triton to hear that there is none."""

import subprocess
import sys

import pytest
import torch

from kernels import KernelsMissingError, TorchBackend, select
from kernels import select as selecting

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[selecting.__module__], "capability", lambda device: (9, 0))


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)


def test_triton_kernels_are_taken_on_cuda_where_triton_is(card):
    pytest.importorskip("triton")
    for kernels in ("auto", "triton"):
        chosen = select(kernels=kernels, deterministic=True, device=CUDA, dtype=torch.bfloat16)
        assert chosen.name == "triton"
        assert chosen.numerics.startswith("triton-")


def test_without_triton_plain_torch_computes_on_cuda_and_says_why(card, monkeypatch):
    without_triton(monkeypatch)
    chosen = select(kernels="auto", deterministic=False, device=CUDA, dtype=torch.bfloat16)
    assert type(chosen) is TorchBackend
    assert chosen.name.startswith("torch (no Triton kernels: ")
    with pytest.raises(KernelsMissingError, match=r"kernels: 'triton' was asked for, but .*triton"):
        select(kernels="triton", deterministic=False, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_triton_kernels_are_refused_on_a_cpu(device):
    with pytest.raises(KernelsMissingError, match="'triton' was asked for, but they are for CUDA"):
        select(kernels="triton", deterministic=True, device=device)


def test_triton_kernels_are_refused_for_what_they_are_not_made_for(card, monkeypatch):
    with pytest.raises(KernelsMissingError, match="there are none for float64"):
        select(kernels="triton", deterministic=True, device=CUDA, dtype=torch.float64)
    monkeypatch.setattr(sys.modules[selecting.__module__], "capability", lambda device: (7, 5))
    chosen = select(kernels="auto", deterministic=True, device=CUDA, dtype=torch.float16)
    assert chosen.name == "torch (no Triton kernels: they need compute capability 8.0, not 7.5)"


def test_nothing_imports_triton_before_it_is_selected():
    code = "import sys, kernels, engine; assert not any(name.startswith('kernels.triton') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
