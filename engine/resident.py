"""Steps that are prepared on the device, from what it keeps of each row: the host sends differences, in one copy.

    places      which row is in which place of a decode batch; in the order of the plan, told where they differ
    tables      new and swapped blocks, as the plan has them
    parameters  of the rows that were opened
    entries     of a step in which not all decode: row, first position, number of tokens, fed; and the ids

Lengths and last tokens the device moves on by itself. What comes back lies in a ring, with a place for each step that
may be in flight.
"""

from array import array
from collections.abc import Callable
from time import perf_counter_ns

import torch
from torch import Tensor

from engine.config import IN_FLIGHT
from engine.differences import Differences
from engine.graphs import ENTRIES, PLACES, TOKENS, Form, Graphs, Tail, at_least, grid
from engine.handle import Draws, Handle
from engine.plan import Entry, Plan, Sampled
from engine.sampler import Drawn
from engine.sampling.adjust import is_short
from engine.sampling.rows import Trait, traits_of
from engine.scoring import PromptScores
from engine.sequence import Sequence
from engine.stepper import Parts
from engine.work import HEADER, RECORDS, Kept, StepWork
from kernels import Arrival, Resident, State, page_locked, send, upload_all

MOST_SPLITS = 16384  # of keys, that a captured step has room for; steps that need more are not captured
CHOSEN_OUTSIDE = Trait.PENALTY | Trait.BIAS | Trait.LOGPROBS


class Lane:
    """What one of the steps in flight has in the host's memory: what it was sent, and where its results arrive."""

    def __init__(self, words: int, rows: int, device: torch.device) -> None:
        self.sent, self.results = page_locked(words, device), page_locked(3 * rows, device)
        self.arrival = Arrival(device)
        self.number = -1  # of the step that has it


class ResidentStepper:
    """See `Stepper`."""

    def __init__(
        self,
        parts: Parts,
        resident: Resident,
        *,
        vocab_size: int,
        most_tokens: int,
        on_compile: Callable[[str], None],
    ) -> None:
        """`most_tokens` of a step."""
        device, rows = parts.device, parts.rows
        self._parts, self._resident, self._vocab_size, self.device_ns = parts, resident, vocab_size, 0
        state = State.make(rows, parts.columns, parts.block_size, device)
        words = HEADER + 4 * rows + -(-most_tokens // 4) * 4 + 2 * RECORDS
        sent = torch.zeros(words, dtype=torch.int32, device=device)
        logits = torch.empty((rows, vocab_size), dtype=torch.float32, device=device)
        self._kept = Kept(parts, resident, state, resident.lottery(rows, vocab_size, device), sent, logits)
        self.graphs = Graphs(lambda form: StepWork(self._kept, form, self._room(form)), device, on_compile)
        self._differences = Differences(state, vocab_size)
        self._places, self._entries = grid(PLACES, rows), grid(ENTRIES, rows)
        self._tokens = grid(TOKENS, min(most_tokens, TOKENS[-1]))
        self._lanes = [Lane(words, rows, device) for _ in range(IN_FLIGHT)]
        self._launched, self._counted = 0, False  # steps; whether the device's last buffer had differences
        self._row_splits = resident.splits([parts.columns * parts.block_size])
        self._tails, self._short = [Tail.GREEDY] * rows, dict[int, Sequence]()
        self._opened = set[int]()  # rows that the sampler knows

    def open_pool(self, cache: list[Tensor], padding_block: int) -> None:
        self._kept.cache = cache
        self._kept.state.clear(padding_block)
        self.graphs.forget()
        self._differences.clear()
        self._opened.clear()
        self._short.clear()

    def warm_up(self) -> None:
        """Forms are set up when they are first used: nobody knows which will be."""

    def launch(self, plan: Plan) -> Handle:
        try:
            return self._launch(plan)
        except BaseException:
            self._differences.forget()  # the device may not have taken them
            raise

    def collect(self, handle: Handle) -> Sampled:
        began = perf_counter_ns()
        lane = self._lanes[handle.number % IN_FLIGHT]
        assert lane.number == handle.number, "its results were overwritten: more steps are in flight than have places"
        sampled = handle.read()
        lane.number = -1
        self.device_ns += perf_counter_ns() - began  # next to nothing but the wait
        return sampled

    # -- inside ---------------------------------------------------------------------------------------------------

    def _launch(self, plan: Plan) -> Handle:
        for sequence in plan.opened:
            self._open(sequence)
        self._differences.write_tables(plan.blocks)
        lane = self._next_lane()
        began = perf_counter_ns()
        tails = self._tails_of(plan.entries)
        work = self._compute(plan, max(tails), lane)
        handle = self._hand_over(plan, tails, work, lane)
        if self._parts.device.type == "cpu":
            self.device_ns += perf_counter_ns() - began
        return handle

    def _open(self, sequence: Sequence) -> None:
        """A sequence takes a row."""
        row, sampling = sequence.row, sequence.request.sampling
        self._parts.model.open(row, sequence.longest)
        self._differences.open(sequence)
        self._opened.discard(row)
        self._short.pop(row, None)
        traits = traits_of(sampling, self._vocab_size, greedy=sequence.greedy)
        if traits & Trait.MIN_TOKENS:
            self._short[row] = sequence
        if traits & CHOSEN_OUTSIDE or sequence.mask_source is not None:
            self._tails[row] = Tail.LOGITS
        else:
            self._tails[row] = Tail.RANDOM if traits & Trait.RANDOM else Tail.GREEDY

    def _next_lane(self) -> Lane:
        lane = self._lanes[self._launched % IN_FLIGHT]
        if lane.number >= 0:
            lane.arrival.wait()  # a failed step was never collected
        lane.number = self._launched
        self._launched += 1
        return lane

    def _compute(self, plan: Plan, tail: Tail, lane: Lane) -> StepWork:
        entries = plan.entries
        scores = any(PromptScores.wanted(entry) for entry in entries)
        form = self._form(entries, tail)
        if scores or not self._fits(form, entries):
            form = form._replace(tokens=plan.tokens, entries=len(entries))
            splits = self._resident.splits([entry.start + entry.count for entry in entries if entry.count == 1])
            # No less than a captured step has: the largest step is rehearsed here, and shows what captures will take.
            work = StepWork(self._kept, form, max(splits, self._room(form)), keeps=scores)
            self._send(plan, form, work.records_at, lane)
            work()
            return work
        work = self.graphs.find(form)
        self._send(plan, form, work.records_at, lane)
        self.graphs.run(form)
        return work

    def _form(self, entries: list[Entry], tail: Tail) -> Form:
        """What holds the step; of more tokens than any bucket there are as many as there are."""
        if all(entry.fed for entry in entries):
            places = at_least(self._places, len(entries))
            return Form(True, places, places, tail)
        tokens = sum(entry.count for entry in entries)
        tokens = at_least(self._tokens, tokens) if tokens <= self._tokens[-1] else tokens
        return Form(False, tokens, at_least(self._entries, len(entries)), tail)

    def _tails_of(self, entries: list[Entry]) -> list[Tail]:
        """What each entry needs, as far as it samples."""
        tails = [self._tails[entry.row] if entry.samples else Tail.GREEDY for entry in entries]
        if self._short:
            for index, entry in enumerate(entries):
                short = self._short.get(entry.row)
                if entry.samples and short is not None and is_short(short):
                    tails[index] = Tail.LOGITS
        return tails

    def _room(self, form: Form) -> int:
        return min(form.entries * self._row_splits, MOST_SPLITS)

    def _fits(self, form: Form, entries: list[Entry]) -> bool:
        """Whether a captured step has room for it."""
        if form.tokens > TOKENS[-1]:
            return False
        if form.entries * self._row_splits <= MOST_SPLITS:
            return True
        decodes = [entry.start + 1 for entry in entries if entry.count == 1]
        return self._resident.splits(decodes) <= MOST_SPLITS

    def _send(self, plan: Plan, form: Form, records_at: int, lane: Lane) -> None:
        """All that the device has to know of a step, in one copy. Of a decode step with nothing new that is nothing."""
        if form.decodes:
            self._differences.place([entry.row for entry in plan.entries], form.entries)
        records = self._differences.take()
        while len(records) > 2 * RECORDS:
            self._apply(records[: 2 * RECORDS])
            del records[: 2 * RECORDS]
        if form.decodes and not records and not self._counted:
            return
        self._counted = bool(records)
        numbers = array("i", (len(records) // 2, *[0] * (HEADER - 1)))
        if not form.decodes:
            self._describe(plan.entries, form, numbers)
            numbers.extend([0] * (records_at - len(numbers)))
        numbers.extend(records)
        host = lane.sent[: len(numbers)]
        host.copy_(torch.frombuffer(numbers, dtype=torch.int32))
        send(host, self._kept.sent[: len(numbers)])

    def _apply(self, records: "array[int]") -> None:
        """Differences that find no room in what a step carries out."""
        count, words = upload_all([[len(records) // 2], records.tolist()], self._parts.device)
        self._resident.apply(self._kept.state, count.int(), words.int().view(-1, 2))

    def _describe(self, entries: list[Entry], form: Form, numbers: "array[int]") -> None:
        """Entries and ids, as `Resident.open` takes them."""
        unused = [0] * (form.entries - len(entries))
        numbers.extend([*(entry.row for entry in entries), *(self._parts.rows for _ in unused)])
        for column in ("start", "count", "fed"):
            numbers.extend([*(int(getattr(entry, column)) for entry in entries), *unused])
        for entry in entries:
            if entry.fed:
                numbers.append(0)
            else:
                numbers.extend(entry.sequence.tokens[entry.start : entry.start + entry.count])

    def _hand_over(self, plan: Plan, tails: list[Tail], work: StepWork, lane: Lane) -> Handle:
        """Start the results on their way to the host."""
        results = lane.results[: 3 * work.form.entries].view(3, -1)
        send(work.results, results)
        inside = [index for index, entry in enumerate(plan.entries) if entry.samples and tails[index] < Tail.LOGITS]
        draws = [Draws(Drawn(results[0], results[1]), inside, inside)]
        if work.form.tail is Tail.LOGITS:
            draws.append(self._draw(plan, [index for index, tail in enumerate(tails) if tail is Tail.LOGITS]))
        handle = Handle(plan, draws, results[2][: len(plan.entries)], lane.arrival, number=lane.number)
        if work.hidden is not None:
            self._score(work.hidden, handle)
        lane.arrival.start()
        return handle

    def _draw(self, plan: Plan, chosen: list[int]) -> Draws:
        """Tokens of these entries by the sampler, which gets to know their rows when it first sees them."""
        entries = [plan.entries[index] for index in chosen]
        for entry in entries:
            if entry.row not in self._opened:
                self._opened.add(entry.row)
                self._parts.sampler.open(entry.sequence)
        lists = [chosen, [entry.row for entry in entries], [entry.start + entry.count for entry in entries]]
        index, rows, positions = upload_all(lists, self._parts.device)
        drawn = self._parts.sampler.draw(self._kept.logits[index], [entry.sequence for entry in entries], positions)
        self._kept.state.last_tokens[rows] = drawn.ids.to(torch.int32)
        return Draws(drawn.download(), chosen, range(len(chosen)))

    def _score(self, hidden: Tensor, handle: Handle) -> None:
        first = 0
        for index, entry in enumerate(handle.plan.entries):
            if PromptScores.wanted(entry):
                states = hidden[first : first + entry.count]
                handle.prompts[index] = PromptScores(entry, states, self._parts.logits)
            first += entry.count
