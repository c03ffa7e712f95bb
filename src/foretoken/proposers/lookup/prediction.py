"""Drafts from what a request says its output will probably contain, such as the file it edits.

A pointer runs along the prediction while the output agrees with it. After a difference it is set
again where the newest output tokens stand in the prediction: the longest n-gram wins, then the
place nearest to where the output left it, which finds the way around replaced, inserted and
deleted pieces. Until then there is no draft. Invariant: the pointer depends on committed tokens
only.

The idea is that of OpenAI's predicted outputs; drafts are one-hot.
"""

from bisect import bisect_left

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.choose.offers import PREDICTION
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence

_REACHES = {4: 1 << 30, 3: 4096, 2: 128, 1: 16}
"""How far from the place of the miss an n-gram of each length may be found again, in tokens."""
_SURE = 4
"""After this many agreeing tokens in a row drafts are as long as the budget allows."""


class _Follower:
    """Where one output stands in its prediction."""

    __slots__ = ("_anchor", "_at", "_expected", "_num_seen", "_places", "_run")

    def __init__(self, expected: tuple[int, ...]) -> None:
        self._expected = expected
        self._at: int | None = 0
        self._anchor = 0
        self._run = _SURE
        self._num_seen = 0
        self._places: dict[tuple[int, ...], list[int]] | None = None

    def follow(self, sequence: Sequence) -> None:
        """Take over the output tokens that were committed since the last call."""
        first = sequence.num_prompt + self._num_seen
        for token in sequence.token_ids[first:]:
            self._advance(token)
        self._num_seen = sequence.num_output
        if self._at is None:
            self._find_again(sequence)

    def draft(self, budget: int) -> tuple[int, ...]:
        """The next expected tokens; few of them soon after a miss."""
        if self._at is None:
            return ()
        count = budget if self._run >= _SURE else min(budget, 1 + 2 * self._run)
        return self._expected[self._at : self._at + count]

    def _advance(self, token: int) -> None:
        at = self._at
        if at is None:
            return
        if at < len(self._expected) and self._expected[at] == token:
            self._at = at + 1
            self._run += 1
        else:
            self._at, self._anchor, self._run = None, at, 0

    def _find_again(self, sequence: Sequence) -> None:
        if self._places is None:
            self._places = _places(self._expected)
        for length, reach in _REACHES.items():
            if sequence.num_output < length:
                continue
            ends = self._places.get(tuple(sequence.token_ids[-length:]), [])
            found = _nearest(ends, self._anchor, reach)
            if found is not None:
                self._at, self._run = found, length - 1
                return


class PredictionProposer(Proposer):
    """Serves the requests that carry a prediction, whatever the engine's drafters are."""

    name = PREDICTION
    looks_up = True

    def __init__(self) -> None:
        self._followers: dict[str, _Follower] = {}

    def propose(self, context: Context) -> Draft:
        ids = [self._draft(span) for span in context.spans]
        return Draft(
            ids=tuple(ids), drafter=self.name, promises=tuple(float(len(one)) for one in ids)
        )

    def release(self, request_id: str) -> None:
        self._followers.pop(request_id, None)

    def _draft(self, span: Span) -> tuple[int, ...]:
        request = span.sequence.request
        if span.draft_budget == 0 or not request.prediction_ids:
            return ()
        follower = self._followers.get(request.request_id)
        if follower is None:
            follower = self._followers[request.request_id] = _Follower(request.prediction_ids)
        follower.follow(span.sequence)
        return follower.draft(span.draft_budget)


def _places(expected: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    """Ascending positions after each n-gram of the lengths looked for."""
    places: dict[tuple[int, ...], list[int]] = {}
    for length in _REACHES:
        for end in range(length, len(expected)):
            places.setdefault(expected[end - length : end], []).append(end)
    return places


def _nearest(ends: list[int], anchor: int, reach: int) -> int | None:
    """The first place from `anchor` on within reach, else the last one before it within half."""
    index = bisect_left(ends, anchor)
    if index < len(ends) and ends[index] - anchor <= reach:
        return ends[index]
    if index > 0 and anchor - ends[index - 1] <= reach // 2:
        return ends[index - 1]
    return None
