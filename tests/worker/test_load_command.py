"""`gllm bench` as people type it, against workers with an engine's stand-in."""

import asyncio
import json
import os
import pty
import re
import signal
from pathlib import Path

import pytest

from tests.servers import first_kind
from tests.worker.command_bench import Commands
from tests.worker.fake_engine import FakeEngine
from tests.worker.service_bench import ServiceBench
from tests.worker.test_commands_screen import read_until


@pytest.fixture
def server_kind() -> str:
    """One kind is enough where the client is what is tested."""
    return first_kind()


async def run_bench(commands: Commands, *arguments: str) -> tuple[int, str, str]:
    process = commands.process("bench", *arguments, stdout=-1, stderr=-1)
    out, errors = await asyncio.to_thread(process.communicate, timeout=30)
    return process.returncode, out.decode(), errors.decode()


async def test_bench_prints_a_table_and_writes_every_figure(
    crew: ServiceBench, commands: Commands, tmp_path: Path
) -> None:
    engine = FakeEngine(max_sequences=64)
    await crew.start(engine=engine)
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    given = "--jobs 12 --rate 200 --arrival bursts --burst 3 --prompt-tokens 20:30 --max-tokens 4 --shared-prefix 8"
    status, out, errors = await run_bench(commands, *given.split(), "--json", str(path), "--plot", str(picture))
    assert (status, errors) == (0, ""), out
    lines = [re.sub("  +", "  ", line) for line in out.splitlines()]
    assert lines[0] == "LATENCY  COUNT  MEAN  P50  P90  P99  LONGEST"
    assert [line.split("  ")[:2] for line in lines[1:7]] == [
        ["sent late", "12"], ["submit", "12"], ["queue wait", "12"], ["first token", "12"], ["between tokens", "36"],
        ["end to end", "12"],
    ]  # fmt: skip
    assert "ends  12 length" in lines
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(path.read_text())
    assert (written["figures"]["tokens"], len(written["jobs"]), written["interrupted"]) == (48, 12, False)
    assert written["options"]["ids"] == [75, 224], "what workers tell of their vocabulary"
    assert {request.cache_salt for request in engine.added} == {written["run"]}, "a cold cache for each run"
    assert written["environment"]["workers"][0]["device"] == "cpu"
    assert {job["id"] for job in written["jobs"]} == {f"{written['run']}-{index}" for index in range(12)}
    assert all(job["due"] <= job["sent"] <= job["first"] <= job["ended"] for job in written["jobs"])


async def test_bench_fails_with_its_jobs_and_follows_a_trace(
    crew: ServiceBench, commands: Commands, tmp_path: Path
) -> None:
    await crew.start(engine=FakeEngine(max_sequences=64))
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,40,4\n2023-11-16 18:17:04,80,8\n")
    status, out, _ = await run_bench(
        commands, "--trace", str(trace), "--speed", "20", "--vocab", "290:310", "--json", "-"
    )
    found = json.loads(out)
    assert (status, found["figures"]["outcomes"]) == (1, {"error invalid": 2})
    assert [(job["due"], job["wanted_prompt_tokens"]) for job in found["jobs"]] == [(0.0, 40), (0.05, 80)]
    status, _, errors = await run_bench(commands, "--trace", str(trace), "--scale", "100")
    assert status == 1
    assert "has 8,800 tokens with its reply, the workers' model takes 4,096: try --scale 46" in errors


async def test_bench_cancels_its_jobs_on_ctrl_c_and_prints_what_there_is(
    crew: ServiceBench, commands: Commands
) -> None:
    await crew.start(engine=FakeEngine(step_seconds=0.01, max_sequences=4))
    process = commands.process(
        "bench", "--clients", "2", "--max-tokens", "2000", "--prompt-tokens", "8", stdout=-1, stderr=-1
    )
    try:
        await crew.until_async(lambda: _running(crew, 2), "two jobs with tokens")
        process.send_signal(signal.SIGINT)
        out, errors = await asyncio.to_thread(process.communicate, timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, b"cancelling 2 jobs; Ctrl-C again leaves at once\n")
    assert re.search(r"ends +2 cancelled", out.decode())
    assert await crew.bench.pending() == 0


async def _running(crew: ServiceBench, count: int) -> bool:
    return sum(job.published > 0 for job in crew.workers[0].jobs) == count


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--shared-prefix 128", "--shared-prefix 128 leaves nothing of --prompt-tokens 128"),
        ("--clients 3 --rate 2", "--clients excludes --rate and --arrival"),
        ("--arrival trace", "--arrival trace needs --trace"),
        ("--speed 2", "--speed 2.0 needs --trace"),
        ("--prompt-tokens 9:3", "'9:3'"),
        ("--prompt-tokens 0", "'0'"),
        ("--trace /nowhere/t.csv", "No such file or directory"),
        ("--rate nan", "a finite number expected, got 'nan'"),
        ("--duration inf", "a finite number expected, got 'inf'"),
        ("--temperature nan", "a finite number expected, got 'nan'"),
        ("--plot /nowhere/p.png", "there is no folder '/nowhere'"),
        ("--json /nowhere/p.json", "there is no folder '/nowhere'"),
        ("--json /", "is a directory"),
    ],
)
def test_bench_refuses_what_means_nothing(commands: Commands, arguments: str, said: str) -> None:
    result = commands("bench", *arguments.split())
    assert result.exit_code != 0
    assert said in result.stderr.replace("\n", " ")


async def test_bench_on_a_terminal_shows_how_far_it_is(crew: ServiceBench, commands: Commands) -> None:
    await crew.start(engine=FakeEngine(step_seconds=0.01, max_sequences=4))
    ours, theirs = pty.openpty()
    process = commands.process(
        "bench", "--clients", "2", "--jobs", "8", "--max-tokens", "40", "--prompt-tokens", "8", stdout=-1, stderr=theirs
    )
    os.close(theirs)
    try:
        await asyncio.to_thread(read_until, ours, b" of 8 jobs, 2 open, ")
        out, _ = await asyncio.to_thread(process.communicate, timeout=20)
    finally:
        process.kill()
        os.close(ours)
    assert (process.returncode, b"8 length" in out) == (0, True)
