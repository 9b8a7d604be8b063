"""Which tokens the next step computes, and what a finished step means. No torch.

There are no phases: `computed` chases `length`. A prefill, a chunk of one, a decode and a recompute after preemption
are all "the next `count` positions of this sequence".
"""

from collections import deque
from collections.abc import Iterator

from engine.blocks import BlockPool
from engine.counters import Counters
from engine.plan import Entry, Plan, Sampled
from engine.request import Delta, FinishReason, TokenLogprob
from engine.sequence import Sequence


class Scheduler:
    """Admission first come, first served; preemption of the last admitted, by recompute. See docs/engine.md."""

    def __init__(self, pool: BlockPool, *, max_sequences: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.max_step_tokens = max_step_tokens
        self.watermark = pool.size // 100  # room for what runs to grow, so that an admission does not preempt at once
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._retiring: list[Sequence] = []  # ended, but a launched step may still write their blocks
        self._in_flight = 0  # steps planned that are neither committed nor failed
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._swaps: dict[tuple[int, int], int] = {}  # (row, index) -> block: for the device's copy of the tables

    # -- from outside ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> Delta | None:
        """End a sequence now; None if it has ended already. What it computed in flight is not published."""
        if sequence.finish_reason is not None:
            return None
        return self._finish(sequence, FinishReason.CANCELLED)

    @property
    def tables(self) -> Iterator[list[int]]:
        yield from (sequence.table for sequence in self.running)
        yield from (sequence.table for sequence in self._retiring)

    def forget_registrations(self) -> None:
        """The index was cleared: what running sequences hold may be registered again, from its first block on."""
        for sequence in self.running:
            sequence.registered = 0

    # -- planning -------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can be stepped."""
        plan = Plan(blocks=[(row, index, block) for (row, index), block in self._swaps.items()])
        if not self._plan_trial(plan):
            budget, preempted = self._plan_running(plan)
            if not preempted:
                self._admit(plan, budget)
        if not plan.entries:
            return None
        self._swaps = {}
        self._in_flight += 1
        return plan

    def _plan_trial(self, plan: Plan) -> bool:
        """A sequence on trial is stepped alone; True if this step is such a one, or must wait for one or another's."""
        trial = next((s for s in self.running if s.isolated and not s.held), None)
        head = self._next_waiting()
        if trial is None and not (head and head.isolated):
            return False
        if self._in_flight:
            return True  # whoever else is in flight would share the blame
        if trial is None:
            self._admit(plan, self.max_step_tokens)
        elif trial.remaining and self._grow(trial, self.max_step_tokens, plan):
            self._plan(trial, self.max_step_tokens, plan)
        return bool(plan.entries)

    def _plan_running(self, plan: Plan) -> tuple[int, bool]:
        """Give running sequences their tokens, in admission order. Returns the budget left, and if any lost its row."""
        budget, preempted, index = self.max_step_tokens, False, 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            index += 1
            if sequence.waits or not sequence.remaining:
                continue
            admitted = len(self.running)
            if self._grow(sequence, budget, plan):
                budget -= self._plan(sequence, budget, plan)
            preempted |= len(self.running) < admitted
        return budget, preempted

    def _plan(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        count = min(sequence.remaining, budget)
        start, end = sequence.computed, sequence.computed + count
        samples = end == sequence.length and sequence.length < sequence.limit
        plan.entries.append(
            Entry(sequence, sequence.admissions, sequence.row, start, count, samples, sequence.fed and count == 1)
        )
        sequence.computed = end
        sequence.in_flight += 1
        if samples:
            sequence.pending += 1
            sequence.fed = True
        return count

    def _grow(self, sequence: Sequence, budget: int, plan: Plan) -> bool:
        """Take the blocks that its next positions need, preempting from the back. False if it was itself preempted."""
        end = sequence.computed + min(sequence.remaining, budget)
        while len(sequence.table) * self.pool.block_size < end:
            if self.pool.available:
                sequence.table.append(self.pool.take())
                plan.blocks.append((sequence.row, len(sequence.table) - 1, sequence.table[-1]))
                continue
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Back to the head of the queue; registered blocks stay reclaimable, so that its return is cheap."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.counters.preempted(sequence)
        sequence.preemptions += 1
        plan.blocks[:] = [update for update in plan.blocks if update[0] != sequence.row]
        self._leave_row(sequence)

    def _admit(self, plan: Plan, budget: int) -> None:
        while self._rows and budget:
            sequence = self._next_waiting()
            if sequence is None or (sequence.isolated and plan.entries):
                break
            matched = self._match(sequence)
            need = -(-sequence.length // self.pool.block_size) - len(matched)
            reserve = self.watermark if self.running else 0
            if need + reserve > self.pool.available_beside(matched):
                break
            self.waiting.remove(sequence)
            self._open(sequence, matched, need, plan)
            budget -= self._plan(sequence, budget, plan)
            if sequence.isolated:
                break

    def _next_waiting(self) -> Sequence | None:
        return next((sequence for sequence in self.waiting if not sequence.held), None)

    def _match(self, sequence: Sequence) -> list[int]:
        """The cached blocks of its prefix; at least one token stays to be computed."""
        if sequence.wants_prompt_logprobs and len(sequence.prompt_logprobs) < sequence.prompt_length:
            return []  # cached positions never run the forward pass
        limit = (len(sequence.tokens) - 1) // self.pool.block_size
        if sequence.admissions and sequence.done < sequence.prompt_length:
            # Preempted within its prompt: its hits are told and counted, so what others computed since is not for it.
            limit = sequence.done // self.pool.block_size
        return self.pool.match(sequence.tokens, sequence.namespace, limit)

    def _open(self, sequence: Sequence, matched: list[int], need: int, plan: Plan) -> None:
        self.pool.acquire(matched)
        sequence.table = matched + [self.pool.take() for _ in range(need)]
        sequence.row = self._rows.pop()
        sequence.cached = sequence.computed = sequence.kv = len(matched) * self.pool.block_size
        sequence.registered = len(matched)
        sequence.admissions += 1
        self.counters.admitted(sequence)
        self.running.append(sequence)
        plan.opened.append(sequence)
        plan.blocks.extend((sequence.row, index, block) for index, block in enumerate(sequence.table))

    # -- committing -----------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, sampled: Sampled) -> list[Delta]:
        """Take in what a step computed: tokens, endings, and the blocks that are now full and known to be computed."""
        self._in_flight -= 1
        deltas: list[Delta] = []
        for index, entry in enumerate(plan.entries):
            delta = self._commit_entry(entry, index, sampled)
            if delta is not None:
                deltas.append(delta)
        self._retire()
        return deltas

    def fail(self, plan: Plan, message: str) -> list[Delta]:
        """The step failed: nothing of it is published, and its sequences end with an error."""
        self._in_flight -= 1
        deltas: list[Delta] = []
        for entry in plan.entries:
            entry.sequence.in_flight -= 1
            if entry.sequence.finish_reason is None:
                deltas.append(self._finish(entry.sequence, FinishReason.ERROR, error=message))
        self._retire()
        # The device may not have taken the plan's differences, some of which are for rows that go on.
        self._swaps = {(s.row, index): block for s in self.running for index, block in enumerate(s.table)}
        return deltas

    def _commit_entry(self, entry: Entry, index: int, sampled: Sampled) -> Delta | None:
        sequence = entry.sequence
        sequence.in_flight -= 1
        sequence.pending -= entry.samples
        if sequence.finish_reason is not None:
            return None  # ended while this step was in flight: its extra token is dropped
        if sampled.broken[index]:
            message = "the model's logits are not finite (NaN or infinity)"
            if sequence.mask_source is not None:
                message += ", or its mask allows nothing"
            return self._finish(sequence, FinishReason.ERROR, error=message)
        self.counters.computed(sequence, entry)
        if entry.admission == sequence.admissions and sequence.row == entry.row:
            self._publish(sequence, entry)
        prompt_logprobs = sequence.gather_prompt_logprobs(entry.start, sampled.prompt_logprobs[index])
        token = sampled.tokens[index]
        if token is None:
            return self._continue_prefill(sequence, entry, prompt_logprobs)
        return self._append(sequence, token, sampled.logprobs[index], prompt_logprobs)

    def _publish(self, sequence: Sequence, entry: Entry) -> None:
        """Its KV is computed and its tokens are real: full blocks may be matched from now on."""
        sequence.kv = entry.start + entry.count
        full = sequence.kv // self.pool.block_size
        if full == sequence.registered:
            return
        swaps = self.pool.register(sequence.table, sequence.tokens, sequence.namespace, sequence.registered, full)
        sequence.registered = full
        self._swaps.update({(sequence.row, index): block for index, block in swaps})

    def _continue_prefill(
        self, sequence: Sequence, entry: Entry, prompt_logprobs: list[TokenLogprob | None] | None
    ) -> Delta | None:
        if sequence.kv == sequence.limit:  # max_tokens=0: the prompt was all there is to run
            return self._finish(sequence, FinishReason.LENGTH, prompt_logprobs=prompt_logprobs)
        first_step = sequence.admissions == 1 and entry.start == sequence.cached
        if not first_step and prompt_logprobs is None:
            return None
        return sequence.delta(prompt_logprobs=prompt_logprobs)

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprob | None,
        prompt_logprobs: list[TokenLogprob | None] | None,
    ) -> Delta:
        sequence.tokens.append(token)
        if sequence.mask_source is not None:
            sequence.mask_source.advance(token)
        self.counters.generation_tokens += 1
        logprobs = None if logprob is None else [logprob]
        reason = sequence.ending(token)
        if reason is not None:
            return self._finish(sequence, reason, [token], logprobs, prompt_logprobs)
        return sequence.delta([token], logprobs, prompt_logprobs)

    # -- leaving --------------------------------------------------------------------------------------------------

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        prompt_logprobs: list[TokenLogprob | None] | None = None,
        error: str | None = None,
    ) -> Delta:
        sequence.finish_reason = reason
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._retiring.append(sequence)
        else:
            self.waiting.remove(sequence)
            if reason is FinishReason.ERROR:
                self._forget_registered(sequence)
        self._retire()
        return sequence.delta(tokens, logprobs, prompt_logprobs, error)

    def _retire(self) -> None:
        """Give back what ended, once no launched step may still write its blocks."""
        for sequence in [s for s in self._retiring if s.in_flight == 0]:
            self._retiring.remove(sequence)
            if sequence.finish_reason is FinishReason.ERROR:
                # Any of its KV may be at fault: left in the index, it would break every later request with its prefix.
                self.pool.forget(sequence.table)
            self._leave_row(sequence)

    def _forget_registered(self, sequence: Sequence) -> None:
        """As above, for one that was preempted with a step in flight: it has no table, but the index has its blocks."""
        left = self.pool.match(sequence.tokens, sequence.namespace, len(sequence.tokens) // self.pool.block_size)
        self.pool.acquire(left)
        self.pool.forget(left)
        self.pool.release(left)

    def _leave_row(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        self._rows.append(sequence.row)
        self._swaps = {key: block for key, block in self._swaps.items() if key[0] != sequence.row}
        sequence.leave_row()
