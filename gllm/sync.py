"""The same client for code without asyncio: a private event loop in a thread does the work of `Client`."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Self, TypeVar

from gllm.client import Client
from gllm.protocol import Job
from gllm.reply import Reply, Result

T = TypeVar("T")


class SyncClient:
    """`Client`, blocking. Use it as a context manager. Threads may share it; a running event loop does not disturb it.

    Arguments, results and errors are those of `Client`.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        queue: str = "default",
        *,
        max_queue: int | None = None,
        patience: float = 60.0,
    ) -> None:
        self._client = Client(url, queue, max_queue=max_queue, patience=patience)
        self._loop = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the client. Streams that are still open end with an error. May be called twice."""
        if not self._loop.closed:
            self._loop.run(_end_other_tasks())
            self._loop.run(self._client.aclose())
            self._loop.close()

    def submit(self, job: Job | None = None, **fields: Any) -> str:
        """See `Client.submit`."""
        return self._loop.run(self._client.submit(job, **fields))

    def stream(
        self,
        id: str,  # noqa: A002 (the protocol's word)
        last_id: str = "0-0",
        *,
        characters: int | None = None,
        timeout: float | None = None,
    ) -> Generator[Reply]:
        """See `Client.stream`."""
        replies = self._client.stream(id, last_id, characters=characters, timeout=timeout)

        async def following() -> Reply | None:
            return await anext(replies, None)

        try:
            while reply := self._loop.run(following()):
                yield reply
        finally:
            self._loop.post(replies.aclose)

    def result(self, id: str, *, timeout: float | None = None) -> Result:  # noqa: A002 (the protocol's word)
        """See `Client.result`."""
        return self._loop.run(self._client.result(id, timeout=timeout))

    def cancel(self, id: str) -> bool:  # noqa: A002 (the protocol's word)
        """See `Client.cancel`."""
        return self._loop.run(self._client.cancel(id))


async def _end_other_tasks() -> None:
    """Interrupted calls are cancelled but may not have ended yet; the loop must not stop under them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class _LoopThread:
    """An event loop of one's own in a daemon thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gllm-sync-client", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine in the loop and waits for it; an interrupted wait cancels it."""
        if self.closed or os.getpid() != self._pid:
            coroutine.close()
            state = "closed" if self.closed else "made before a fork; make one in each process"
            raise RuntimeError(f"this SyncClient was {state}")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def post(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs the coroutine some time, without waiting: the collector may drop a stream in the loop's own thread."""
        if not self.closed and os.getpid() == self._pid:
            asyncio.run_coroutine_threadsafe(make(), self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
