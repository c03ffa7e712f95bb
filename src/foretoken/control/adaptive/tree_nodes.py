"""The nodes that a drafter's trees are planned from, and what each of them is worth.

A node is worth the chance that its whole branch is accepted. The first candidate of a place has the
request's own chance at that depth, another one what is left of it, by what other candidates of the
drafter were worth so far. Knows neither tokens nor costs.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from foretoken.control.adaptive.allocation import Counts
from foretoken.control.learned.regression import Floats


@final
@dataclass(frozen=True, slots=True)
class TreeNodes:
    """K nodes: parents and better candidates of a place come first."""

    levels_K: Counts
    """1 for those after the newest token."""
    _by_level: tuple[tuple[Counts, ...], ...]
    """For each level: its nodes, their parents, and which candidate each of them is."""

    @property
    def depth(self) -> int:
        """Levels."""
        return len(self._by_level)

    @classmethod
    def of(cls, paths: Seq[tuple[int, ...]]) -> Self:
        """From paths of ranks, in order; the beginnings of each stand before it."""
        index = {path: node for node, path in enumerate(paths)}
        levels = np.array([len(path) for path in paths], np.int64)
        by_level = list[tuple[Counts, ...]]()
        for level in range(1, int(levels.max()) + 1):
            some = [path for path in paths if len(path) == level]
            nodes = [index[path] for path in some]
            parents = [index.get(path[:-1], -1) for path in some]
            columns = (nodes, parents, [path[-1] for path in some])
            by_level.append(tuple(np.array(column, np.int64) for column in columns))
        return cls(levels, tuple(by_level))

    def survival(self, chances_ND: Floats, others: Seq[float]) -> Floats:
        """The chance of each node's branch, [N, K].

        Args:
            chances_ND: of the first candidate at each depth, given all before it.
            others: of the second, third ... candidate, where those before it are refused.
        """
        others_R = np.array(others)
        others_R[0] = 0.0
        # Another candidate has its turn where all before it are refused.
        turn_R = np.cumprod(np.concatenate(([1.0], 1.0 - others_R[:-1])))
        found_NK = np.empty((len(chances_ND), len(self.levels_K)))
        before_NK: Floats = np.ones((len(chances_ND), 1))
        for depth, (nodes, parents, ranks) in enumerate(self._by_level):
            first_N1 = chances_ND[:, depth, None]
            chances_NR = (1.0 - first_N1) * (turn_R * others_R)
            chances_NR[:, :1] = first_N1
            # Drafters put the best first: a later candidate is never worth more.
            np.minimum.accumulate(chances_NR, axis=1, out=chances_NR)
            if depth:
                before_NK = found_NK[:, parents]
            ranks = np.minimum(ranks, len(others_R) - 1)
            found_NK[:, nodes] = before_NK * chances_NR[:, ranks]
        return found_NK
