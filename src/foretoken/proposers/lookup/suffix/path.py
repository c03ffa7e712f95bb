"""How much of a context stands before a place in a text, and the draft that such places agree on.

Knows tokens only. A window of the newest tokens is read as one big integer, the newest token most
significant; the highest bit in which two windows differ tells how many newest tokens they share,
without a loop over them. The draft follows the most frequent continuation among the places that
match far enough, as long as its frequency allows; of several match lengths the one with the best
expected acceptance wins.

Scores are as in vLLM's `suffix`.
"""

from array import array
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from os.path import commonprefix
from typing import NamedTuple

_MOST_LENGTHS = 4
TOKEN_BITS = 32
TOKEN_BYTES = 4


class RecentTokens:
    """The newest tokens of a text."""

    __slots__ = ("_number", "data", "last", "size")

    def __init__(self, tokens: list[int]) -> None:
        self.data = array("I", tokens).tobytes()
        self.size = len(tokens)
        self.last = tokens[-1]
        self._number = int.from_bytes(self.data, "little")

    def match(self, text: "array[int]", at: int) -> int:
        """How many of the newest tokens stand in `text` right before position `at`."""
        size = min(self.size, at)
        other = int.from_bytes(text[at - size : at].tobytes(), "little")
        differing = (self._number >> (TOKEN_BITS * (self.size - size))) ^ other
        return size - (differing.bit_length() + TOKEN_BITS - 1) // TOKEN_BITS

    def newest(self, count: int) -> bytes:
        """The newest `count` tokens as a key."""
        return self.data[len(self.data) - TOKEN_BYTES * count :]


class Place(NamedTuple):
    """An earlier place of the context."""

    match: int
    """How many of the newest tokens stand before it."""
    text: "array[int]"
    at: int
    """Where in the text it is followed by a token."""
    repeats: bool
    """Whether the text is the context's own, and taken to go on repeating past its end."""

    def following(self, count: int) -> list[int]:
        """Up to `count` tokens, at least one."""
        found = self.text[self.at : self.at + count].tolist()
        if self.repeats:
            period = len(self.text) - self.at
            while len(found) < count:
                found.append(found[len(found) - period])
        return found


class Path(NamedTuple):
    """A draft, and how many of its tokens the counts say will be accepted."""

    tokens: list[int]
    score: float


NO_PATH = Path([], 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLimits:
    """How far a draft may go."""

    per_match: float
    """Drafts per matching token: suffix_decoding_max_spec_factor."""
    least_probability: float
    """suffix_decoding_min_token_prob."""


def best_path(places: list[Place], budget: int, limits: PathLimits) -> Path:
    """The path with the best score over match lengths, the longest of equals.

    Args:
        places: earlier ones, those to prefer among equally frequent tokens first.
        budget: most tokens.
        limits: of length and probability.
    """
    best = NO_PATH
    ordered = sorted(places, key=_match, reverse=True)
    taken = 0
    group: list[list[int]] = []
    for _ in range(_MOST_LENGTHS):
        if taken == len(ordered):
            break
        match = ordered[taken].match
        count = min(budget, int(limits.per_match * match))
        if count <= best.score:
            break
        group = [text[:count] for text in group]
        while taken < len(ordered) and ordered[taken].match == match:
            group.append(ordered[taken].following(count))
            taken += 1
        path = _follow(group, count, limits.least_probability)
        if path.score > best.score:
            best = path
    return best


_match = attrgetter("match")


def _follow(texts: list[list[int]], count: int, least: float) -> Path:
    """The most frequent continuation of non-empty `texts`, at most `count` tokens."""
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    while len(tokens) < count:
        reached = min(len(commonprefix(texts)), count)
        if reached > len(tokens):
            score += probability * (reached - len(tokens))
            tokens = texts[0][:reached]
            continue
        following = Counter(text[reached] for text in texts if len(text) > reached)
        if not following:
            break
        [(token, times)] = following.most_common(1)
        probability *= times / len(texts)
        if probability < least:
            break
        texts = [text for text in texts if len(text) > reached and text[reached] == token]
    return Path(tokens, score)
