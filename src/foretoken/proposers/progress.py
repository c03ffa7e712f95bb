"""How far a drafter's own keys and values reach, for drafters that share the target's pages.

Their KV lies in their own tensors but under the target's page tables, so allocation, preemption
and prefix hits need no second book. What is kept here: per request how many positions are valid
and which drafted tokens stand after them, and per page whether it was filled for what it holds
now (so that a prefix hit finds the drafter's KV too). From this follows what a drafter has to be
fed before it drafts. Knows nothing of models.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """How far a drafter with KV of its own may go."""

    max_model_len: int
    """No drafts for sequences that would outgrow this many tokens."""
    max_num_batched_tokens: int
    """Most tokens of one pass."""
    padded_to: int = 0
    """What is fed before the first draft is made equally long for all sequences that miss at most
    so many places; 0: each feeds what it misses."""

    def starts(self, starts: Seq[int], ends: Seq[int]) -> list[int]:
        """Where the stretches to be fed begin, given those of what is missing: padding feeds
        places before them again, as far as there are any."""
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        longest = max((n for n in counts if n <= self.padded_to), default=0)
        padded = zip(starts, ends, counts, strict=True)
        return [max(0, end - longest) if n < longest else start for start, end, n in padded]


@dataclass(frozen=True, slots=True)
class Stretches:
    """What is to be fed of some sequences: places [start, end) of each."""

    starts: list[int]
    ends: list[int]

    def within(self, most: int, feed: Callable[[int, int, int], object]) -> "Stretches":
        """What is left for one pass of at most `most` places, at least one of each sequence.

        Args:
            most: places of a pass.
            feed: (index, start, end) feeds what has to go ahead, from the longest stretch first.
        """
        starts, ends = list(self.starts), self.ends
        while sum(ends) - sum(starts) > most:
            longest = max(range(len(starts)), key=lambda i: ends[i] - starts[i])
            stop = min(ends[longest] - 1, starts[longest] + most)
            feed(longest, starts[longest], stop)
            starts[longest] = stop
        return Stretches(starts, ends)


@dataclass(frozen=True, slots=True)
class _Reach:
    """What one sequence has."""

    num_preemptions: int
    """Preemptions of the sequence when this was written: a preempted one has new pages."""
    num_valid: int
    """Committed positions with valid KV."""
    drafted: tuple[int, ...]
    """Draft tokens whose KV stands after those."""


class DraftProgress:
    """The book of one drafter."""

    def __init__(
        self,
        generations: Seq[int],
        page_size: int,
        limits: DraftLimits,
        *,
        joins_next: bool = False,
    ) -> None:
        """Start empty.

        Args:
            generations: the page pool's count of how often each page changed its contents.
            page_size: positions of a page.
            limits: of sequences and passes.
            joins_next: whether what is kept at a place also depends on the token at the next one,
                so that the newest token has no place yet (heads of the EAGLE family).
        """
        self.limits = limits
        self._generations = generations
        self._page_size = page_size
        self._joins_next = int(joins_next)
        self._filled: dict[int, int] = {}
        self._reaches: dict[str, _Reach] = {}

    def fits(self, span: Span) -> bool:
        """Whether the span's drafts would stay within the drafter's context."""
        return span.sequence.num_tokens + span.draft_budget <= self.limits.max_model_len

    def missing(self, spans: Seq[Span]) -> Stretches:
        """What the drafter has to be fed of each span before its first draft.

        The newest place is always fed again, because its output is what drafting begins with.
        """
        ends = [span.sequence.num_tokens - self._joins_next for span in spans]
        first = [
            max(0, min(self._valid(span.sequence), end - 1))
            for span, end in zip(spans, ends, strict=True)
        ]
        return Stretches(self.limits.starts(first, ends), ends)

    def caught_up(self, spans: Seq[Span], feed: Callable[[int, int, int], object]) -> Stretches:
        """What is `missing`, after what does not fit one pass was fed.

        `feed` (index, start, end) feeds a part of one span's stretch.
        """
        return self.missing(spans).within(self.limits.max_num_batched_tokens, feed)

    def _valid(self, sequence: Sequence) -> int:
        """Leading places that need not be fed.

        The last place of a page that another request filled is not among them where it depends on
        the next token: that token need not be the same here.
        """
        valid = self.num_valid(sequence)
        return valid if self._reach(sequence) is not None else valid - self._joins_next

    def num_valid(self, sequence: Sequence) -> int:
        """Leading positions of `sequence` whose KV can be used."""
        reach = self._reach(sequence)
        if reach is None:
            return self._num_filled(sequence.page_table) * self._page_size
        valid = reach.num_valid
        committed = sequence.token_ids[valid:]
        for drafted, token in zip(reach.drafted, committed, strict=False):
            if drafted != token:
                break
            valid += 1
        return valid

    def record(self, sequence: Sequence, num_valid: int, drafted: Seq[int] = ()) -> None:
        """From now on `num_valid` positions are valid, and `drafted` tokens after them."""
        before = self._reach(sequence)
        first = 0 if before is None else before.num_valid // self._page_size
        for page in sequence.page_table[first : num_valid // self._page_size]:
            self._filled[page] = self._generations[page]
        reach = _Reach(sequence.num_preemptions, num_valid, tuple(drafted))
        self._reaches[sequence.request.request_id] = reach

    def rewind(self, sequence: Sequence, num_kept: int) -> None:
        """Tokens of `sequence` from `num_kept` on are not those that were there before."""
        reach = self._reach(sequence)
        if reach is None or reach.num_valid <= num_kept:
            return
        self._reaches[sequence.request.request_id] = _Reach(reach.num_preemptions, num_kept, ())
        for page in sequence.page_table[num_kept // self._page_size :]:
            self._filled.pop(page, None)

    def release(self, request_id: str) -> None:
        """Forget a request; its pages keep their marks."""
        self._reaches.pop(request_id, None)

    def _reach(self, sequence: Sequence) -> _Reach | None:
        reach = self._reaches.get(sequence.request.request_id)
        same = reach is not None and reach.num_preemptions == sequence.num_preemptions
        return reach if same else None

    def _num_filled(self, page_table: list[int]) -> int:
        """Leading pages whose KV was written for their present contents."""
        for count, page in enumerate(page_table):
            if self._filled.get(page) != self._generations[page]:
                return count
        return len(page_table)
