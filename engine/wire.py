"""The frames between the worker and the engine's process: a 4-byte big-endian length, then MessagePack."""

from msgspec import Struct, msgpack

from engine.config import EngineConfig
from engine.request import Delta, Request, Stats


class Begin(Struct, frozen=True, tag=True):
    """The first frame: what to load."""

    config: EngineConfig


class Add(Struct, frozen=True, tag=True):
    request: Request


class Cancel(Struct, frozen=True, tag=True):
    id: str


class Hold(Struct, frozen=True, tag=True):
    """Stop stepping a sequence (its client's tokens cannot be published now); it keeps its place and its KV."""

    id: str


class Unhold(Struct, frozen=True, tag=True):
    id: str


class ClearCache(Struct, frozen=True, tag=True):
    pass


class Stop(Struct, frozen=True, tag=True):
    """Leave after the step in flight."""


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What the loaded engine is. `capacity_tokens` = usable KV blocks x block size.

    `device_name` is the maker's name of the processor; `weight_bytes` and `kv_bytes` are what it holds on the device;
    `kernels` says who computes, and why plain torch where faster kernels are missing.
    """

    model: str
    numerics: str
    device: str
    dtype: str
    deterministic: bool
    vocab_size: int
    max_model_len: int
    block_size: int
    kv_blocks: int
    capacity_tokens: int
    max_sequences: int
    eos_token_ids: list[int]
    device_name: str = ""
    weight_bytes: int = 0
    kv_bytes: int = 0
    kernels: str = ""


class Loading(Struct, frozen=True, tag=True):
    """A phase of the start has ended: its name and how many seconds it took."""

    phase: str
    seconds: float


class Ready(Struct, frozen=True, tag=True):
    info: EngineInfo


class Launching(Struct, frozen=True, tag=True):
    """The requests of the steps from here on; sent when they change, so the parent knows whom a crash may blame."""

    ids: list[str]


class Compiling(Struct, frozen=True, tag=True):
    """The engine compiles or captures `what` from here on, which may take minutes: over with the next report of a step.

    The parent bears with a step that says so for longer than with one that is merely silent.
    """

    what: str


class Stepped(Struct, frozen=True, tag=True):
    """What one step brought, and the counters after it. Refusals of `Add`, and idle snapshots, come the same way."""

    deltas: list[Delta]
    stats: Stats


class Failed(Struct, frozen=True, tag=True):
    """The engine cannot go on (or could not start); the process ends after this frame.

    `in_flight` names the requests of the step that failed. `refused`: the settings or the model are at fault.
    """

    message: str
    in_flight: list[str]
    refused: bool = False


Command = Begin | Add | Cancel | Hold | Unhold | ClearCache | Stop
Report = Loading | Ready | Launching | Compiling | Stepped | Failed

HEADER_BYTES = 4
_encoder = msgpack.Encoder()


def encode_frame(message: Command | Report) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


command_decoder = msgpack.Decoder(Command)
report_decoder = msgpack.Decoder(Report)
