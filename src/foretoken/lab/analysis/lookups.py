"""What looking drafts up would have given: n-gram and suffix methods replayed on recorded texts.

Texts are replayed word by word and sign by sign, for tokens are not recorded: an estimate. A step
looks the end of the text up in what was written before, drafts what followed there, and keeps what
the recorded text goes on with. Knows prompts and texts, no server.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

PIECE = re.compile(r"\s*(?:\w{1,6}|[^\w\s])|\s+")
"""About a token: some letters with the space before them, or one sign."""
METHODS = ("ngram", "suffix")
"""The look-up methods that can be replayed on texts."""
LONGEST = 8
MOST_ANSWERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One recorded answer."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """How a method would have done."""

    tokens_per_step: float
    acceptance_rate: float
    draft_share: float
    """Steps that found something to draft."""


class _WordIndex:
    """What followed every run of `shortest` to `longest` pieces last, in all texts it was shown."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[str, ...], tuple[list[str], int]] = {}

    def append(self, pieces: list[str], piece: str) -> None:
        """`piece` follows `pieces`; the runs before it are known from now on."""
        end = len(pieces)
        for length in self._lengths:
            if end >= length:
                self._ends[tuple(pieces[end - length :])] = (pieces, end)
        pieces.append(piece)

    def find(self, pieces: list[str]) -> tuple[list[str], int, int]:
        """Text and place after the longest known run at the end, and its length (0: none)."""
        end = len(pieces)
        for length in self._lengths:
            if length <= end:
                found = self._ends.get(tuple(pieces[end - length :]))
                if found is not None:
                    return *found, length
        return [], 0, 0


def look_up(answers: Sequence[Written], k: int, method: str) -> LookedUp:
    """Replay one method at `k` drafts per step.

    `ngram` looks for the last 5 to 2 pieces in the request's own text; `suffix` for up to LONGEST
    in every request's so far, and drafts no more than it matched. The first MOST_ANSWERS count.
    """
    assert method in METHODS, method
    steps = drafting = drafted = accepted = written = 0
    shared = _WordIndex(1, LONGEST)
    for answer in answers[:MOST_ANSWERS]:
        index = shared if method == "suffix" else _WordIndex(2, 5)
        known: list[str] = []
        for piece in PIECE.findall(answer.prompt):
            index.append(known, piece)
        text = PIECE.findall(answer.text)
        at = 0
        while at < len(text):
            source, place, matched = index.find(known)
            most = min(k, len(text) - at - 1, matched if method == "suffix" else k)
            draft = source[place : place + most] if matched else []
            good = 0
            while good < len(draft) and draft[good] == text[at + good]:
                good += 1
            steps, drafting = steps + 1, drafting + bool(draft)
            drafted, accepted = drafted + len(draft), accepted + good
            for piece in text[at : at + good + 1]:
                index.append(known, piece)
            at += good + 1
        written += len(text)
    return LookedUp(
        tokens_per_step=written / steps if steps else 1.0,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        draft_share=drafting / steps if steps else 0.0,
    )
