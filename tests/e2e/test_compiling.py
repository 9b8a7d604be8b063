"""Workers whose kernels are being compiled."""

import os
import signal
from pathlib import Path

from kernels.cpu.build import compiler
from tests.e2e.conftest import Start
from tests.kernels.cpu.slow_compiler import Slow, wait_until


def test_sigterm_while_kernels_are_compiled_leaves_no_compiler(start: Start, tmp_path: Path) -> None:
    """One of those that begin early, for bfloat16, and one of the engine's, whose model turns out to be float32."""
    slow = Slow(tmp_path, compiler())
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GLLM_")}
    kept = {"CXX": str(slow.path), "GLLM_CACHE": str(tmp_path / "cache")}
    worker = start("--device", "cpu", environment=variables | kept)
    for dtype in ("BFLOAT16", "FLOAT32"):
        wait_until(lambda: f"-DGLLM_ONLY_{dtype}" in (word for call in slow.calls for word in call))  # noqa: B023
    assert worker.wait_event("engine_compiling")["what"].startswith("the CPU kernels for ")
    early = [call for call in slow.calls if "-DGLLM_ONLY_BFLOAT16" in call]
    assert early == slow.calls[: len(early)], "it began before torch was imported"
    assert slow.running
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait_exit(30) == 0
    wait_until(lambda: not slow.running)
