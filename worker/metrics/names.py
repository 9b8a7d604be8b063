"""The names of what is shown: label values, buckets, and which of the engine's numbers has which name.

Labels are the values here and OTHER, never a word from a job: each new value would be a series that nobody deletes.
"""

from typing import NamedTuple

# One set for all that a client waits for; the last ones lie beyond the 300 s that a long reply on a CPU needs.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)  # a loop late by more is broken

OTHER = "other"
FINISH_REASONS = ("stop", "length", "cancelled", "deadline")
ERROR_CODES = ("invalid", "unsupported", "too_large", "max_attempts", "internal")
TAKEOVERS = ("redelivered", "resumed", "released", "duplicate", "dead_letter")
REPAIRS = ("fenced", "repaired", "paused", "group_lost", "entry_lost", "unowned", "reconnected", "consumer_reaped")
REDIS_ERRORS = ("transient", "group_lost", "fenced", "fatal")
# `unwritten`: the stream `dead` would not take it, so it is in the log only.
DEAD_LETTERS = ("malformed", "too_large", "max_attempts", "broken_key", "unpublishable", "unwritten")
WORKER_STATES = ("starting", "ready", "draining", "failed")
# find: the model's files and tokenizer; import and model: in the engine's process; redis: until the queue was joined,
# beside those two; total: from the process' start to the first claim.
STARTUP_PHASES = ("find", "import", "model", "redis", "total")


class Total(NamedTuple):
    """A counter of the engine: its name without gllm_ and _total, and the field of Stats."""

    name: str
    field: str
    text: str


class States(NamedTuple):
    """Gauges of the engine under one name without gllm_: the values of the label `state` and the fields of Stats."""

    name: str
    fields: dict[str, str]
    text: str


ENGINE_TOTALS = (
    Total("prefix_cache_hit_tokens", "prefix_hit_tokens", "Prompt tokens served from the prefix cache, at admission"),
    Total("prefix_cache_prompt_tokens", "prefix_prompt_tokens", "Prompt tokens of admitted requests"),
    Total("prefix_cache_evictions", "prefix_evictions", "Registered KV blocks whose content was given up"),
    Total("prompt_tokens", "prompt_tokens", "Prompt tokens really computed at first admission"),
    Total("generation_tokens", "generation_tokens", "Tokens sampled"),
    Total("preemptions", "preemptions", "Sequences that lost their KV blocks to an older one"),
    Total("preempted_tokens", "preempted_tokens", "Computed tokens thrown away by preemption"),
    Total("recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption"),
    Total("resumed_tokens", "resumed_tokens", "Tokens computed again for jobs taken over from another worker"),
    Total("engine_steps", "steps", "Engine steps that ended"),
)
# Positions computed, by what they were for: the sum over both kinds is all that went through the model.
STEP_TOKENS = {"prefill": ("prompt_tokens", "recomputed_tokens", "resumed_tokens"), "decode": ("decode_tokens",)}
BLOCKS = {"live": "blocks_live", "reclaimable": "blocks_reclaimable", "free": "blocks_free"}
ENGINE_STATES = (
    States("prefix_cache_blocks", BLOCKS, "KV blocks by place; the three sum to the pool"),
    States("sequences", {"running": "running", "waiting": "waiting"}, "Sequences in the engine"),
)
ENGINE_LABELS = ("model", "device", "device_name", "dtype", "deterministic", "numerics")
BUILD_LABELS = ("version", "python", "torch")
