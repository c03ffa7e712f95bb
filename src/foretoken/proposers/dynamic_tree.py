"""A tree of drafts that takes its shape from the drafter's own confidence, as EAGLE-2 grows it.

Every level gives the most promising nodes of the newest one `top_k` children each; of all nodes
the most promising are checked. What a node promises is the product of the probabilities along its
branch. Candidates are the best ones and not drawn, so that which nodes stay follows from what was
known before, whatever the rule.

Source: Li et al. 2024 (EAGLE-2, arXiv 2406.16858).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from foretoken.proposers.tree import Grown, Growth, TreeShape
from foretoken.runtime.branching import Candidates


@final
@dataclass(frozen=True, slots=True)
class DynamicTree(TreeShape):
    """How wide and how deep such trees may be."""

    top_k: int
    """Nodes of a level that have children, and children of each."""
    most: int
    """Most drafts on a branch."""

    @property
    def depth(self) -> int:
        """Most drafts on a branch."""
        return self.most

    def start(self, budget: int) -> "DynamicGrowth":
        """Also at most `budget` nodes get children, since each of those takes a place in the KV."""
        return DynamicGrowth(self, budget)


@final
class DynamicGrowth(Growth):
    """Nodes are numbered in the order in which they were found, parents first."""

    def __init__(self, shape: DynamicTree, budget: int) -> None:
        """Nothing but the root."""
        self._shape, self._budget = shape, budget
        self.fixed = True
        self.tokens: dict[int, int] = {}
        self.frontier = [-1]
        self._parents: list[int] = []
        self._ranks: list[tuple[int, ...]] = []
        self._promises: list[float] = []
        self._inner: list[int] = []

    @property
    def inner(self) -> list[int]:
        """In order of their paths of ranks."""
        return sorted(self._inner, key=self._ranks.__getitem__)

    def count(self, node: int) -> int:
        """The same for all nodes."""
        return self._shape.top_k

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self._parents[node]
        return tuple(reversed(found))

    def grow(self, chosen: Sequence[Candidates]) -> None:
        """Add candidates; the best of them, if any can be in the finished tree, go on."""
        first = len(self._parents)
        for parent, found in zip(self.frontier, chosen, strict=True):
            assert found.logs is not None, "asked for by fixed forks"
            before = self._promises[parent] if parent >= 0 else 0.0
            ranks = self._ranks[parent] if parent >= 0 else ()
            for rank, (token, log) in enumerate(zip(found.ids, found.logs, strict=True)):
                self.tokens[len(self._parents)] = token
                self._parents.append(parent)
                self._ranks.append((*ranks, rank))
                self._promises.append(before + log)
        room = self._budget - len(self._inner)
        new = [node for node in self._best() if node >= first]
        deeper = bool(new) and len(self._ranks[new[0]]) < min(self._shape.most, self._budget)
        self.frontier = sorted(new[: min(self._shape.top_k, room)]) if deeper else []
        self._inner.extend(self.frontier)

    def finish(self) -> Grown:
        """The nodes that promise most, in order of their paths of ranks."""
        nodes = sorted(self._best(), key=self._ranks.__getitem__)
        place = {node: i for i, node in enumerate(nodes)}
        place[-1] = -1
        return Grown(
            ids=tuple(self.tokens[node] for node in nodes),
            parents=tuple(place[self._parents[node]] for node in nodes),
            probs=[],
        )

    def _best(self) -> list[int]:
        """As many nodes as may be checked, the most promising first; parents before children."""
        order = sorted(range(len(self._parents)), key=lambda n: (-self._promises[n], n))
        return order[: self._budget]
