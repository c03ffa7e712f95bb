"""Who waits and who runs, in which order, and the moves between: admission, preemption, departure.

The order of service is: lower priority number first, then arrival, then order of adding. Preempted
sequences, and those that another engine began, come before the others of their priority.
Invariants: waiting sequences hold no pages; the running ones are sorted by `rank`, so the last is
the first to be preempted; a live sequence is in exactly one of the two queues. Knows neither tokens
nor steps.
"""

from bisect import insort
from collections.abc import Iterable
from heapq import heappop, heappush

from foretoken.runtime.scheduling.pages import SequencePages
from foretoken.runtime.sequence import Sequence, SequenceState


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Sort key: who is served first and preempted last."""
    request = sequence.request
    return (request.priority, request.arrival, sequence.order)


class WaitingQueue:
    """A heap of waiting sequences. Removal is lazy: a sequence no longer WAITING is skipped."""

    def __init__(self) -> None:
        """Start with nobody."""
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
    """The waiting queue and the running list, at most `max_num_seqs` long."""

    def __init__(self, pages: SequencePages, max_num_seqs: int) -> None:
        """Start with nobody."""
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
