"""A tree of drafts whose shape is known beforehand: `choices`, in the manner of Medusa.

A choice is a path of ranks: (0,) is the best candidate for the next token, (0, 1) the second best
after that one. Knows ranks, not tokens. Nodes are in depth-first order with first choices first,
so that node i of the first branch is the i-th token of a chain, and the first n nodes of a tree
are a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

Choices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StaticTree:
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

    def forks(self, budget: int) -> dict[int, list[int]]:
        """Children of every node (-1: the root) that has some, among the first `budget` nodes."""
        return _forks(self.parents[:budget])


@lru_cache(maxsize=256)
def _forks(parents: tuple[int, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


class GrowingTree:
    """One span's tree while it is drafted, level by level."""

    def __init__(self, shape: StaticTree, budget: int) -> None:
        """Nothing but the root, for the first `budget` nodes of `shape`."""
        self.shape = shape
        self.tokens: dict[int, int] = {}
        """By node of the shape; nodes without a candidate, and what is below, are left out."""
        self.frontier = [-1]
        """Nodes of the newest level that have children in the shape; the root at first."""
        self._forks = shape.forks(budget)

    @property
    def inner(self) -> list[int]:
        """Drafted nodes that may have children, in order: their logits are wanted."""
        return [node for node in sorted(self.tokens) if node in self._forks]

    def count(self, node: int) -> int:
        """How many candidates a node needs."""
        return max(self.shape.ranks[child] for child in self.children(node)) + 1

    def children(self, node: int) -> list[int]:
        """The node's children in the shape."""
        return self._forks[node]

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.shape.parents[node]
        return tuple(reversed(found))

    def grow(self, chosen: dict[int, tuple[int, ...]]) -> list[tuple[int, int, int]]:
        """Add a level: candidates of each node of the frontier.

        Returns:
            (node, its parent, its rank) of every node that was added.
        """
        added = []
        for parent, ids in chosen.items():
            for child in self.children(parent):
                rank = self.shape.ranks[child]
                if rank < len(ids):
                    self.tokens[child] = ids[rank]
                    added.append((child, parent, rank))
        self.frontier = sorted(child for child, _, _ in added if child in self._forks)
        return added

    def finish(self) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """Ids and parents as in `Draft`, and the nodes of the shape that they are."""
        nodes = sorted(self.tokens)
        place = {node: i for i, node in enumerate(nodes)}
        place[-1] = -1
        parents = tuple(place[self.shape.parents[node]] for node in nodes)
        return tuple(self.tokens[node] for node in nodes), parents, nodes
