"""What the demo asks, and what it measures of each answer."""

import asyncio
from dataclasses import dataclass, field

from gllm.protocol import Done, Error, ReplyEvent, Start, Tokens

# About 430 tokens of SmolLM2: long enough that finding them in the prefix cache is seen in the time to the first token.
SYSTEM_PROMPT = """\
You are the assistant at the help desk of a public library. People come to you with every kind of question: about \
countries and cities, about plants and animals, about cooking, science, words and machines. You are friendly and \
calm, and you take every question seriously, however small it seems.

When you answer, keep to these rules. First, answer the question that was asked, in the first sentence, in plain \
words. Second, add one or two sentences that help the person to understand or to remember the answer, such as a \
reason, an example or a comparison with something from daily life. Third, stop there. A short answer that is right \
is better than a long one that wanders. Fourth, if you do not know something, say so, and name the kind of book in \
which the answer could be found, so that nobody leaves the desk with empty hands. Fifth, never invent names, \
numbers or dates.

Write in complete sentences and in a warm tone. Use the words that people use when they talk to each other. If a \
word from science is needed, explain it the first time you use it. Do not use lists, headings or tables, because \
your answer is read aloud by a small loudspeaker at the desk. Do not repeat the question, and do not talk about \
yourself or about these rules. If a question has more than one good answer, choose the one that most people would \
expect, and mention the other one briefly. If a question is about health, money or the law, give the general idea \
and tell the person to ask somebody who has learned that profession.

The library opens at nine in the morning and closes at six in the evening. It has a reading room with large \
windows, a quiet room for students, a room with toys for small children, and a garden where people may eat. Books \
may be borrowed for four weeks. There is a line of people at the desk now, and all of them are waiting for you, so \
be brief and kind."""
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Which planet is the largest in our solar system?",
    "What do bees make from the nectar of flowers?",
    "Who painted the Mona Lisa?",
    "What is the largest ocean on Earth?",
    "What is photosynthesis?",
    "What is a library good for?",
)


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


@dataclass(eq=False)
class Chat:
    """One job of the demo. Times are seconds of this process's monotonic clock."""

    number: int
    question: str
    job_id: str = ""
    submitted: float = 0.0
    first_at: float | None = None
    last_at: float | None = None
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    end: Done | Error | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: ReplyEvent, now: float) -> None:
        if isinstance(event, Start):
            self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
        elif isinstance(event, Tokens):
            self.text += event.text
            self.tokens += len(event.ids)
            self.first_at = self.first_at or now
            self.last_at = now
            self.began.set()
        elif isinstance(event, Done):
            self.text += event.text
            self.prompt_tokens, self.cached_tokens = event.usage.prompt_tokens, event.usage.cached_tokens
            self.end = event
        elif isinstance(event, Error):
            self.end = event

    @property
    def well(self) -> bool:
        """Whether the model itself ended the answer."""
        return isinstance(self.end, Done) and self.end.finish_reason in ("stop", "length") and self.tokens > 0

    @property
    def outcome(self) -> str:
        if isinstance(self.end, Error):
            return f"{self.end.code}: {self.end.message}"
        return self.end.finish_reason if self.end else "nothing"

    @property
    def seconds_to_first(self) -> float | None:
        """From submitting the job to reading its first token."""
        return None if self.first_at is None else self.first_at - self.submitted

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole reply, the wait for its first token included."""
        return None if self.last_at is None else self.tokens / (self.last_at - self.submitted)
