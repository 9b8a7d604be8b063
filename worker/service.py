"""The worker: starting -> ready -> draining -> stopped, and failed from anywhere."""

import asyncio
import gc
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from gllm.connection import connect
from gllm.keys import Keys
from worker import logs, traces
from worker.bridge import Bridge, EngineDied, EngineRefused
from worker.claimer import BLOCK_MS
from worker.config import Settings
from worker.health import Address, Health, PortError, serve
from worker.lease import patience
from worker.metrics import Metrics
from worker.models import ModelError
from worker.queue import Queue, QueueMismatch
from worker.running import Clients, Running, Shutdown
from worker.startup import Model, RedisRefused, begin_aside, join_queue, load_model

OK, FAILED, REFUSED = 0, 1, 2  # exit status: ended as asked; died with work to do; could not even start
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PHASE_SECONDS = 0.1  # how soon the end of a loading phase is logged
T = TypeVar("T")
BELL_TIMEOUT = BLOCK_MS / 1000 + 2.0  # a blocking read must outlast its BLOCK


def run(settings: Settings) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; the exit status of the process."""
    traces.preload()
    gc.collect()
    gc.freeze()  # modules are never garbage, and to look through them all would stop every stream for 40 ms
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        status, loading = runner.run(_run(settings))
    if loading:  # a download cannot be stopped, and the interpreter's own way out would wait for its threads
        os._exit(status)
    return status


async def _run(settings: Settings) -> tuple[int, bool]:
    service, loop = Service(settings), asyncio.get_running_loop()
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup means it
    for number in heard:  # the loop would take its own handlers along, and a second signal would kill us
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(service.shutdown.signal))
    status = await service.run()
    for number in heard:
        signal.signal(number, signal.SIG_IGN)
    return status, service.loading


class Service:
    """One worker process. `bridge` and `load` are for tests; they need a running event loop, as all of it does."""

    def __init__(
        self, settings: Settings, bridge: Bridge | None = None, load: Callable[..., Model] = load_model
    ) -> None:
        self.settings = settings
        self.shutdown = Shutdown()
        self.health = Health()
        self.metrics = Metrics()
        self.address: Address | None = None
        self.name = worker_name()
        self.running: Running | None = None  # once everything is loaded and Redis is there
        self._bridge = bridge or Bridge()
        self._told = 0  # phases of its loading that are in the log
        self._load = partial(load, model_defaults=True) if settings.model_defaults else load
        self._loader: threading.Thread | None = None
        self._traces = traces.Traces()
        self._log = structlog.get_logger()
        self._began = time.monotonic()
        self.metrics.worker.queue = settings.queue
        self.metrics.worker.state = lambda: (self.health.state, self.health.ready)
        self.metrics.processes.engine = lambda: self._bridge.pid

    @property
    def loading(self) -> bool:
        """Whether the model is still being found; that goes on even when `run` is over."""
        return self._loader is not None and self._loader.is_alive()

    async def run(self) -> int:
        """Start, serve, drain; the exit status."""
        settings = self.settings
        self._log.info(
            logs.STARTING, worker=self.name, queue=settings.queue, model=settings.model, lease=settings.lease
        )
        try:
            async with serve(settings.metrics_host, settings.metrics_port, self.health, self.metrics) as address:
                self.address = address
                self._log.info(logs.METRICS_LISTENING, host=address.host, port=address.port)
                return await self._serve()
        except PortError as error:
            return self._refuse(logs.METRICS_FAILED, error)

    async def _serve(self) -> int:
        clients = self._clients()
        starting = asyncio.create_task(self._start(clients))
        stop = asyncio.create_task(self.shutdown.requested.wait())
        try:
            await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return OK
            return await self._work(starting.result())
        except (ModelError, EngineRefused) as error:
            return self._refuse(logs.ENGINE_REFUSED, error)
        except QueueMismatch as error:
            return self._refuse(logs.QUEUE_MISMATCH, error)
        except RedisRefused as error:
            return self._refuse(logs.REDIS_REFUSED, error)
        except EngineDied as error:
            return self._fail(error)
        finally:
            for task in (starting, stop):
                task.cancel()
            await asyncio.gather(starting, stop, return_exceptions=True)
            await self._bridge.close()
            await clients.close()
            await asyncio.to_thread(self._traces.close)
            self._log.info(logs.STOPPED, worker=self.name)

    def _clients(self) -> Clients:
        settings = self.settings
        to = partial(connect, settings.redis, queue=settings.queue, name=self.name)
        return Clients(to(), to(socket_timeout=patience(settings.lease)), to(socket_timeout=BELL_TIMEOUT))

    async def _start(self, clients: Clients) -> Running:
        """Load the engine and wait for Redis, side by side."""
        settings = self.settings
        self.health.to("starting", "loading the model")
        self._loader, found = begin_aside(self._load, settings.model)
        await self._bridge.spawn()  # its imports take a second or more, and need no model
        model = await self._timed("find", found)
        self._log.info(logs.MODEL_LOADING, path=str(model.path), digest=model.digest)
        queue = Queue(clients.main, Keys(settings.queue), self.name, lease=settings.lease)
        eos = tuple(sorted(model.tokenizer.eos_ids))
        loading = asyncio.create_task(self._bridge.start(settings.engine_config(model.path, eos)))
        joining = asyncio.create_task(self._timed("redis", join_queue(queue, settings.redis, model.digest)))
        telling = asyncio.create_task(self._tell_phases())
        try:
            await _all_or_first_error(loading, joining)
        finally:
            for task in (loading, joining, telling):
                task.cancel()
            await asyncio.gather(loading, joining, telling, return_exceptions=True)
        self._loaded()
        self._traces = await asyncio.to_thread(traces.begin, settings.queue, self.name, settings.model)
        self.running = Running(queue, clients, self._bridge, model, self.health, self.metrics)
        self.running.jobs.on_left = self._traces.left
        return self.running

    async def _timed(self, phase: str, waiting: Awaitable[T]) -> T:
        began = time.monotonic()
        result = await waiting
        self.metrics.worker.phase(phase, time.monotonic() - began)
        return result

    async def _tell_phases(self) -> None:
        """Log each phase of loading as it ends: a large model takes minutes, and people watch."""
        while True:
            self._tell_new_phases()
            await asyncio.sleep(PHASE_SECONDS)

    def _tell_new_phases(self) -> None:
        for phase in self._bridge.loading[self._told :]:
            self.metrics.worker.phase(phase.phase, phase.seconds)
            self._log.info(logs.ENGINE_LOADING, phase=phase.phase, seconds=round(phase.seconds, 3))
            self._told += 1

    def _loaded(self) -> None:
        self._tell_new_phases()
        bridge, metrics = self._bridge, self.metrics
        info = bridge.info
        self._log.info(
            logs.ENGINE_READY,
            device=info.device,
            dtype=info.dtype,
            deterministic=info.deterministic,
            numerics=info.numerics,
            kernels=info.kernels,
            kv_blocks=info.kv_blocks,
            max_model_len=info.max_model_len,
        )
        metrics.engine.info = info
        metrics.engine.stats = lambda: bridge.stats
        metrics.engine.stats_time = lambda: bridge.stats_time

    async def _work(self, running: Running) -> int:
        assert self.address is not None
        self.metrics.worker.phase("total", time.monotonic() - self._began)
        self._log.info(logs.READY, worker=self.name, url=f"http://{self.address.host}:{self.address.port}")
        failure = await running.serve(self.shutdown, self.settings.grace)
        return OK if failure is None else self._fail(failure)

    def _refuse(self, event: str, error: Exception) -> int:
        self.health.to("failed", str(error))
        self._log.error(event, message=str(error))
        return REFUSED

    def _fail(self, error: Exception) -> int:
        self.health.to("failed", str(error))
        event = logs.ENGINE_DIED if isinstance(error, EngineDied) else logs.FAILED
        expected = isinstance(error, (EngineDied, QueueMismatch))
        self._log.error(event, message=f"{type(error).__name__}: {error}", exc_info=None if expected else error)
        return FAILED


async def _all_or_first_error(*tasks: "asyncio.Task[None]") -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def worker_name() -> str:
    """host-pid-64 random bits: new at each start, so that an epoch that a failover hands out twice is still fenced."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:64] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(8)}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
