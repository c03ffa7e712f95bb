"""Merges of a SentencePiece vocabulary, which stores scores in their place.

SentencePiece joins the two neighbours whose union has the best score. As merges that is: every way
to cut a token into two tokens, ordered by the token's score. A Gemma has 2 million places to
cut and half a million merges, so all of it is done on arrays: pieces are compared by their hashes,
and no piece becomes a Python object. Knows no files.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_Hashes = npt.NDArray[np.uint64]

_BASE: Final = 0x9E3779B97F4A7C15
"""Of the polynomial whose value, modulo 2^64, is the hash of a piece; odd, so it has an inverse."""
_TABLE_BITS: Final = 22
_MOST_MERGES: Final = 1 << 22
"""Eight times what Gemma has."""


class Merges(NamedTuple):
    """Pairs of tokens, the one to join first at the beginning."""

    left: Ids
    right: Ids


class Pieces(NamedTuple):
    """Texts of tokens in one array of bytes."""

    raw: npt.NDArray[np.uint8]
    starts: Ids
    ends: Ids
    """Where each token begins and ends in `raw`, ascending."""


def merges_of_scores(pieces: Pieces, scores: npt.NDArray[np.float64], ids: Ids) -> Merges:
    """Every pair of tokens that is a token, in the order of transformers' converters.

    Args:
        pieces: the bytes of all tokens.
        scores: of all tokens; higher ones are joined first.
        ids: ascending; the tokens that may be joined, and joined to.

    Raises:
        ValueError: there are too many.

    Returns:
        Their ids. Of equal scores the longer left part goes first, then the longer right part.
    """
    starts, ends = pieces.starts[ids], pieces.ends[ids]
    hashes = _Prefixes.of(pieces.raw)
    known = _Known.of(hashes.between(starts, ends))
    at = _places_to_cut(pieces.raw, starts, ends)
    owner = np.searchsorted(starts, at, "right") - 1
    before = hashes.between(starts[owner], at)
    likely = known.may_have(before)
    at, owner, before = at[likely], owner[likely], before[likely]
    behind = hashes.between(at, ends[owner])
    likely = known.may_have(behind)
    at, owner = at[likely], owner[likely]
    if len(at) > _MOST_MERGES:
        raise ValueError(f"{len(at)} ways to cut a token in two, more than {_MOST_MERGES}")
    left, has_left = known.find(before[likely])
    right, has_right = known.find(behind[likely])
    both = has_left & has_right
    at, owner, left, right = at[both], owner[both], left[both], right[both]
    _, ranks = np.unique(-scores[ids], return_inverse=True)
    letters = np.cumsum(_begins_letter(pieces.raw), dtype=np.int64)
    left_size = letters[at - 1] - letters[starts[owner]] + 1
    right_size = letters[ends[owner] - 1] - letters[at] + 1
    order = np.lexsort((-right_size, -left_size, ranks[owner]))
    return Merges(ids[left[order]], ids[right[order]])


def _begins_letter(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (raw & 0xC0) != 0x80
    return found


def _places_to_cut(raw: npt.NDArray[np.uint8], starts: Ids, ends: Ids) -> Ids:
    """Beginnings of characters within tokens, the first of each left out."""
    depth = np.zeros(len(raw) + 1, np.int8)
    filled = ends > starts
    depth[starts[filled]] += 1
    depth[ends[filled]] -= 1
    within = np.cumsum(depth[:-1], dtype=np.int8).astype(bool) & _begins_letter(raw)
    within[starts[filled]] = False
    return np.flatnonzero(within)


class _Prefixes(NamedTuple):
    """What the hash of any stretch of bytes is made from."""

    sums: _Hashes
    """Up to each byte, of the bytes times powers of the base."""
    inverse: _Hashes
    """Powers of the base's inverse."""

    @classmethod
    def of(cls, raw: npt.NDArray[np.uint8]) -> "_Prefixes":
        sums = np.zeros(len(raw) + 1, np.uint64)
        terms = raw.astype(np.uint64) + np.uint64(1)
        terms *= _powers(_BASE, len(raw))
        np.cumsum(terms, out=sums[1:])
        return cls(sums, _powers(pow(_BASE, -1, 1 << 64), len(raw) + 1))

    def between(self, starts: Ids, ends: Ids) -> _Hashes:
        return (self.sums[ends] - self.sums[starts]) * self.inverse[starts]


def _powers(base: int, count: int) -> _Hashes:
    found = np.full(count, base, np.uint64)
    found[:1] = 1
    return np.cumprod(found)


class _Known(NamedTuple):
    """A table of hashes."""

    hashes: _Hashes
    """Ascending."""
    order: Ids
    """Which of those given each is."""
    likely: npt.NDArray[np.bool_]
    """Whether any has these upper bits."""

    @classmethod
    def of(cls, given: _Hashes) -> "_Known":
        order = np.argsort(given)
        likely = np.zeros(1 << _TABLE_BITS, bool)
        likely[_upper(given)] = True
        return cls(given[order], order, likely)

    def may_have(self, wanted: _Hashes) -> npt.NDArray[np.bool_]:
        """False for nearly all that are not there: quicker than `find`."""
        return self.likely[_upper(wanted)]

    def find(self, wanted: _Hashes) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Which of those given each is, and whether it is any."""
        place = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        return self.order[place], self.hashes[place] == wanted


def _upper(hashes: _Hashes) -> Ids:
    return (hashes >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
