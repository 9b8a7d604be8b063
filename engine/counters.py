"""What an engine has done so far: plain totals, only ever added to. No torch."""

from msgspec import Struct

from engine.plan import Entry
from engine.sequence import Sequence


class Counters(Struct):
    """Tokens and events since the engine's start. Names and meanings are those of docs/operations.md."""

    prefix_hit_tokens: int = 0
    prefix_prompt_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    recomputed_tokens: int = 0
    resumed_tokens: int = 0
    decode_tokens: int = 0

    def admitted(self, sequence: Sequence) -> None:
        """Hits are counted once, at the first admission; resumes and recomputes never inflate the hit rate."""
        if sequence.cached_first is not None:
            return
        sequence.cached_first = min(sequence.cached, sequence.prompt_length)
        sequence.done = sequence.cached
        if not sequence.request.output:
            self.prefix_hit_tokens += sequence.cached
            self.prefix_prompt_tokens += sequence.prompt_length

    def computed(self, sequence: Sequence, entry: Entry) -> None:
        """A position that came with the request counts once as new; any that is run again counts as recomputed.

        What is left are fed tokens of the reply, so that the four kinds add up to all positions that were computed.
        """
        end, brought = entry.start + entry.count, sequence.prompt_length + len(sequence.request.output)
        fresh = max(0, min(end, brought) - max(entry.start, sequence.done))
        if sequence.request.output:
            self.resumed_tokens += fresh
        else:
            self.prompt_tokens += fresh
        again = max(0, min(end, sequence.done) - entry.start)
        self.recomputed_tokens += again
        self.decode_tokens += entry.count - fresh - again
        sequence.done = max(sequence.done, end)

    def preempted(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.preempted_tokens += sequence.kv
