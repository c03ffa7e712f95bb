"""A tree of drafts whose shape is known beforehand: `choices`, in the manner of Medusa.

A choice is a path of ranks: (0,) is the best candidate for the next token, (0, 1) the second best
after that one. Knows ranks, not tokens. Nodes are in depth-first order with first choices first,
so that node i of the first branch is the i-th token of a chain, and the first n nodes of a tree
are a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, final

from torch import Tensor

from foretoken.proposers.tree import Grown, Growth, TreeShape
from foretoken.runtime.branching import Candidates

Choices = tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True, slots=True)
class StaticTree(TreeShape):
    """Nodes by index."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    """Which candidate of its parent each node is."""

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> Self:
        """From paths of ranks, each with all of its beginnings among them."""
        paths = sorted(tuple(path) for path in choices)
        index = {path: i for i, path in enumerate(paths)}
        index[()] = -1
        return cls(
            parents=tuple(index[path[:-1]] for path in paths),
            ranks=tuple(path[-1] for path in paths),
        )

    @property
    def num_nodes(self) -> int:
        """Drafts of a whole tree."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Of the longest path."""
        return max(len(self.path(node)) for node in range(self.num_nodes))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`."""
        return _path(self.parents, node)

    def forks(self, budget: int) -> dict[int, list[int]]:
        """Children of every node (-1: the root) that has some, among the first `budget` nodes."""
        return _forks(self.parents[:budget])

    def start(self, budget: int) -> "StaticGrowth":
        """The first `budget` nodes of the shape."""
        return StaticGrowth(self, budget)


@lru_cache(maxsize=256)
def _forks(parents: tuple[int, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


@lru_cache(maxsize=1024)
def _path(parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    return (*_path(parents, parents[node]), node) if node >= 0 else ()


@final
class StaticGrowth(Growth):
    """A tree of a static shape; nodes without a candidate, and what is below, are left out."""

    def __init__(self, shape: StaticTree, budget: int) -> None:
        """Nothing but the root, for the first `budget` nodes of `shape`."""
        self.shape = shape
        self.fixed = False
        self.tokens: dict[int, int] = {}
        self.frontier = [-1]
        self._forks = shape.forks(budget)
        self._probs: dict[int, Tensor] = {}

    @property
    def inner(self) -> list[int]:
        """In order of index."""
        return [node for node in sorted(self.tokens) if node in self._forks]

    def count(self, node: int) -> int:
        """Up to the highest rank among the node's children."""
        return max(self.shape.ranks[child] for child in self._forks[node]) + 1

    def path(self, node: int) -> tuple[int, ...]:
        """In the shape."""
        return self.shape.path(node)

    def grow(self, chosen: Sequence[Candidates]) -> None:
        """Fill the children of the frontier, as far as there are candidates."""
        added = []
        for parent, found in zip(self.frontier, chosen, strict=True):
            for child in self._forks[parent]:
                rank = self.shape.ranks[child]
                if rank < len(found.ids):
                    self.tokens[child] = found.ids[rank]
                    added.append(child)
                    if found.probs_CV is not None:
                        self._probs[child] = found.probs_CV[rank]
        self.frontier = sorted(child for child in added if child in self._forks)

    def finish(self) -> Grown:
        """The nodes that were filled, in order of index."""
        nodes = sorted(self.tokens)
        place = {node: i for i, node in enumerate(nodes)}
        place[-1] = -1
        return Grown(
            ids=tuple(self.tokens[node] for node in nodes),
            parents=tuple(place[self.shape.parents[node]] for node in nodes),
            probs=[self._probs[node] for node in nodes if node in self._probs],
        )
