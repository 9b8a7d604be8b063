"""What a worker does first: the C++ kernels are compiled while it imports, if they are to be compiled at all."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from engine.config import Device, Dtype, Kernels

ROOT = Path(__file__).resolve().parent.parent
GPU_FILES = (
    Path("/dev/nvidiactl"),
    Path("/dev/dxg"),
)  # of NVIDIA's driver, also on WSL


def begin(device: Device, dtype: Dtype, kernels: Kernels) -> "subprocess.Popen[bytes] | None":
    """Begin to compile where `kernels.select` may want them, in a process that ends with this one at the latest.

    The dtype of a model is not known yet: bfloat16, which nearly all have, unless another one was asked for.
    """
    if kernels not in ("auto", "cpu") or dtype == "float16" or device == "cuda":
        return None
    if device == "auto" and any(path.exists() for path in GPU_FILES):
        return None
    command = [sys.executable, "-P", "-m", "kernels.cpu.early", "bfloat16" if dtype == "auto" else dtype]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,  # nothing is ever written: its end tells that we are gone
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=_see_off, args=(process,), name="early", daemon=True).start()
    return process


def _see_off(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end, so that no zombie is left; until then our end of its input stays open."""
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
