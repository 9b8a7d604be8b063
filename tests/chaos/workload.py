"""The jobs of a run, each a pure function of the run's seed and its number, and what its client does meanwhile."""

import random
from typing import Any

from msgspec import Struct

from gllm.keys import PRIORITIES

WORDS = ("é", "ñandú", "日本語", "🙂", "👍🏽", "Ω", "שלום", "नमस्ते")  # each also is one token of the model's vocabulary
PREFIXES = tuple(f"{word} is the prefix number {i} — {word * 3}, {'shared ' * (2 * i)}" for i, word in enumerate(WORDS))
FIRST_BYTE, FIRST_WORD = 3, 259  # ids of the tokenizer: three control tokens, the 256 bytes, the words
POISON = FIRST_WORD + len(WORDS)  # an id without any text, which no case has in its prompt
VOCABULARY = POISON + 1
HOUR_SECONDS = 3600.0


class Case(Struct, frozen=True, kw_only=True):
    """One job and its client. Counts are of tokens that the client has read when it does what the name says.

    `times`: deadline and not_before, in seconds from the submission. `again`: when the same job is submitted once more
    (-1: after its end). `cancel`: when it is cancelled (0: right after the submission). `twin`: the priority with which
    it is submitted, too. `events`: how many events the client reads between two interruptions, at least and at most.
    """

    id: str
    job: dict[str, Any]
    labels: dict[str, Any]
    times: dict[str, float] = {}
    again: int | None = None
    cancel: int | None = None
    twin: str | None = None
    events: tuple[int, int] = (3, 40)


def case(seed: int, number: int) -> Case:
    """The same one for the same seed and number, in every process."""
    rng = random.Random(f"{seed}/{number}")
    return Case(
        id=f"chaos-{seed}-{number}",
        job=_text(rng) | _length(rng) | _sampling(rng) | _endings(rng) | _logprobs(rng),
        labels=_labels(rng),
        times=_times(rng),
        again=rng.choice((0, 0, 5, 40, -1)) if rng.random() < 0.3 else None,
        cancel=rng.choice((0, 1, 10, 40, 80)) if rng.random() < 0.15 else None,
        twin=rng.choice(PRIORITIES) if rng.random() < 0.1 else None,
    )


def _text(rng: random.Random) -> dict[str, Any]:
    text = rng.choice(PREFIXES) + " ".join(rng.choices((*WORDS, "plain", "words"), k=rng.randint(1, 8)))
    match rng.randrange(4):
        case 0:
            return {"messages": [{"role": "user", "content": text}]}
        case 1:
            return {"token_ids": [FIRST_BYTE + byte for byte in text.encode()] + [rng.randrange(FIRST_WORD, POISON)]}
        case _:
            return {"prompt": text}


def _length(rng: random.Random) -> dict[str, Any]:
    most = rng.randint(1, 40) if rng.random() < 0.2 else rng.randint(80, 300)
    least = {"min_tokens": rng.randint(0, most)} if rng.random() < 0.2 else {}
    return least if rng.random() < 0.03 else {"max_tokens": most, **least}


def _sampling(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": 0.0} if rng.random() < 0.4 else {"temperature": rng.uniform(0.5, 1.3)}
    choices: dict[str, Any] = {
        "seed": rng.randrange(2**40),
        "top_p": rng.uniform(0.5, 1.0),
        "top_k": rng.randint(2, 60),
        "min_p": rng.uniform(0.0, 0.1),
        "presence_penalty": rng.uniform(-1.0, 2.0),
        "frequency_penalty": rng.uniform(-0.5, 2.0),
        "repetition_penalty": rng.uniform(0.8, 1.4),
        "logit_bias": _multibyte_bias(rng),
    }
    return fields | {name: value for name, value in choices.items() if rng.random() < 0.4}


def _multibyte_bias(rng: random.Random) -> dict[str, float]:
    """Makes whole characters of two and more bytes likely: the text is only right if all of their bytes are."""
    liked = rng.choice(WORDS).encode()
    return {str(FIRST_BYTE + byte): rng.uniform(2.0, 5.0) for byte in liked}


def _endings(rng: random.Random) -> dict[str, Any]:
    stops = ["a", "é", "語", "\U0001f642", "zz", "\n\n", "ñandú", "<|im_end|>"]
    choices: dict[str, Any] = {
        "stop": rng.sample(stops, rng.randint(1, 4)),
        "stop_token_ids": rng.sample(range(FIRST_BYTE, POISON), 2),
        "include_stop": True,
    }
    wanted = {name: value for name, value in choices.items() if rng.random() < 0.25}
    return wanted | {"ignore_eos": rng.random() < 0.7}


def _logprobs(rng: random.Random) -> dict[str, Any]:
    fields = {"logprobs": rng.randint(0, 3)} if rng.random() < 0.25 else {}
    return fields | ({"prompt_logprobs": rng.randint(0, 2)} if rng.random() < 0.1 else {})


def _labels(rng: random.Random) -> dict[str, Any]:
    labels: dict[str, Any] = {"priority": rng.choices(PRIORITIES, weights=(2, 6, 2))[0]}
    if rng.random() < 0.3:
        labels["tenant"] = rng.choice(("alpha", "βήτα"))
    if rng.random() < 0.3:
        labels["affinity"] = f"session-{rng.randrange(5)}"
    return labels


def _times(rng: random.Random) -> dict[str, float]:
    times = {"deadline": HOUR_SECONDS} if rng.random() < 0.2 else {}
    return times | ({"not_before": rng.uniform(0.2, 3.0)} if rng.random() < 0.1 else {})
