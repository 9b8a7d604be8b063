"""What can be known of a queue, as structs: rows for tables, and JSON for programs as they are.

Durations end in `_ms`. Ages are differences of two readings of the server's clock. `None` means: not known, or not so.
Texts are whatever somebody wrote into Redis; who shows them to a person makes them visible (worker.terminal).
"""

from typing import Literal

from msgspec import Struct

from gllm.protocol import Done, Error, ReplyEvent, Resume, Start

JobState = Literal[
    "running",  # a worker that is alive holds it
    "orphaned",  # its worker is silent; another one will take it over
    "released",  # handed back, waits to be taken up
    "waiting",
    "delayed",
    "duplicate",  # a second entry of an id, which a claim drops unless the first was lost
    "ended",
    "unknown",  # a reply or a dead letter is all that is left of it
]
WorkerState = Literal[
    "alive",
    "silent",  # no heartbeat for a lease
    "gone",  # no heartbeat at all, but jobs are still in its name
]


class StreamView(Struct, frozen=True, kw_only=True):
    """One job stream. `held`: pending entries by consumer. `lag` is None where the server has lost count."""

    name: str
    entries: int
    waiting: int
    lag: int | None
    last_id: str
    oldest_ms: int | None
    problem: str | None
    held: dict[str, int]

    @property
    def priority(self) -> str:
        return self.name.split(":")[1]


class Survey(Struct, frozen=True, kw_only=True):
    """The whole queue at one moment. Version, shards and model are what `meta` says, whatever that is."""

    now_ms: int
    version: str
    shards: str
    model: str
    quiet_until_ms: int
    delayed: int
    due_ms: int | None
    dead: int
    workers: int
    streams: list[StreamView]


class PriorityView(Struct, frozen=True, kw_only=True):
    """Jobs of one priority: `waiting` for anybody, `held` by workers. `oldest_ms`: age of the oldest that waits."""

    priority: str
    waiting: int
    held: int
    lag: int | None
    oldest_ms: int | None


class QueueView(Struct, frozen=True, kw_only=True):
    """What `gllm queue` shows. `due_in_ms` is negative for a delayed job that is overdue."""

    queue: str
    priorities: list[PriorityView]
    delayed: int
    due_in_ms: int | None
    dead: int
    workers_alive: int
    workers_silent: int
    problems: list[str]


class EngineView(Struct, frozen=True, kw_only=True):
    """What a worker's engine said with its last heartbeat. Totals since its start: tokens sampled, prompt tokens
    computed, and of the prompt tokens admitted those that the prefix cache had. Then what is now; `blocks` are of KV.
    """

    generation_tokens: int
    prompt_tokens: int
    prefix_hit_tokens: int
    prefix_prompt_tokens: int
    running: int
    waiting: int
    blocks_live: int
    blocks: int
    vocabulary: int
    context: int


class WorkerRow(Struct, frozen=True, kw_only=True):
    """One worker. `jobs`: entries in its name; `up_ms`: since its first heartbeat; `heartbeat_ms`: since its last."""

    name: str
    state: WorkerState
    jobs: int
    heartbeat_ms: int | None = None
    up_ms: int | None = None
    lease_ms: int | None = None
    host: str | None = None
    pid: str | None = None
    device: str | None = None
    capacity: str | None = None
    trial: str | None = None
    numerics: str | None = None
    version: str | None = None
    engine: EngineView | None = None


class JobRow(Struct, frozen=True, kw_only=True):
    """One unfinished job. `attempts`: workers that died with it; `age_ms`: since it was submitted, or was due."""

    id: str
    state: JobState
    priority: str
    stream: str
    entry: str
    age_ms: int
    tokens: int
    attempts: int
    claims: int
    cancelling: bool
    worker: str | None = None
    idle_ms: int | None = None
    due_in_ms: int | None = None
    body_bytes: int | None = None
    labels: dict[str, str] = {}


class JobList(Struct, frozen=True, kw_only=True):
    """The first jobs, and how many there are of each kind. Of those that are `held`, some are `orphaned`."""

    jobs: list[JobRow]
    held: int
    orphaned: int
    released: int
    waiting: int
    delayed: int

    @property
    def hidden(self) -> int:
        return max(0, self.held + self.released + self.waiting + self.delayed - len(self.jobs))


class Record(Struct, frozen=True, kw_only=True):
    """The hash `job:<id>`. `life_ms`: how long Redis still keeps it."""

    state: str | None
    entry: str | None
    worker: str | None
    epoch: int
    attempts: int
    claims: int
    tokens: int
    cached_tokens: int | None
    life_ms: int | None


class Holder(Struct, frozen=True, kw_only=True):
    """Who an entry is pending for. `idle_ms`: since it was claimed or renewed."""

    consumer: str
    idle_ms: int
    alive: bool


class Place(Struct, frozen=True, kw_only=True):
    """Where a waiting job stands in its stream. `ahead` is None when that is further than was looked."""

    stream: str
    ahead: int | None
    waiting: int


class EventRow(Struct, frozen=True, kw_only=True):
    """One entry of a reply stream; `raw` is what stands there when it is no event of this protocol."""

    entry: str
    event: ReplyEvent | None = None
    raw: str | None = None


class ReplyView(Struct, frozen=True, kw_only=True):
    """A reply as far as it is written. `problem`: why a client could not read all of it."""

    entries: int
    life_ms: int | None
    tokens: int
    characters: int
    text: str
    events: list[EventRow]
    problem: str | None

    @property
    def end(self) -> Done | Error | None:
        """Its terminal event, which comes last."""
        last = self.events[-1].event if self.events else None
        return last if isinstance(last, Done | Error) else None

    @property
    def marks(self) -> list[Start | Resume]:
        """Where workers took it up."""
        return [row.event for row in self.events if isinstance(row.event, Start | Resume)]


class Letter(Struct, frozen=True, kw_only=True):
    """A dead letter. `kept`: its body is there, so that it can be retried."""

    entry: str
    id: str
    reason: str
    error: str
    attempts: int
    worker: str
    stream: str
    age_ms: int
    kept: bool
    body_bytes: int | None
    labels: dict[str, str] = {}


class JobView(Struct, frozen=True, kw_only=True):
    """Everything that Redis knows about one id. `now_ms` is the server's clock; `labels` have times of it as text."""

    id: str
    now_ms: int
    state: JobState
    stream: str | None
    entry: str | None
    age_ms: int | None
    record: Record | None
    holder: Holder | None
    place: Place | None
    due_in_ms: int | None
    cancelling: bool
    body_bytes: int | None
    labels: dict[str, str]
    reply: ReplyView | None
    letters: list[Letter]
    problems: list[str]
