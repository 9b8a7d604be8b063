"""Chat templates that mean harm: each costs its own job a clear error, and nobody else anything."""

import os
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from worker import sandbox
from worker.renderer import Renderer
from worker.sandbox import TemplateFailed

NOW = datetime(2026, 2, 3, tzinfo=UTC)
SECONDS, MEMORY_MIB = 0.1, 128
LONG = "{% set r = range(99999) | list %}"
DOUBLED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    LONG + "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    LONG + "{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
    LONG + "{% for a in r %}{% if -1 in r %}{% endif %}{% endfor %}",
    DOUBLED + "{{ ns.x == ns.y }}",
    DOUBLED + "{{ ns.x | string | length }}",
    DOUBLED + "{{ ns.x | tojson | length }}",
    DOUBLED + "{{ ns.x | pprint | length }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "{{ (['a' * 99999] * 99999) | map('upper') | list | length }}",
]
GROWING = [
    "{{ 'ab' * 99999999999 }}",
    "{{ 99999999999 * [1] }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%999999999s' | format('a') }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a'.ljust(99999999999) }}",
    "{{ ('a\n' * 10000) | indent(100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ range(99999) | map('string') | join('x' * 100000) }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% macro f(x, n) %}{{ f(x ~ x, n - 1) if n }}{% endmacro %}{{ f('ab', 60) }}",
]
DEEP = ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "-" * 5000 + "1 }}", "{{ " + "(" * 200 + "1 }}"]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(SECONDS, MEMORY_MIB)
    yield renderer
    renderer.close()


def render(renderer: Renderer, source: str) -> str:
    return renderer.render(source, {"messages": [{"role": "user", "content": "hi"}]}, NOW)


def failure(renderer: Renderer, source: str) -> str:
    with pytest.raises(TemplateFailed) as caught:
        render(renderer, source)
    assert render(renderer, "{{ messages[0].content }}") == "hi", "the next job is served"
    return str(caught.value)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_would_not_end_is_ended(renderer: Renderer, source: str) -> None:
    assert failure(renderer, source) in (
        f"took more than {SECONDS:g} seconds",
        f"needed more than {MEMORY_MIB} MiB of memory",
    )


@pytest.mark.parametrize("source", GROWING)
def test_a_template_that_grows_without_end_gets_no_more_memory(renderer: Renderer, source: str) -> None:
    assert failure(renderer, source) in (
        f"needed more than {MEMORY_MIB} MiB of memory",
        f"took more than {SECONDS:g} seconds",
        "failed: OverflowError: cannot fit 'int' into an index-sized integer",
    )


@pytest.mark.parametrize("source", DEEP)
def test_a_template_that_goes_too_deep_fails(renderer: Renderer, source: str) -> None:
    assert failure(renderer, source).startswith("failed: ")


def test_what_a_template_writes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDERED", 1000)
    assert len(sandbox.render("{% for i in range(500) %}ab{% endfor %}", {}, NOW)) == 1000
    with pytest.raises(TemplateFailed, match="wrote more than 1000 characters"):
        sandbox.render("{% for i in range(501) %}ab{% endfor %}", {}, NOW)


def test_what_a_template_says_while_it_fails_is_short(renderer: Renderer) -> None:
    assert len(failure(renderer, "{{ raise_exception('x' * 99999) }}")) < 1100


def test_neighbours_are_served_while_one_template_runs(renderer: Renderer) -> None:
    slow = threading.Thread(target=failure, args=(renderer, ENDLESS[0]))
    slow.start()
    served = 0
    while slow.is_alive():
        served += render(renderer, "{{ messages[0].content }}") == "hi"
    assert served > 3


def test_a_process_that_was_killed_is_replaced() -> None:
    renderer = Renderer()
    renderer.start()
    for child in renderer._idle:
        child._process.send_signal(signal.SIGKILL)
        child._process.wait()
    assert render(renderer, "ok") == "ok"
    assert len(renderer._idle) == 1
    renderer.close()


def test_a_process_that_is_killed_under_a_job_says_so() -> None:
    renderer = Renderer()
    renderer.start()
    (child,) = renderer._idle
    timer = threading.Timer(0.1, child._process.kill)
    timer.start()
    with pytest.raises(TemplateFailed, match="ended the process that rendered it, with status -9"):
        render(renderer, ENDLESS[0])
    timer.join()
    renderer.close()


def test_a_process_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.renderer.PATIENCE_SECONDS", 0.2)
    renderer = Renderer()
    renderer.start()
    (child,) = renderer._idle
    child._process.send_signal(signal.SIGSTOP)
    with pytest.raises(TemplateFailed, match=r"was not done after 0\.2 seconds"):
        render(renderer, "ok")
    assert renderer._idle == []
    assert child._process.returncode == -signal.SIGKILL
    renderer.close()


def test_a_process_without_its_parent_ends_by_itself() -> None:
    renderer = Renderer()
    render(renderer, "ok")
    (child,) = renderer._idle
    child._answers.close()
    child._socket.close()
    assert child._process.wait(10) == 0
    renderer.close()


def test_no_process_is_left_behind() -> None:
    renderer = Renderer()
    renderer.start()
    render(renderer, "ok")
    pids = [child._process.pid for child in renderer._idle]
    del renderer
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rendering_that_ends_after_the_close_leaves_nothing() -> None:
    renderer = Renderer(SECONDS)
    threads = [threading.Thread(target=failure, args=(renderer, ENDLESS[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    renderer.close()
    for thread in threads:
        thread.join()
    assert renderer._idle == []


def test_signals_of_a_terminal_are_for_the_worker() -> None:
    """Which drains, and may have chats to prepare meanwhile (those of a suspect's turn)."""
    renderer = Renderer()
    render(renderer, "ok")
    (child,) = renderer._idle
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(child._process.pid, number)
    assert render(renderer, "ok") == "ok"
    assert renderer._idle == [child]
    renderer.close()


def test_the_largest_jobs_stay_far_from_the_limits() -> None:
    """A fifth of the time and of the memory are enough."""
    renderer, talk = Renderer(1.0, 100), [{"role": "user", "content": "漢字 words " * 400} for _ in range(1000)]
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    text = renderer.render(source, {"messages": talk}, NOW)
    assert len(text) > 3_500_000
    with pytest.raises(TemplateFailed, match="needed more than 24 MiB"):
        Renderer(memory_mib=24).render(source, {"messages": talk}, NOW)
    renderer.close()
