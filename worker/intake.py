"""From a decoded job to what the engine and the publisher need, or to a refusal that names field and value."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

from engine.request import Request, SamplingParams
from engine.wire import EngineInfo
from gllm.protocol import Job
from gllm.validate import shown
from worker.chat import ChatTemplate, render_chat
from worker.control import PromptError
from worker.renderer import Renderer
from worker.text import ReplyText
from worker.tokenizer import Tokenizer, TooManyTokens

PLAIN = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
LOGPROBS = ("logprobs", "prompt_logprobs")


class JobRejected(ValueError):
    """A job that this worker can never serve. `code` is one of the protocol's error codes."""

    def __init__(self, code: Literal["invalid", "unsupported", "too_large"], message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Intake:
    """Checks jobs against one model and turns them into requests. Raises ModelError for a broken chat template.

    `defaults` are the values of sampling fields that a body has not, where they are not the protocol's.
    `prepare` may take long (it tokenises) and is called in a thread; the other methods are quick.
    """

    def __init__(
        self, tokenizer: Tokenizer, info: EngineInfo, defaults: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self.defaults = defaults
        self._renderer = Renderer()
        source = tokenizer.chat_template
        self._template = None if source is None else ChatTemplate(source, self._renderer)
        self._end_ids = tokenizer.eos_ids | frozenset(info.eos_token_ids)

    def start(self) -> None:
        """Get ready for chats, which else the first of them would wait for. Returns at once."""
        if self._template is not None:
            self._renderer.start()

    def close(self) -> None:
        """End what `start` or the chats have begun."""
        self._renderer.close()

    def prepare(self, job: Job, submitted_ms: int | None = None) -> list[int]:
        """The ids of the job's prompt, checked against the model's limits. Raises JobRejected.

        `submitted_ms` is the Redis time of the job's entry: the date that a chat template may write, in UTC, so that a
        worker that takes the job over tomorrow reads the same prompt. Without it the date is now.
        """
        self._check_ids(job)
        try:
            ids = self._encode(job, submitted_ms)
        except TooManyTokens as error:
            self._check_room(job, error.count)
            raise AssertionError(f"{error.count} tokens fit") from error
        except PromptError as error:
            raise JobRejected("invalid", f"{_prompt_field(job)}: {error}") from error
        except RecursionError as error:
            raise JobRejected("invalid", f"{_prompt_field(job)}: nested too deeply") from error
        self._check_prompt(job, ids)
        self._check_room(job, len(ids))
        return ids

    def request(
        self,
        job_id: str,
        job: Job,
        prompt_ids: list[int],
        output: Sequence[int] = (),
        tenant: str | None = None,
        isolate: bool = False,
    ) -> Request:
        """What the engine gets. `output`: tokens that an earlier worker published."""
        values = {name: getattr(job, name) for name in (*PLAIN, *PENALTIES, *LOGPROBS)}
        sampling = SamplingParams(**values, logit_bias={int(key): bias for key, bias in job.logit_bias.items()})
        return Request(
            id=job_id,
            tokens=prompt_ids,
            output=list(output),
            sampling=sampling,
            cache_salt=job.cache_salt,
            tenant=tenant,
            isolate=isolate,
        )

    def reply_text(self, job: Job, prompt_ids: Sequence[int]) -> ReplyText:
        """The text of the job's reply, from its first token on."""
        limit, pool = self.info.max_model_len, self.info.capacity_tokens
        total = (
            limit if job.max_tokens is not None else min(limit, pool + 1)
        )  # the last token needs no place in the pool
        return ReplyText(
            self.tokenizer,
            prompt_ids,
            stops=[job.stop] if isinstance(job.stop, str) else list(job.stop),
            include_stop=job.include_stop,
            end_ids=frozenset() if job.ignore_eos else self._end_ids,
            stop_ids=frozenset(job.stop_token_ids),
            min_tokens=job.min_tokens,
            max_tokens=job.max_tokens,
            room=total - len(prompt_ids),
        )

    def _encode(self, job: Job, submitted_ms: int | None) -> list[int]:
        if job.token_ids is not None:
            return list(job.token_ids)
        if job.prompt is not None:
            self._check_room(job, self.tokenizer.fewest(job.prompt), "at least ")
            return self.tokenizer.encode(job.prompt, parse_special=job.parse_special, at_most=self.info.max_model_len)
        text, hidden = self._rendered(job, submitted_ms)
        if not hidden:  # else placeholders are longer than what they stand for
            self._check_room(job, self.tokenizer.fewest(text), "at least ")
        return self.tokenizer.encode_guarded(text, hidden, at_most=self.info.max_model_len)

    def _rendered(self, job: Job, submitted_ms: int | None) -> tuple[str, dict[str, str]]:
        if self._template is None:
            raise JobRejected("unsupported", f"messages: the model has no chat template{self._other_templates()}")
        now = datetime.now(UTC) if submitted_ms is None else datetime.fromtimestamp(submitted_ms / 1000, UTC)
        return render_chat(self.tokenizer, self._template, job.messages or [], now)

    def _other_templates(self) -> str:
        names = ", ".join(sorted(self.tokenizer.chat_templates))
        return f" named default, only {names}" if names else ""

    def _check_ids(self, job: Job) -> None:
        self._check_vocabulary("token_ids", job.token_ids or ())
        self._check_vocabulary("stop_token_ids", job.stop_token_ids)
        self._check_vocabulary("logit_bias", map(int, job.logit_bias))

    def _check_vocabulary(self, field: str, ids: Iterable[int]) -> None:
        size = self.info.vocab_size
        outside = next((token for token in ids if not 0 <= token < size), None)
        if outside is not None:
            raise JobRejected("invalid", f"{field}: {outside} is outside the model's vocabulary of {size}")

    def _check_prompt(self, job: Job, ids: Sequence[int]) -> None:
        field = _prompt_field(job)
        if not ids:
            raise JobRejected("invalid", f"{field}: no tokens in {shown(getattr(job, field))}")
        if self.tokenizer.vocab_size > self.info.vocab_size and max(ids) >= self.info.vocab_size:
            content = self.tokenizer.content(max(ids))
            self._check_vocabulary(f"{field}: {content!r}", [max(ids)])

    def _check_room(self, job: Job, prompt: int, about: str = "") -> None:
        """The engine's arithmetic: the prompt is below the model's limit, and with the reply it fits the pool."""
        field, limit, pool = _prompt_field(job), self.info.max_model_len, self.info.capacity_tokens
        if prompt >= limit:
            raise JobRejected(
                "too_large", f"{field}: {about}{prompt} tokens, the model's limit is {limit} with the reply"
            )
        need = min(prompt + (job.max_tokens or 0), limit)
        if need > pool:
            raise JobRejected("too_large", f"{field}: {about}{need} tokens with the reply, the KV cache holds {pool}")


def _prompt_field(job: Job) -> Literal["prompt", "messages", "token_ids"]:
    if job.prompt is not None:
        return "prompt"
    return "messages" if job.messages is not None else "token_ids"
