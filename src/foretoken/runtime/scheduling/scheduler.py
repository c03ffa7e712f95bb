"""Who runs in the next step, with how many tokens, and what becomes of the step's results.

Continuous batching: in each step decoding sequences come first, then their drafts, then prompt
chunks of admitted sequences, then new admissions. One step at a time: `schedule`, perhaps `join`,
then `commit` (or `cancel`) of its batch; one that may begin before that is planned by `follow`, and
is the next once it is told to `resume`. Invariant: every request added ends exactly once, with one
Output that has a finish reason. Models, drafters and text are unknown here.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType

from foretoken.control.plan import DraftPlan, DraftPlanner, StepLoad, plan_no_drafts
from foretoken.errors import CapacityError, ConfigError, ContextError, PromptError, RequestError
from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache
from foretoken.kv.shared_pages import SharedPages
from foretoken.runtime.batch import Batch, Span, SpanVerification, Verification
from foretoken.runtime.faults import say_failure
from foretoken.runtime.scheduling import commit as commits
from foretoken.runtime.scheduling.pages import SequencePages
from foretoken.runtime.sequence import Sequence, SequenceState
from foretoken.types import FinishReason, Output, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    Raises:
        ConfigError: a limit is not an integer >= 1.
    """

    max_num_seqs: int = 64
    """Most sequences running at once."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one step, prompt chunks and drafts included. Decoding comes first; drafts
    take at most half of the rest while prompts wait for it."""
    max_model_len: int
    """Most tokens of a sequence, prompt and output together."""
    enable_prefix_caching: bool = True
    """Share pages between sequences that begin alike."""
    max_prompt_logprob_tokens: int = 256
    """Most prompt tokens of one sequence and step if all of them need logits."""

    def __post_init__(self) -> None:
        limits = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_prompt_logprob_tokens",
        )
        for name in limits:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "an integer >= 1")


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Sort key: who is served first and preempted last."""
    request = sequence.request
    return (request.priority, request.arrival, sequence.order)


class WaitingQueue:
    """A heap of waiting sequences. Removal is lazy: a sequence no longer WAITING is skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, float, int, Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._size

    def push(self, sequence: Sequence) -> None:
        """Add a sequence; one that was begun before goes to the front of its priority."""
        assert sequence.state is SequenceState.WAITING, sequence.state
        priority, arrival, order = rank(sequence)
        heappush(self._heap, (priority, not sequence.was_begun, arrival, order, sequence))
        self._size += 1

    def peek(self) -> Sequence | None:
        """The next sequence to serve, which stays; None if nobody waits."""
        while self._heap and self._heap[0][-1].state is not SequenceState.WAITING:
            heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Sequence:
        """Take the next sequence to serve; asserts that there is one."""
        sequence = self.peek()
        assert sequence is not None, "nobody waits"
        heappop(self._heap)
        self._size -= 1
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take out a waiting sequence, whose state the caller changes right after."""
        assert sequence.state is SequenceState.WAITING, sequence.state
        self._size -= 1

    def check_integrity(self) -> None:
        """Assert that the count is that of waiting sequences, each there once. O(n)."""
        waiting = [s.order for *_, s in self._heap if s.state is SequenceState.WAITING]
        assert len(waiting) == self._size, (len(waiting), self._size)
        assert len(set(waiting)) == self._size, "a sequence waits twice"


class RequestQueues:
    """The waiting queue and the running list, at most `max_num_seqs` long.

    The order of service is: lower priority number first, then arrival, then order of adding.
    Preempted sequences, and those that another engine began, come before the others of their
    priority. Invariants: waiting sequences hold no pages; the running ones are sorted by `rank`, so
    the last is the first to be preempted; a live sequence is in exactly one of the two.
    """

    def __init__(self, pages: SequencePages, max_num_seqs: int) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """Read only."""
        self.num_preemptions = 0
        self._pages = pages
        self._max_num_seqs = max_num_seqs

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits and a seat is free."""
        return len(self.waiting) > 0 and len(self.running) < self._max_num_seqs

    def tokens_of_next(self, most: int) -> int:
        """Tokens to compute for those that are likely to be admitted next, shared ones included; up
        to about `most`. They are taken to be as long as the first of them."""
        sequence = self.waiting.peek() if self.may_admit else None
        if sequence is None:
            return 0
        seats = min(self._max_num_seqs - len(self.running), len(self.waiting))
        return min(sequence.num_tokens * seats, most)

    @property
    def pages_for_next(self) -> int:
        """Pages that drafts must leave for whoever is admitted next; 0: nobody can be."""
        sequence = self.waiting.peek() if self.may_admit else None
        return 0 if sequence is None else self._pages.wanted(sequence, len(self.running))

    def admit_next(self, now: float) -> Sequence | None:
        """Admit the first waiting sequence if there is a seat and if its pages are there.

        One page per running sequence is left to grow into, so that the next steps do not preempt
        what was just admitted.
        """
        sequence = self.waiting.peek()
        if sequence is None or not self.may_admit:
            return None
        # Only the first is looked at: if shorter prompts could overtake it, a long one might wait
        # for ever for enough pages at once.
        if not self._pages.admit(sequence, spare=len(self.running)):
            return None
        self.waiting.pop()
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=rank)
        return sequence

    def preempt_last(self) -> Sequence:
        """Send the last running sequence back to wait; it keeps its tokens, not its KV."""
        sequence = self.running.pop()
        self._pages.release(sequence)
        # Its prompt is computed again from the start, and gives these again.
        sequence.prompt_logprobs.clear()
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        self.waiting.push(sequence)
        self.num_preemptions += 1
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended and give back its pages."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.discard(sequence)
        else:
            self.running.remove(sequence)
        self._pages.release(sequence)
        sequence.state = SequenceState.FINISHED

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Assert the invariants, given all live sequences. O(n)."""
        live = list(live)
        self.waiting.check_integrity()
        running = [s for s in live if s.state is SequenceState.RUNNING]
        assert sorted(running, key=rank) == self.running, "the running list is out of order"
        counts = (len(self.running), len(self.waiting))
        assert sum(counts) == len(live), (*counts, len(live))
        assert len(self.running) <= self._max_num_seqs, (len(self.running), self._max_num_seqs)
        for sequence in live:
            held = len(sequence.page_table)
            assert held == 0 or sequence.state is SequenceState.RUNNING, (sequence.state, held)


class Scheduler:
    """The only one to change sequences and page references."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        *,
        plan_drafts: DraftPlanner = plan_no_drafts,
        find_stop_string: commits.StopFinder = commits.never_stops,
        clock: Callable[[], float] = time.monotonic,
        shared: SharedPages | None = None,
    ) -> None:
        """Take over `pool`; `clock` must be the one that requests' arrivals are read from."""
        self.config = config
        self.max_len = min(config.max_model_len, pool.capacity)
        """Most tokens of a sequence: the context limit, or all pages if those hold less."""
        caching = config.enable_prefix_caching
        self.prefix = PrefixCache(pool) if caching else None
        self._pages = SequencePages(pool, self.prefix, shared)
        self._plan_drafts = plan_drafts
        self._find_stop_string = find_stop_string
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._queues = RequestQueues(self._pages, config.max_num_seqs)
        self._num_added = 0
        self._in_flight = False

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted, or preempted."""
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._queues.running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._queues.num_preemptions

    @property
    def pool(self) -> PagePool:
        """The pages that sequences hold."""
        return self._pages.pool

    @property
    def kv_usage(self) -> float:
        """Share of the memory of KV pages that running requests need."""
        return self._pages.usage

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """Unfinished sequences by request id; a read-only view."""
        return MappingProxyType(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the id is in use.
            PromptError, CapacityError: as `check_capacity`.
        """
        if request.request_id in self._sequences:
            raise RequestError("request_id", request.request_id, "an id that is not in use")
        self.check_capacity(request)
        sequence = Sequence.of(request, self._num_added)
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        self._queues.waiting.push(sequence)

    def check_capacity(self, request: Request) -> None:
        """Check that the prompt, resumed output and one more token could run, if alone.

        Raises:
            PromptError: an empty prompt, or one that leaves no room in the context.
            CapacityError: prompt, resumed output and one token are more than all pages hold.
        """
        num_prompt, pool = len(request.prompt_token_ids), self._pages.pool
        if num_prompt == 0:
            raise PromptError("prompt", "no tokens", "at least one token")
        if num_prompt >= self.config.max_model_len:
            allowed = f"at most {self.config.max_model_len - 1} tokens (max_model_len - 1)"
            raise ContextError("prompt", f"{num_prompt} tokens", allowed)
        num_tokens = num_prompt + len(request.resumed_ids)
        if num_tokens >= pool.capacity:
            field = "prompt and resume" if request.resumed_ids else "prompt"
            allowed = f"at most {pool.capacity - 1} tokens: the KV cache holds {pool.capacity}"
            raise CapacityError(field, f"{num_tokens} tokens", allowed)

    def abort(self, request_id: str) -> Output | None:
        """End a request at once; None if it is unknown or has ended. Fine during a step."""
        return self._interrupt(request_id, FinishReason.ABORT, None)

    def fail(self, request_id: str, error: str) -> Output | None:
        """End a request with an error; None if it is unknown or has ended."""
        return self._interrupt(request_id, FinishReason.ERROR, error)

    def _interrupt(self, request_id: str, reason: FinishReason, error: str | None) -> Output | None:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = reason
        self._retire(sequence)
        metrics = commits.metrics_of(sequence, self._clock())
        return Output(request_id=request_id, finish_reason=reason, error=error, metrics=metrics)

    def _retire(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        del self._sequences[sequence.request.request_id]

    def schedule(self) -> Batch:
        """Plan the next step, reserving pages for it. Empty only if nothing is unfinished; an
        empty batch needs no `commit`."""
        assert not self._in_flight, "the last batch was neither committed nor cancelled"
        # Decoding sequences come first, and each has a page for its next token before anybody gets
        # drafts: a draft may be wrong, that token is never wasted.
        decoding = self._secure_decoding()
        prefilling = [s for s in self._queues.running if not s.is_decoding]
        tokens_left = self.config.max_num_batched_tokens - len(decoding)
        prompts = bool(prefilling) or self._queues.may_admit
        load = StepLoad(
            num_decoding=len(decoding),
            num_prefilling=len(prefilling),
            num_prompt_tokens=self._prompt_tokens(prefilling, tokens_left) if prompts else 0,
        )
        plan = self._plan_drafts(decoding, load)
        # Drafts speed up who is served already; prompts decide how long others wait for their first
        # token. While there are prompts, drafts take at most half of what the step has left.
        spans = self._decode_spans(decoding, plan, tokens_left // 2 if prompts else tokens_left)
        tokens_left -= sum(span.draft_budget for span in spans)
        for sequence in prefilling:
            tokens_left = self._add_chunk(spans, sequence, tokens_left)
        self._admit(spans, tokens_left)
        self._in_flight = bool(spans)
        return Batch(spans=tuple(spans), plan=plan)

    def follow(self, batch: Batch) -> Batch | None:
        """Plan the step after this one, which runs, before its tokens are known; pages are reserved
        for it. It is in flight from `resume` on.

        Nobody drafts: each sequence adds one token, which the device reads where it was drawn.
        None: it takes more than that, or somebody else is to be served.
        """
        queues, spans, alive = self._queues, list[Span](), 0
        if queues.pages_for_next:
            return None
        for place, span in enumerate(batch.spans):
            sequence = span.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            request, alive = sequence.request, alive + 1
            # Logits are looked at before they become those of another step.
            if not span.samples or span.prompt_rows or request.params.logprobs is not None:
                return None
            room = min(request.max_tokens - sequence.num_output, self.max_len - sequence.num_tokens)
            if room == 1:
                if queues.waiting:
                    return None
                continue
            if self._pages.draft_room(sequence) < 1:
                return None
            self._pages.reserve(sequence, 1)
            start = span.start + span.length
            spans.append(Span(sequence=sequence, start=start, length=1, samples=True, after=place))
        if not spans or alive < len(queues.running):
            return None
        load = StepLoad(num_decoding=len(spans), num_prefilling=0)
        sequences = [span.sequence for span in spans]
        plan = plan_no_drafts(sequences, load, batch.plan.resting, wanted=False)
        return Batch(spans=tuple(spans), plan=plan)

    def resume(self) -> None:
        """What `follow` planned is the step that runs; of its sequences some may have ended."""
        assert not self._in_flight, "the last batch was neither committed nor cancelled"
        self._in_flight = True

    def join(self, batch: Batch) -> Batch:
        """The scheduled batch, with prompts of requests that came while its drafts were made.

        Whoever came too late for `schedule` need not wait for a whole step: the pass of the target
        has not begun. Room is what `schedule` left.
        """
        assert self._in_flight, "no batch to join"
        taken = sum(span.length + span.draft_budget for span in batch.spans)
        joining: list[Span] = []
        self._admit(joining, self.config.max_num_batched_tokens - taken)
        return batch.with_more(joining) if joining else batch

    def _admit(self, spans: list[Span], tokens_left: int) -> None:
        """Append chunks of those that wait, as far as there are tokens, seats and pages."""
        while tokens_left > 0 and (admitted := self._queues.admit_next(self._clock())) is not None:
            tokens_left = self._add_chunk(spans, admitted, tokens_left)

    def _prompt_tokens(self, prefilling: list[Sequence], most: int) -> int:
        """About how many prompt tokens the step will compute: of those that run, and of those
        that are admitted next."""
        left = sum(sequence.num_tokens - sequence.num_computed for sequence in prefilling)
        if left < most:
            left += self._queues.tokens_of_next(most - left)
        return min(left, most)

    def _secure_decoding(self) -> list[Sequence]:
        """Sequences that decode in this step, each with a page for its newest token.

        Preempts from the end of the order of service, so never a sequence secured before.
        """
        secured: list[Sequence] = []
        running, limit = self._queues.running, self.config.max_num_batched_tokens
        index = 0
        while index < len(running) and len(secured) < limit:
            sequence = running[index]
            index += 1
            if not sequence.is_decoding:
                continue
            # Rather one sequence that is computed again later than a step that cannot run. If there
            # is nobody behind this one, it gives way itself.
            while not self._pages.fits(sequence):
                if self._queues.preempt_last() is sequence:
                    return secured
            self._pages.reserve(sequence, 0)
            secured.append(sequence)
        return secured

    def _decode_spans(
        self, decoding: list[Sequence], plan: DraftPlan, allowance: int
    ) -> list[Span]:
        """One span per decoding sequence, at most `allowance` drafts over all of them."""
        spans = []
        # Pages for drafts are taken only where they do not keep the next request out.
        kept_free = self._queues.pages_for_next
        for sequence, planned in zip(decoding, plan.budgets, strict=True):
            budget = self._lowered(planned, sequence, allowance, kept_free)
            if budget:
                self._pages.reserve(sequence, budget)
                allowance -= budget
            start = sequence.num_computed
            spans.append(
                Span(sequence=sequence, start=start, length=1, draft_budget=budget, samples=True)
            )
        return spans

    def _lowered(self, budget: int, sequence: Sequence, allowance: int, kept_free: int) -> int:
        """What is left of a planned budget by output, context, step and pages: a plan may be kept
        for several steps."""
        assert budget >= 0, budget
        if budget == 0:
            return 0
        # A step yields one token more than it has drafts, hence the - 1.
        output_left = sequence.request.max_tokens - sequence.num_output - 1
        context_left = self.max_len - sequence.num_tokens - 1
        room = self._pages.draft_room(sequence, kept_free)
        limits = (output_left, context_left, allowance, room)
        return max(0, min(budget, *limits))

    def _add_chunk(self, spans: list[Span], sequence: Sequence, tokens_left: int) -> int:
        """Append as much of the sequence's uncomputed tokens as fits; return what is left."""
        start = sequence.num_computed
        length = min(sequence.num_tokens - start, tokens_left)
        wants_logits = sequence.wants_prompt_logprobs
        # Logits are as wide as the vocabulary: a long prompt's would not fit into memory at once.
        if wants_logits:
            length = min(length, self.config.max_prompt_logprob_tokens)
        if length > 0:
            self._pages.write(sequence, start + length)
            span = Span(
                sequence=sequence,
                start=start,
                length=length,
                samples=start + length == sequence.num_tokens,
                wants_prompt_logprobs=wants_logits,
            )
            spans.append(span)
        return tokens_left - max(length, 0)

    def commit(self, batch: Batch, verification: Verification, now: float) -> list[Output]:
        """Take over the results of the last scheduled batch, with its drafts, at time `now`.

        Returns an output for each span that sampled or whose output could not be made, in order
        of the spans; sequences aborted since `schedule` are passed over.
        """
        self._land(batch)
        results = verification.spans
        assert len(results) == len(batch.spans), (len(results), len(batch.spans))
        outputs = []
        for span, result in zip(batch.spans, results, strict=True):
            # Aborted while the step ran: its pages are gone, its tokens are nobody's.
            if span.sequence.state is not SequenceState.RUNNING:
                continue
            output = self._commit_span(span, result, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _commit_span(
        self, span: Span, result: SpanVerification | None, now: float
    ) -> Output | None:
        """One span's part; an error in making its output ends its request alone."""
        sequence = span.sequence
        try:
            output = self._advance(span, result, now)
        except Exception as error:  # noqa: BLE001 - said in the output
            request_id = sequence.request.request_id
            return self.fail(request_id, say_failure(request_id, error))
        # Full pages are offered to other requests before anything is given back: what this request
        # computed outlives it. Then rejected drafts' pages go, which is all that rollback is.
        self._pages.publish(sequence)
        if output is not None and output.finish_reason is not None:
            self._retire(sequence)
        else:
            self._pages.trim(sequence)
        return output

    def _advance(self, span: Span, result: SpanVerification | None, now: float) -> Output | None:
        """Change the sequence alone; pages and queues stay as they are."""
        commits.advance(span, result)
        if not span.samples:
            return None
        assert result is not None, f"no result for {span.sequence.request.request_id}"
        ending = commits.find_ending(
            span.sequence, result.new_ids, self.max_len, self._find_stop_string
        )
        commits.append(span, result, ending, now)
        return commits.output_of(span, result, ending, now)

    def cancel(self, batch: Batch) -> None:
        """Drop the last scheduled batch: nothing of it counts as computed."""
        self._land(batch)
        for span in batch.spans:
            if span.sequence.state is SequenceState.RUNNING:
                self._pages.trim(span.sequence)

    def _land(self, batch: Batch) -> None:
        assert self._in_flight == bool(batch.spans), (self._in_flight, len(batch.spans))
        self._in_flight = False

    def check_integrity(self) -> None:
        """Assert the invariants of queues, sequences and pages. O(everything), for tests."""
        live = list(self._sequences.values())
        self._queues.check_integrity(live)
        self._pages.check_integrity(live)
        for sequence in live:
            computed, total = sequence.num_computed, sequence.num_tokens
            assert 0 <= computed < total <= self.max_len, (computed, total, self.max_len)
            held, needed = len(sequence.page_table), self._pages.pool.pages_for(total)
            assert self._in_flight or held <= needed, (held, needed)
