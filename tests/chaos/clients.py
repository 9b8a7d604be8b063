"""The clients of a run: tasks of one event loop, and threads. Each takes case after case and performs its session."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, closing

import gllm
from gllm.protocol import Error
from tests.chaos.diary import Diary
from tests.chaos.session import Session
from tests.chaos.witness import Witness
from tests.chaos.workload import Case

RESULT_SECONDS = 60.0  # for a reply that has ended, from a server that may be away
PATIENCE_SECONDS = 30.0  # with a server that is away
JOIN_SECONDS = 5.0


class Clients:
    """`source` gives the next case, and None when there are no more. Call `start`, then `join`."""

    def __init__(self, url: str, queue: str, source: Callable[[], Case | None], diary: Diary) -> None:
        self._place = (url, queue)
        self._source, self._diary = source, diary
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.witnesses: list[Witness] = []

    def start(self, tasks: int, threads: int) -> None:
        jobs = [lambda: asyncio.run(self._tasks(tasks)), *[self._blocking] * threads]
        self._threads = [threading.Thread(target=job, name=f"client {i}", daemon=True) for i, job in enumerate(jobs)]
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> list[str]:
        """Wait until all cases have ended; the ids of those that have not after so many seconds."""
        self._join(seconds)
        open_ids = [witness.case.id for witness in self.witnesses if not witness.ended]
        self.stop()
        return open_ids

    def stop(self) -> None:
        """Take no more cases, and give up what is open (a thread that waits for a reply is left behind)."""
        self._stopped.set()
        self._join(JOIN_SECONDS)

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _next(self) -> Session | None:
        with self._lock:
            case = None if self._stopped.is_set() else self._source()
            if case is None:
                return None
            self.witnesses.append(Witness(case))
            return Session(case, self.witnesses[-1])

    def _failed(self, session: Session, error: Exception) -> None:
        session.witness.faults.append(f"{type(error).__name__}: {error}")
        self._diary.write(f"{session.case.id}: {session.witness.faults[-1]}")

    # -- asyncio --------------------------------------------------------------------------------------------------

    async def _tasks(self, count: int) -> None:
        users = [asyncio.create_task(self._user()) for _ in range(count)]
        waiting = set(users)
        while waiting and not self._stopped.is_set():
            _, waiting = await asyncio.wait(users, timeout=0.2)
        for user in waiting:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)

    async def _user(self) -> None:
        while session := self._next():
            try:
                await self._perform(session)
            except Exception as error:
                self._failed(session, error)

    async def _perform(self, session: Session) -> None:
        client = gllm.Client(*self._place, patience=PATIENCE_SECONDS)
        try:
            for step in session.steps():
                match step:
                    case "submit" | "submit twin":
                        await client.submit(**session.submission(step))
                    case "cancel":
                        await client.cancel(session.case.id)
                    case "read":
                        await self._read(client, session)
                    case "look back" if not isinstance(session.witness.terminals[0], Error):
                        session.compare(await client.result(session.case.id, timeout=RESULT_SECONDS))
                    case "hang up":
                        await client.aclose()
                        client = gllm.Client(*self._place, patience=PATIENCE_SECONDS)
        finally:
            await client.aclose()

    async def _read(self, client: gllm.Client, session: Session) -> None:
        last, characters = session.witness.place
        stream = client.stream(session.case.id, last, characters=characters)
        async with aclosing(stream) as replies:
            async for reply in replies:
                if session.take(reply):
                    break

    # -- threads --------------------------------------------------------------------------------------------------

    def _blocking(self) -> None:
        while session := self._next():
            try:
                self._perform_blocking(session)
            except Exception as error:
                self._failed(session, error)

    def _perform_blocking(self, session: Session) -> None:
        client = gllm.SyncClient(*self._place, patience=PATIENCE_SECONDS)
        try:
            for step in session.steps():
                match step:
                    case "submit" | "submit twin":
                        client.submit(**session.submission(step))
                    case "cancel":
                        client.cancel(session.case.id)
                    case "read":
                        self._read_blocking(client, session)
                    case "look back" if not isinstance(session.witness.terminals[0], Error):
                        session.compare(client.result(session.case.id, timeout=RESULT_SECONDS))
                    case "hang up":
                        client.close()
                        client = gllm.SyncClient(*self._place, patience=PATIENCE_SECONDS)
        finally:
            client.close()

    def _read_blocking(self, client: gllm.SyncClient, session: Session) -> None:
        last, characters = session.witness.place
        stream = client.stream(session.case.id, last, characters=characters)
        with closing(stream) as replies:
            for reply in replies:
                if session.take(reply):
                    break
