"""The order of service: lower priority number first, then arrival, then order of adding.

`rank` orders the running sequences, the last one being the first to be preempted. The waiting
queue uses the same order, except that preempted sequences come before the others of their
priority. Owns no pages and no tokens.
"""

from heapq import heappop, heappush

from foretoken.runtime.sequence import Sequence, SequenceState


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Sort key: who is served first and preempted last."""
    request = sequence.request
    return (request.priority, request.arrival, sequence.order)


class WaitingQueue:
    """A heap of waiting sequences. Removal is lazy: a sequence no longer WAITING is skipped."""

    def __init__(self) -> None:
        """Empty."""
        self._heap: list[tuple[int, bool, float, int, Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._size

    def push(self, sequence: Sequence) -> None:
        """Add a sequence; one that was preempted before goes to the front of its priority."""
        assert sequence.state is SequenceState.WAITING, sequence.state
        priority, arrival, order = rank(sequence)
        fresh = sequence.num_preemptions == 0
        heappush(self._heap, (priority, fresh, arrival, order, sequence))
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
