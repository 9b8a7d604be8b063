"""The one check of a job's body, for producers (before they submit) and for workers (before they believe).

A refusal is an `InvalidJob` whose message names the field and the value, shortened: it travels to the client as it is.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import msgspec

from gllm.protocol import MAX_BODY_BYTES, InvalidJob, Job, encode_job

MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_FLOAT32 = 3.4028234663852886e38  # a larger bias is infinite on the device
MAX_METADATA_BYTES = 4096
SHOWN_CHARACTERS = 64

_MSGPACK_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))  # no JSON text begins with one of these bytes
_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling per id, so that no two keys mean the same token
_AT_PATH = re.compile(r" - at `(?:key` in `)?\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_NAMES = frozenset(Job.__struct_fields__)
_FLOAT_FIELDS = tuple(info.name for info in msgspec.structs.fields(Job) if isinstance(info.default, float))


def decode_job(body: bytes, defaults: Mapping[str, Any] = MappingProxyType({})) -> Job:
    """The job that a body holds, JSON or MessagePack (the first byte tells). Raises InvalidJob.

    `defaults` stand in for fields that the body has not.
    """
    fields = _parse(body)
    if defaults and isinstance(fields, dict):
        return _validated({**defaults, **cast(dict[str, Any], fields)})
    return _validated(fields)


def job_from(**fields: Any) -> Job:
    """A job from keyword arguments, under the checks of `decode_job`. Raises InvalidJob."""
    try:
        return _validated(msgspec.to_builtins(fields, builtin_types=(bytes, bytearray, memoryview)))
    except TypeError as error:
        raise InvalidJob(f"body: {error}, got {shown(fields)}") from None


def encoded(job: Job) -> bytes:
    """The body of a job, checked again (a Job built by hand was never checked). Raises InvalidJob."""
    checked = job_from(**msgspec.structs.asdict(job))
    try:
        body = encode_job(checked)
    except ValueError as error:  # a lone surrogate is no text
        raise InvalidJob(f"body: {error}, got {shown(msgspec.structs.asdict(job))}") from None
    if len(body) > MAX_BODY_BYTES:
        raise InvalidJob(f"body: at most {MAX_BODY_BYTES} bytes expected, got {len(body)}")
    return body


def shown(value: object) -> str:
    """A value as JSON would write it, on one line, at most 64 characters of it."""
    try:
        text = repr(value) if isinstance(value, float) else msgspec.json.encode(value, enc_hook=repr).decode()
    except (ValueError, TypeError, RecursionError):  # lone surrogates, keys that are no text: JSON cannot say them
        text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _parse(body: bytes) -> object:
    packed = body[:1] != b"" and body[0] in _MSGPACK_MAPS
    try:
        return msgspec.msgpack.decode(body) if packed else msgspec.json.decode(body)
    except RecursionError:
        raise InvalidJob(f"body: nested too deeply, got {_shown_bytes(body)}") from None
    except ValueError as error:
        if not packed:
            _name_bad_number(body)
        raise InvalidJob(f"body: {error}, got {_shown_bytes(body)}") from None


def _shown_bytes(body: bytes) -> str:
    text = ascii(body[: SHOWN_CHARACTERS + 1])
    return text if len(body) <= SHOWN_CHARACTERS else text + "…"


def _name_bad_number(body: bytes) -> None:
    """NaN and 1e999 are no JSON, but producers write them: Python's reader takes them, so the field can be named."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    _validated(fields)


def _validated(fields: object) -> Job:
    try:
        job = msgspec.convert(_with_known_names(fields), Job)
        for check in _CHECKS:
            check(job)
    except msgspec.ValidationError as error:
        raise InvalidJob(_explained(fields, str(error))) from None
    except RecursionError:
        raise InvalidJob(f"body: nested too deeply, got {shown(fields)}") from None
    return job


def _explained(fields: object, error: str) -> str:
    """msgspec's message names the path but not the value: look the value up."""
    at = _AT_PATH.search(error)
    path = at["path"] if at else ""
    reason = error[: at.start()] if at else error
    return f"{path.lstrip('.') or 'body'}: {_lowered(reason)} (got {shown(_value_at(fields, path))})"


def _lowered(reason: str) -> str:
    return reason[:1].lower() + reason[1:]


def _value_at(fields: object, path: str) -> object:
    value: Any = fields
    for name, index in _STEP.findall(path.partition("[...]")[0]):
        value = value[name] if name else value[int(index)]
    return value


def _with_known_names(fields: object) -> object:
    """Unknown names and biases are checked here, because msgspec does not say which key of a dict was at fault."""
    if not isinstance(fields, dict):
        return fields
    body = cast(dict[object, object], fields)
    for name in body.keys() - _NAMES:
        spelled = shown(name).strip('"')
        raise InvalidJob(f"{spelled}: unknown field, got {shown(body[name])}")
    bias = body.get("logit_bias")
    if not isinstance(bias, dict):
        return body
    return {**body, "logit_bias": dict(map(_bias, cast(dict[object, object], bias).items()))}


def _bias(item: tuple[object, object]) -> tuple[str, float]:
    key, value = item
    name = str(key) if type(key) is int else key
    if not isinstance(name, str) or not _TOKEN_KEY.fullmatch(name) or int(name) > MAX_TOKEN_ID:
        raise InvalidJob(f"logit_bias: a token id from 0 to {MAX_TOKEN_ID} expected as key, got {shown(key)}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_FLOAT32:
        raise InvalidJob(f"logit_bias[{name}]: a finite 32-bit float expected, got {shown(value)}")
    return name, float(value)


def _check_source(job: Job) -> None:
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(job, name) is not None]
    if len(given) != 1:
        raise InvalidJob(f"prompt, messages, token_ids: exactly one expected, got {' and '.join(given) or 'none'}")
    value = getattr(job, given[0])
    if len(value) == 0:
        raise InvalidJob(f"{given[0]}: must not be empty, got {shown(value)}")


def _check_messages(job: Job) -> None:
    for index, message in enumerate(job.messages or ()):
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                got = shown(message[name]) if name in message else "nothing"
                raise InvalidJob(f"messages[{index}].{name}: a string expected, got {got}")


def _check_numbers(job: Job) -> None:
    for name in _FLOAT_FIELDS:
        if not math.isfinite(getattr(job, name)):
            raise InvalidJob(f"{name}: a finite number expected, got {getattr(job, name)}")
    if job.seed is not None and job.seed > MAX_SEED:
        raise InvalidJob(f"seed: at most {MAX_SEED} expected, got {shown(job.seed)}")
    if job.max_tokens is not None and job.min_tokens > job.max_tokens:
        raise InvalidJob(f"min_tokens: at most max_tokens ({job.max_tokens}) expected, got {job.min_tokens}")


def _check_metadata(job: Job) -> None:
    if job.metadata is None:
        return
    try:
        size = len(msgspec.json.encode(job.metadata))
    except (TypeError, ValueError) as error:
        raise InvalidJob(f"metadata: {error}, got {shown(job.metadata)}") from None
    if size > MAX_METADATA_BYTES:
        raise InvalidJob(f"metadata: at most {MAX_METADATA_BYTES} bytes expected, got {size}: {shown(job.metadata)}")


_CHECKS: tuple[Callable[[Job], None], ...] = (_check_source, _check_messages, _check_numbers, _check_metadata)
