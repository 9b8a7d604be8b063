"""What is done to the workers and to the server while jobs run. Which and when is a function of the seed."""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gllm.connection import connect_sync
from tests.chaos.crew import Crew, Member
from tests.chaos.diary import Diary
from tests.servers import Server

LONG_DECK = (
    *("kill a worker",) * 3,
    *("kill an engine",) * 2,
    *("freeze a worker",) * 2,
    "freeze both",
    "freeze an engine",
    "end a worker",
    "hurry a worker",
    "kill everybody",
    *("flush scripts",) * 2,
    *("cut connections",) * 2,
    "restart the server",
    "kill the server",
    "kill server and worker",
    "freeze the server",
)
SHORT_DECK = (
    *("kill a worker",) * 2,
    "kill an engine",
    "freeze both",
    "freeze a worker",
    "end a worker",
    "kill everybody",
    *("flush scripts",) * 2,
    "cut connections",
    "restart the server",
    "kill server and worker",
)
GAP_SECONDS = (0.1, 0.8)
FROZEN_LEASES = (1.2, 2.5)
DOWN_LEASES = (0.1, 1.5)
ENDED, DIED, KILLED = 0, 1, -signal.SIGKILL  # status of a worker after SIGTERM, without its engine, after SIGKILL


class Disturber:
    """Plays a deck of disturbances in random order. `lease` in seconds: what is frozen stays so for longer."""

    def __init__(self, seed: int, deck: Sequence[str], crew: Crew, server: Server, lease: float, diary: Diary) -> None:
        self._deck = deck
        self._rng = random.Random(seed)
        self._crew, self._server, self._lease, self._diary = crew, server, lease, diary
        self._thaws: list[threading.Timer] = []
        self.done: list[str] = []

    def play(self, more: Callable[[], bool]) -> None:
        """The whole deck at least; further cards while `more`."""
        for card in self._cards():
            if len(self.done) >= len(self._deck) and not more():
                break
            time.sleep(self._rng.uniform(*GAP_SECONDS))
            self._diary.write(card)
            self._diary.write(f"    {getattr(self, '_' + card.replace(' ', '_'))()}")
            self.done.append(card)
        for thaw in self._thaws:
            thaw.join()

    def _cards(self) -> Iterator[str]:
        """The server's lie in the first half: its restart begins the reaper's wait for dead consumers anew."""
        while True:
            cards = self._rng.sample(self._deck, len(self._deck))
            early = [card for card in cards if "server" in card]
            others = [card for card in cards if card not in early]
            for card in early:
                others.insert(self._rng.randint(0, len(others) // 2), card)
            yield from others

    # -- workers --------------------------------------------------------------------------------------------------

    def _victims(self) -> list[Member]:
        """Those that have served for a while, once they are half of the crew.

        A worker begins with a suspect on trial. To kill each new one at once would charge the same job again and again,
        and on a slow machine nothing would make progress any more.
        """
        return self._crew.wait_settled((self._crew.size + 1) // 2)

    def _someone(self) -> Member:
        return self._rng.choice(self._victims())

    def _kill_everybody(self) -> str:
        victims = self._victims()
        for member in victims:
            member.signal(signal.SIGKILL, KILLED)
        return ", ".join(member.name for member in victims)

    def _kill_a_worker(self) -> str:
        member = self._someone()
        member.signal(signal.SIGKILL, KILLED)
        return member.name

    def _kill_an_engine(self) -> str:
        member = self._someone()
        member.signal_engine(signal.SIGKILL, DIED)
        return member.name

    def _end_a_worker(self) -> str:
        member = self._someone()
        member.signal(signal.SIGTERM, ENDED)
        return member.name

    def _hurry_a_worker(self) -> str:
        member = self._someone()
        member.signal(signal.SIGTERM, ENDED)
        time.sleep(self._rng.uniform(0.0, 0.2))
        member.signal(signal.SIGTERM)
        return member.name

    def _freeze_a_worker(self) -> str:
        member = self._someone()
        return self._freeze(member, member.signal)

    def _freeze_an_engine(self) -> str:
        member = self._someone()
        return self._freeze(member, member.signal_engine)

    def _freeze_both(self) -> str:
        member = self._someone()
        return self._freeze(member, member.signal, member.signal_engine)

    def _freeze(self, member: Member, *signals: Callable[[int], None]) -> str:
        """Other things go on happening before it thaws."""
        seconds = self._lease * self._rng.uniform(*FROZEN_LEASES)
        member.frozen = True
        for send in signals:
            send(signal.SIGSTOP)
        self._thaws.append(threading.Timer(seconds, self._thaw, (member, signals)))
        self._thaws[-1].start()
        return f"{member.name} for {seconds:.2f} s"

    def _thaw(self, member: Member, signals: tuple[Callable[[int], None], ...]) -> None:
        for send in signals:
            send(signal.SIGCONT)
        member.frozen = False
        self._diary.write(f"{member.name} thaws")

    # -- the server -----------------------------------------------------------------------------------------------

    def _flush_scripts(self) -> str:
        with connect_sync(self._server.url) as client:
            client.script_flush()
        return "done"

    def _cut_connections(self) -> str:
        with connect_sync(self._server.url) as client:
            return f"{client.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')} of them"

    def _freeze_the_server(self) -> str:
        return self._without_server(
            lambda: self._server.signal(signal.SIGSTOP), lambda: self._server.signal(signal.SIGCONT)
        )

    def _restart_the_server(self) -> str:
        return self._without_server(self._server.stop, self._server.start)

    def _kill_the_server(self) -> str:
        return self._without_server(lambda: self._server.stop(kill=True), self._server.start)

    def _kill_server_and_worker(self) -> str:
        member = self._someone()

        def kill() -> None:
            self._server.stop(kill=True)
            member.signal(signal.SIGKILL, KILLED)

        return f"{member.name} {self._without_server(kill, self._server.start)}"

    def _without_server(self, take: Callable[[], None], give: Callable[[], None]) -> str:
        seconds = self._lease * self._rng.uniform(*DOWN_LEASES)
        take()
        time.sleep(seconds)
        give()
        return f"for {seconds:.2f} s"
