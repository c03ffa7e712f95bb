"""How far a drafter's keys and values reach, and hence what it has to be fed before it drafts.

They lie under the target's pages, so allocation, preemption and prefix hits need no second book.
`DraftProgress` keeps per request how many places are valid and which drafted tokens stand after
them, and per page whether it was filled for what it holds now (so that a prefix hit finds the
drafter's KV too).

A drafter need not know a sequence from its beginning. It may enter at a page and take what comes
from there for the whole text: it is given the rest of the page table, and positions count from
there. What is kept then is not what a drafter that knows everything would keep, so such pages are
not found by prefix hits. Two requests that share pages and began at different places would
overwrite each other's: who entered later goes behind such pages, and who comes from the beginning
makes the other enter again.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum

from foretoken.kv.features import FeatureGaps
from foretoken.kv.shared_pages import DraftPages
from foretoken.models.tensors import SpanLayout
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """How far a drafter with KV of its own may go."""

    max_model_len: int
    """No drafts for sequences that would outgrow this many tokens."""
    max_num_batched_tokens: int
    """Most tokens of one pass."""
    enters: bool = True
    """Whether it may begin inside of a sequence: only distances between positions matter to it."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """What is to be fed of some sequences: places [start, end) of each."""

    starts: list[int]
    ends: list[int]

    def layouts(self, sequences: Seq[Sequence]) -> list[SpanLayout]:
        """Where they lie."""
        return [
            SpanLayout(start=start, num_tokens=end - start, page_table=sequence.page_table)
            for sequence, start, end in zip(sequences, self.starts, self.ends, strict=True)
        ]

    def tokens(self, sequences: Seq[Sequence], shift: int = 0) -> list[list[int]]:
        """The tokens of each sequence so many places behind those of the stretch."""
        each = zip(sequences, self.starts, self.ends, strict=True)
        return [one.token_ids[start + shift : end + shift] for one, start, end in each]

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


class MadeOf(Enum):
    """What the keys and values of a place are made of, beside the places before it."""

    TOKEN = "token"
    """The token there."""
    FEATURES = "features"
    """What the target made of it, so that the newest token has no place yet."""
    PAIR = "pair"
    """The same, and the token at the next place."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """What one sequence has."""

    num_preemptions: int
    """Preemptions of the sequence when this was written: a preempted one has new pages."""
    num_valid: int
    """Places [origin, num_valid) have valid KV; all of them are committed."""
    drafted: tuple[int, ...] = ()
    """Draft tokens whose KV stands after those."""
    origin: int = 0
    """The first place that the drafter knows of, at the beginning of a page."""
    num_losses: int = 0
    """How often pages had been taken away when all of this was last seen to be there."""


def _num_valid(sequence: Sequence, reach: _Reach) -> int:
    """Leading places with valid KV, accepted drafts included; those before the origin count."""
    valid = reach.num_valid
    committed = sequence.token_ids[valid:]
    for drafted, token in zip(reach.drafted, committed, strict=False):
        if drafted != token:
            break
        valid += 1
    return valid


class DraftProgress:
    """The book of one drafter. Places are those of the whole sequence."""

    def __init__(
        self,
        generations: Seq[int],
        page_size: int,
        limits: DraftLimits,
        *,
        made_of: MadeOf = MadeOf.TOKEN,
        gaps: FeatureGaps | None = None,
        pages: DraftPages | None = None,
    ) -> None:
        """Start empty.

        Args:
            generations: the page pool's count of how often each page changed its contents.
            page_size: positions of a page.
            limits: of sequences and passes.
            made_of: what is kept of.
            gaps: where the hidden states that it is fed are missing; None: it reads none.
            pages: the memory that it may write; None: it has all that there is.
        """
        self.limits = limits
        self._generations = generations
        self._page_size = page_size
        self.made_of = made_of
        self._placeless = int(made_of is not MadeOf.TOKEN)
        self._joins_next = int(made_of is MadeOf.PAIR)
        self._gaps = gaps
        self._filled: dict[int, int] = {}
        self._reaches: dict[str, _Reach] = {}
        self._entered: dict[int, str] = {}
        """Pages that a request filled which entered later, and that request."""
        self._pages = pages
        self._num_losses = 0
        self.num_queried_tokens = 0
        """Tokens of all sequences when they were first fed."""
        self.num_hit_tokens = 0
        """Tokens of those that others had fed."""
        if pages is not None:
            pages.forget = self._lose

    def prepare(self, sequence: Sequence, num_drafts: int) -> bool:
        """Whether it can draft for the sequence; where features are missing, from behind them."""
        if self._gaps is not None and not self._enter_behind_gaps(sequence, self._gaps):
            return False
        reach, end = self._reach(sequence), sequence.num_tokens - self._placeless
        origin = 0 if reach is None else reach.origin
        if sequence.num_tokens - origin + num_drafts > self.limits.max_model_len or origin >= end:
            return False
        stop = sequence.num_tokens + num_drafts
        # In most steps nothing is written outside of the pages that it wrote before.
        written = 0 if reach is None else -(-reach.num_valid // self._page_size)
        if self._pages is None or stop <= written * self._page_size:
            return True
        return self._has_room(sequence, stop)

    def missing(self, spans: Seq[Span]) -> Stretches:
        """What the drafter has to be fed of each span before its first draft, as it sees them.

        The newest place is always fed again, because its output is what drafting begins with.
        """
        first, ends = list[int](), list[int]()
        for span in spans:
            sequence = span.sequence
            reach = self._reach(sequence)
            origin = 0 if reach is None else reach.origin
            start, end = self._missing(sequence, reach)
            first.append(start - origin)
            ends.append(end - origin)
        return Stretches(first, ends)

    def num_missing(self, sequence: Sequence) -> int:
        """Places that it would have to be fed; 0 where it cannot draft yet."""
        start, end = self._missing(sequence, self._reach(sequence))
        if self._gaps is not None:
            known = self._gaps.known_from(sequence.page_table, start, end)
            if known > start:
                start = self._page_from(known)
        return max(0, end - start)

    def seen(self, sequence: Sequence) -> Sequence:
        """The sequence as the drafter sees it: without what comes before the origin."""
        reach = self._reach(sequence)
        if reach is None or not reach.origin:
            return sequence
        origin = reach.origin
        return Sequence(
            request=sequence.request,
            token_ids=sequence.token_ids[origin:],
            num_prompt=max(0, sequence.num_prompt - origin),
            num_computed=sequence.num_computed - origin,
            page_table=sequence.page_table[origin // self._page_size :],
        )

    def enter(self, sequence: Sequence, window: int) -> bool:
        """Begin again with at most the `window` latest places, if much more than that is missing.

        A window begins with a page, behind those that others use.
        """
        start, end = self._missing(sequence, self._reach(sequence))
        if end - start <= window + self._page_size:
            return False
        origin = min(self._page_from(end - window), (end - 1) // self._page_size * self._page_size)
        if self._gaps is not None:
            known = self._gaps.known_from(sequence.page_table, start, end)
            origin = max(origin, self._page_from(known))
        return self._enter_at(sequence, origin)

    def to_feed(self, sequence: Sequence, most: int) -> tuple[int, int]:
        """The next places to be fed ahead of a draft, at most `most`; none, where it cannot draft.

        The newest is left to the draft, which would feed it again.
        """
        if self._gaps is not None and not self._enter_behind_gaps(sequence, self._gaps):
            return 0, 0
        start, end = self._missing(sequence, self._reach(sequence))
        stop = max(start, min(start + most, end - 1))
        if self._pages is not None and not self._has_room(sequence, stop):
            return 0, 0
        return start, stop

    def record(self, sequence: Sequence, drafted: Seq[int] = ()) -> None:
        """All committed tokens were fed, and `drafted` ones after them."""
        self.record_until(sequence, sequence.num_tokens - self._placeless, drafted)

    def record_until(self, sequence: Sequence, num_valid: int, drafted: Seq[int] = ()) -> None:
        """Places before `num_valid` were fed, and `drafted` tokens after them."""
        before, request_id = self._reach(sequence), sequence.request.request_id
        origin, was_valid = (0, 0) if before is None else (before.origin, before.num_valid)
        if before is None:
            self._leave(request_id)
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += self._num_filled(sequence.page_table) * self._page_size
        first, last = was_valid // self._page_size, num_valid // self._page_size
        if origin or self._entered:
            self._take(sequence, first, last + 1, entered=origin > 0)
        if not origin:
            for page in sequence.page_table[first:last]:
                self._filled[page] = self._generations[page]
        self._reaches[request_id] = _Reach(
            sequence.num_preemptions, num_valid, tuple(drafted), origin, self._num_losses
        )

    def rewind(self, sequence: Sequence, num_kept: int) -> None:
        """Tokens of `sequence` from `num_kept` on are not those that were there before."""
        reach = self._reach(sequence)
        if reach is None or reach.num_valid <= num_kept:
            return
        request_id = sequence.request.request_id
        if num_kept <= reach.origin:
            self.release(request_id)
        else:
            self._reaches[request_id] = replace(reach, num_valid=num_kept, drafted=())
        for page in sequence.page_table[num_kept // self._page_size :]:
            self._filled.pop(page, None)

    def release(self, request_id: str) -> None:
        """Forget a request; its pages keep their marks."""
        self._leave(request_id)
        self._reaches.pop(request_id, None)

    def _reach(self, sequence: Sequence) -> _Reach | None:
        reach = self._reaches.get(sequence.request.request_id)
        if reach is None or reach.num_preemptions != sequence.num_preemptions:
            return None
        if reach.num_losses != self._num_losses:
            return self._still_there(sequence, reach)
        return reach

    def _still_there(self, sequence: Sequence, reach: _Reach) -> _Reach | None:
        """What a sequence has, after pages were taken away: all or nothing."""
        request_id, size = sequence.request.request_id, self._page_size
        first, stop = reach.origin // size, -(-(reach.num_valid + len(reach.drafted)) // size)
        assert self._pages is not None, "somebody took pages away"
        if not self._pages.has(sequence.page_table[first:stop]):
            self._leave(request_id)
            del self._reaches[request_id]
            return None
        found = self._reaches[request_id] = replace(reach, num_losses=self._num_losses)
        return found

    def _lose(self, pages: Collection[int]) -> None:
        """Pages were given back."""
        self._num_losses += 1
        for page in pages:
            self._filled.pop(page, None)

    def _has_room(self, sequence: Sequence, stop: int) -> bool:
        """Whether all places that are to be fed before `stop` may be written."""
        assert self._pages is not None, "asked only where memory is shared"
        first = self._missing(sequence, self._reach(sequence))[0] // self._page_size
        return self._pages.take(sequence.page_table[first : -(-stop // self._page_size)])

    def _missing(self, sequence: Sequence, reach: _Reach | None) -> tuple[int, int]:
        """The places to be fed: from the first that is not valid to the newest.

        The last place of a page that another request filled is not valid where it depends on the
        next token: that token need not be the same here. Who comes last writes it for all; the
        others' drafts lose next to nothing by that one place.
        """
        end = sequence.num_tokens - self._placeless
        if reach is None:
            valid = self._num_filled(sequence.page_table) * self._page_size - self._joins_next
            return max(0, min(valid, end - 1)), end
        return max(reach.origin, min(_num_valid(sequence, reach), end - 1)), end

    def _num_filled(self, page_table: list[int]) -> int:
        """Leading pages whose KV was written for their present contents."""
        for count, page in enumerate(page_table):
            if self._filled.get(page) != self._generations[page]:
                return count
        return len(page_table)

    def _enter_behind_gaps(self, sequence: Sequence, gaps: FeatureGaps) -> bool:
        """Whether all that has to be fed has features, now that it may have entered later."""
        if not gaps:
            return True
        start, end = self._missing(sequence, self._reach(sequence))
        known = gaps.known_from(sequence.page_table, start, end)
        return known <= start or self._enter_at(sequence, self._page_from(known))

    def _enter_at(self, sequence: Sequence, origin: int) -> bool:
        start, end = self._missing(sequence, self._reach(sequence))
        origin = self._behind_others(sequence, origin, end)
        if not self.limits.enters or not start < origin < end:
            return False
        self._leave(sequence.request.request_id)
        reach = _Reach(sequence.num_preemptions, origin, (), origin, self._num_losses)
        self._reaches[sequence.request.request_id] = reach
        return True

    def _page_from(self, place: int) -> int:
        """The first place of a page from this one on."""
        return -(-place // self._page_size) * self._page_size

    def _behind_others(self, sequence: Sequence, origin: int, end: int) -> int:
        """The first place from `origin` on behind pages that others may read or have entered."""
        table, size = sequence.page_table, self._page_size
        for index in range((end - 1) // size, origin // size - 1, -1):
            page, owner = table[index], self._entered.get(table[index])
            filled = self._filled.get(page) == self._generations[page]
            if filled or owner not in (None, sequence.request.request_id):
                return (index + 1) * size
        return origin

    def _take(self, sequence: Sequence, first: int, stop: int, *, entered: bool) -> None:
        """Pages of these numbers in the table were written: others who had entered there and read
        them enter again, behind them."""
        request_id, size = sequence.request.request_id, self._page_size
        for index, page in enumerate(sequence.page_table[first:stop], first):
            owner = self._entered.pop(page, None)
            if owner is not None and owner != request_id and (reach := self._reaches.get(owner)):
                # Pages are shared from the first one on, so it is the same place to both.
                place = (index + 1) * size
                self._reaches[owner] = replace(reach, num_valid=place, drafted=(), origin=place)
            if entered:
                self._entered[page] = request_id
                self._filled.pop(page, None)

    def _leave(self, request_id: str) -> None:
        """Give up the pages that a request filled after it had entered."""
        reach = self._reaches.get(request_id)
        if reach is not None and reach.origin:
            kept = {page: owner for page, owner in self._entered.items() if owner != request_id}
            self._entered = kept
