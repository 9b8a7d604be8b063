"""The stages of benchmarks/gpu_session.py, a file each, and what they share."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / ".gpu-packages"  # for a machine without some of what the engine imports
sys.path.append(str(CARRIED))  # last: what the machine itself has is preferred
