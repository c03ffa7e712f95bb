"""A draft's outcome as trials by depth, and chances from such trials.

Owns what a draft of d tokens of which a were accepted says: a success at each depth from 1 to a, a
failure at a + 1 if a < d, and nothing beyond. Depths share buckets, which have one chance each.
Knows neither requests nor drafters.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

LAST_DEPTHS = (1, 2, 4, 8, 1 << 30)
"""Last depth of each bucket; drafts of one bucket are taken to have one chance."""
BUCKETS = len(LAST_DEPTHS)
FADE, CLASS_FADE = 0.98, 0.998
"""What a trial's weight is multiplied by at each later one of its bucket: of a request, a class."""
STRIDE = 2 * BUCKETS + 1
"""Numbers of a row: accepted by bucket, trials by bucket, weight of the class. Rows of classes
hold chances by bucket."""
BUCKET_OF_DEPTH = np.searchsorted(LAST_DEPTHS, np.arange(1, 257))


class BucketTrials(NamedTuple):
    """The trials of one draft that fall into one bucket."""

    bucket: int
    accepted: int
    refused: int
    fade: float
    """What these trials leave of the weight of earlier ones."""
    new_accepted: float
    """Accepted ones, faded by those behind them."""
    new_trials: float
    class_fade: float
    """The fade of trials of a class."""


@cache
def trials_of_draft(num_drafted: int, num_accepted: int) -> tuple[BucketTrials, ...]:
    """A draft as trials: one accepted at each depth reached, one refused behind the last of them
    unless the draft ended there, and nothing deeper."""
    outcomes = (True,) * num_accepted + (False,) * (num_accepted < num_drafted)
    found, first = [], 0
    for bucket, last in enumerate(LAST_DEPTHS):
        own = outcomes[first:last]
        first = last
        if own:
            # Later ones count for more.
            faded = [FADE**later for later in range(len(own))][::-1]
            found.append(
                BucketTrials(
                    bucket,
                    sum(own),
                    len(own) - sum(own),
                    FADE ** len(own),
                    sum(weight for weight, accepted in zip(faded, own, strict=True) if accepted),
                    sum(faded),
                    CLASS_FADE ** len(own),
                )
            )
    return tuple(found)


def chances_by_bucket(
    accepted: Sequence[float], trials: Sequence[float], prior: Sequence[float], weight: float
) -> list[float]:
    """Chances by bucket from trials and a prior that counts for `weight` of them.

    The prior of a bucket is first moved, on the scale of odds, by how the trials of all other
    buckets turned out against theirs: a request that is better at depth 1 is so at depth 2.
    """
    expected = [count * chance for count, chance in zip(trials, prior, strict=True)]
    all_accepted, all_trials, all_expected = sum(accepted), sum(trials), sum(expected)
    chances = []
    for kept, count, mean, chance in zip(accepted, trials, expected, prior, strict=True):
        usual = weight * chance
        others = all_trials - count + weight
        others_kept = all_accepted - kept + usual
        others_mean = all_expected - mean + usual
        odds = chance * others_kept * (others - others_mean)
        odds /= (1.0 - chance) * (others - others_kept) * others_mean
        chances.append((kept + weight * odds / (1.0 + odds)) / (count + weight))
    return chances


def chances_of_rows(
    accepted: NDArray[np.float64],
    trials: NDArray[np.float64],
    prior: NDArray[np.float64],
    weight: NDArray[np.float64],
) -> NDArray[np.float64]:
    """`chances_by_bucket` of many rows at once: [N, buckets], and [N, 1] weights."""
    usual = weight * prior
    expected = trials * prior
    others = trials.sum(1, keepdims=True) + weight - trials
    others_kept = accepted.sum(1, keepdims=True) - accepted + usual
    others_mean = expected.sum(1, keepdims=True) - expected + usual
    better = prior * others_kept * (others - others_mean)
    worse = (1.0 - prior) * (others - others_kept) * others_mean
    chances: NDArray[np.float64] = accepted + weight * (better / (better + worse))
    chances /= trials + weight
    return chances


@final
class NumberRows:
    """Rows of numbers by index. Python reads and writes single ones, NumPy reads whole rows."""

    def __init__(self) -> None:
        """No rows yet."""
        self.cells = array("d")
        self._free: list[int] = []

    def take(self) -> int:
        """A row of zeros, by the place of its first number."""
        if not self._free:
            begin = len(self.cells)
            self.cells.extend([0.0] * (64 * STRIDE))
            self._free = list(range(len(self.cells) - STRIDE, begin - 1, -STRIDE))
        row = self._free.pop()
        self.cells[row : row + STRIDE] = array("d", [0.0] * STRIDE)
        return row

    def give_back(self, row: int) -> None:
        """The row is not needed any more."""
        self._free.append(row)

    def read(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """A copy of rows: [len(rows), stride]."""
        whole: NDArray[np.float64] = np.frombuffer(self.cells).reshape(-1, STRIDE)
        return whole.take(np.array(rows, np.intp) // STRIDE, axis=0)

    @property
    def in_use(self) -> int:
        """Rows taken and not given back."""
        return len(self.cells) // STRIDE - len(self._free)
