"""gllm for producers: submit generation jobs to a queue in Redis and read the tokens back as they are written.

    async with gllm.Client("redis://localhost:6379/0") as client:
        job = await client.submit(prompt="Once upon a time", max_tokens=64)
        async for reply in client.stream(job):
            print(reply.text, end="")

Names load what they need on first use, so that `import gllm` itself costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gllm.client import Client, NotReplicated, QueueFull
    from gllm.keys import Keys
    from gllm.protocol import Done, Error, InvalidJob, Job, Message, Resume, Start, Timings, TokenLogprob, Tokens, Usage
    from gllm.reply import Hole, JobFailed, Reply, ReplyError, ReplyExpired, Result, Rewound
    from gllm.sync import SyncClient
    from gllm.validate import job_from

__all__ = [
    "Client",
    "Done",
    "Error",
    "Hole",
    "InvalidJob",
    "Job",
    "JobFailed",
    "Keys",
    "Message",
    "NotReplicated",
    "QueueFull",
    "Reply",
    "ReplyError",
    "ReplyExpired",
    "Result",
    "Resume",
    "Rewound",
    "Start",
    "SyncClient",
    "Timings",
    "TokenLogprob",
    "Tokens",
    "Usage",
    "job_from",
]

_HOMES = {
    "client": ("Client", "NotReplicated", "QueueFull"),
    "keys": ("Keys",),
    "protocol": (
        *("Done", "Error", "InvalidJob", "Job", "Message"),
        *("Resume", "Start", "Timings", "TokenLogprob", "Tokens", "Usage"),
    ),
    "reply": ("Hole", "JobFailed", "Reply", "ReplyError", "ReplyExpired", "Result", "Rewound"),
    "sync": ("SyncClient",),
    "validate": ("job_from",),
}
_HOME_OF = {name: f"gllm.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gllm' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
