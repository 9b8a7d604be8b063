"""What can be known to be wrong with a configuration or a request before any work is done. No torch."""

import math
from typing import get_args

from engine.config import Device, Dtype, EngineConfig, Kernels, Quantize
from engine.request import MAX_LOGPROBS, MAX_SEED, Request, SamplingParams
from engine.wire import EngineInfo

SWITCHES = ("deterministic", "overlap", "graphs")  # settings of an engine that are auto, on or off
MAX_FLOAT32 = 3.4028234663852886e38  # a larger bias is infinite on the device; gllm.validate says the same


class TooLargeError(ValueError):
    """The request cannot fit, however long it waits."""


def validate_config(config: EngineConfig) -> None:
    """Raises ValueError naming field and value. What depends on the model (max_model_len) is checked with it."""
    for name in ("block_size", "max_sequences"):
        _check_whole(name, getattr(config, name), 1, None, optional=False)
    for name in ("max_step_tokens", "kv_blocks", "kv_memory", "threads"):
        _check_whole(name, getattr(config, name), 1, None)
    if config.gpu_memory is not None:
        _check_range("gpu_memory", config.gpu_memory, 0.0, math.inf, open_low=True, open_high=True)
    _check_whole("seed", config.seed, 0, MAX_SEED, optional=False)
    choices = {
        "device": get_args(Device),
        "dtype": get_args(Dtype),
        "kernels": get_args(Kernels),
        "quantize": get_args(Quantize),
        **dict.fromkeys(SWITCHES, ("auto", True, False)),
    }
    for name, values in choices.items():
        if getattr(config, name) not in values:
            raise ValueError(f"{name}: one of {', '.join(map(str, values))} expected, got {getattr(config, name)!r}")


def validate_request(request: Request, info: EngineInfo) -> int:
    """The total length at which the request must end. Raises ValueError naming field and value."""
    if not request.tokens:
        raise ValueError("tokens: at least one token expected, got none")
    if request.adapter is not None:
        raise ValueError(f"adapter: adapters are not supported, got {request.adapter!r}")
    for name in ("cache_salt", "tenant"):
        if getattr(request, name) == "":
            raise ValueError(f"{name}: must not be empty")
    _check_ids("tokens", request.tokens, info.vocab_size)
    _check_ids("output", request.output, info.vocab_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, info.vocab_size)
    _check_ids("logit_bias", list(request.sampling.logit_bias), info.vocab_size)
    validate_sampling(request.sampling)
    return _limit(request, info)


def validate_sampling(sampling: SamplingParams) -> None:
    """Ranges of the protocol page. Raises ValueError naming field and value; NaN is in no range."""
    _check_whole("max_tokens", sampling.max_tokens, 0, None)
    _check_whole("min_tokens", sampling.min_tokens, 0, None, optional=False)
    _check_whole("top_k", sampling.top_k, -1, None, optional=False)
    _check_whole("seed", sampling.seed, 0, MAX_SEED)
    _check_whole("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    _check_whole("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_range("temperature", sampling.temperature, 0.0, math.inf, open_high=True)
    _check_range("top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, open_low=True, open_high=True)
    for token, bias in sampling.logit_bias.items():
        _check_range(f"logit_bias[{token}]", bias, -MAX_FLOAT32, MAX_FLOAT32)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise ValueError(f"min_tokens: {sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}")


def longest_length(request: Request, info: EngineInfo) -> int:
    """To how many positions a request may grow by its own terms and the model's, whatever the pool holds."""
    most = request.sampling.max_tokens
    return info.max_model_len if most is None else min(info.max_model_len, len(request.tokens) + most)


def _limit(request: Request, info: EngineInfo) -> int:
    prompt, output, sampling = len(request.tokens), len(request.output), request.sampling
    if prompt >= info.max_model_len:
        raise TooLargeError(f"tokens: {prompt} prompt tokens, but the model's limit is {info.max_model_len} in all")
    most = longest_length(request, info)
    needed = prompt + output if sampling.max_tokens is None else most
    if -(-needed // info.block_size) > info.kv_blocks:
        what = "tokens" if sampling.max_tokens is None else f"tokens and max_tokens={sampling.max_tokens}"
        raise TooLargeError(f"{what}: {needed} positions in all, but the KV pool holds {info.capacity_tokens}")
    limit = min(most, info.capacity_tokens + 1) if sampling.max_tokens is None else most
    if prompt + output >= limit and (output or limit > prompt):
        raise ValueError(
            f"output: nothing is left to sample after {output} tokens (the reply ends at {limit - prompt})"
        )
    return limit


def _check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
    if type(wrong) is not int:
        raise ValueError(f"{name}: whole numbers expected, got {wrong!r}")
    raise ValueError(f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}")


def _check_whole(name: str, value: int | None, low: int, high: int | None, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: a whole number {allowed} expected, got {value!r}")


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not ((low < value if open_low else low <= value) and (value < high if open_high else value <= high))
    ):
        raise ValueError(f"{name}: from {low} to {high} expected, got {value!r}")
