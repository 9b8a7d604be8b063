"""What stands beside a job's body in its entry, checked: id, priority, labels, times. InvalidJob names the field."""

from datetime import datetime, timedelta
from typing import Any

from gllm.keys import JOB_ID, PRIORITIES
from gllm.protocol import InvalidJob, Job
from gllm.validate import job_from, shown

MAX_LABEL_CHARACTERS = 256

When = int | datetime | timedelta


def one_job(job: Job | None, fields: dict[str, Any]) -> Job:
    """The job that was given whole, or as its fields."""
    if job is None:
        return job_from(**fields)
    if not isinstance(job, Job):  # pyright: ignore[reportUnnecessaryIsInstance]: a bare prompt is easily passed
        raise InvalidJob(f"job: a Job or fields like prompt=… expected, got {shown(job)}")
    if fields:
        raise InvalidJob(f"{next(iter(fields))}: give a Job or its fields, not both")
    return job


def checked_id(job_id: str) -> str:
    if type(job_id) is not str or not JOB_ID.fullmatch(job_id):  # a number is easily passed
        raise InvalidJob(f"id: 1 to 128 characters of [A-Za-z0-9._:-] expected, got {shown(job_id)}")
    return job_id


def checked_priority(priority: str) -> str:
    if priority not in PRIORITIES:
        raise InvalidJob(f"priority: one of {', '.join(PRIORITIES)} expected, got {shown(priority)}")
    return priority


def checked_labels(**labels: str | None) -> dict[str, str]:
    """Those that were given."""
    given = {name: value for name, value in labels.items() if value is not None}
    for name, value in given.items():
        if type(value) is not str or not 1 <= len(value) <= MAX_LABEL_CHARACTERS or not value.isprintable():
            raise InvalidJob(f"{name}: 1 to {MAX_LABEL_CHARACTERS} printable characters expected, got {shown(value)}")
    return given


def checked_times(**times: When | None) -> dict[str, int | timedelta]:
    """Those that were given, in Unix milliseconds; a timedelta stays one until Redis has told what time it is."""
    return {name: _milliseconds(name, when) for name, when in times.items() if when is not None}


def _milliseconds(name: str, when: When) -> int | timedelta:
    if isinstance(when, timedelta):
        return when
    if isinstance(when, datetime) and when.tzinfo is not None:
        return int(when.timestamp() * 1000)
    if type(when) is int and when >= 0:
        return when
    raise InvalidJob(f"{name}: Unix milliseconds, an aware datetime or a timedelta expected, got {when!r}")
