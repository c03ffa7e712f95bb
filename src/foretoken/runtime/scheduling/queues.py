"""Who waits, who runs, and the moves between: admission, preemption, departure.

Invariants: waiting sequences hold no pages; the running ones are sorted by `rank`, so the last
is the first to be preempted; a live sequence is in exactly one of the two. Does not know tokens
or steps.
"""

from bisect import insort
from collections.abc import Iterable

from foretoken.runtime.queue import WaitingQueue, rank
from foretoken.runtime.scheduling.pages import SequencePages
from foretoken.runtime.sequence import Sequence, SequenceState


class Roster:
    """The waiting queue and the running list, at most `max_num_seqs` long."""

    def __init__(self, pages: SequencePages, max_num_seqs: int) -> None:
        """Nobody there."""
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

    @property
    def pages_for_next(self) -> int:
        """Pages that drafts must leave for whoever is admitted next; 0: nobody can be."""
        sequence = self.waiting.peek() if self.may_admit else None
        return 0 if sequence is None else self._pages.wanted(sequence, len(self.running))

    def admit_next(self, now: float) -> Sequence | None:
        """Admit the first waiting sequence if there is a seat and if its pages are there.

        One page per running sequence is left to grow into, against preempting at once whom we
        admit. Nobody overtakes the first: a long prompt is not starved by short ones.
        """
        sequence = self.waiting.peek()
        if sequence is None or not self.may_admit:
            return None
        if not self._pages.admit(sequence, spare=len(self.running)):
            return None
        self.waiting.pop()
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.num_cached = sequence.num_computed
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=rank)
        return sequence

    def preempt_last(self) -> Sequence:
        """Send the last running sequence back to wait; it keeps its tokens, not its KV."""
        sequence = self.running.pop()
        self._pages.release(sequence)
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
