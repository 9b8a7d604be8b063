"""What a worker counts, and how Prometheus reads it. Nothing here raises into the caller: metrics never stop a job."""

from worker.metrics.clock import JobClock
from worker.metrics.names import BUCKETS, DEAD_LETTERS, ERROR_CODES, FINISH_REASONS, REDIS_ERRORS, REPAIRS, TAKEOVERS
from worker.metrics.page import Metrics
from worker.metrics.worker import LeaseTime

__all__ = [
    "BUCKETS",
    "DEAD_LETTERS",
    "ERROR_CODES",
    "FINISH_REASONS",
    "REDIS_ERRORS",
    "REPAIRS",
    "TAKEOVERS",
    "JobClock",
    "LeaseTime",
    "Metrics",
]
