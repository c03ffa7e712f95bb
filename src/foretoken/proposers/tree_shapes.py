"""The two ways in which trees of drafts take their shape.

Static: `choices`, in the manner of Medusa, known beforehand. A choice is a path of ranks: (0,) is
the best candidate for the next token, (0, 1) the second best after that one. Nodes are in
depth-first order with first choices first, so that node i of the first branch is the i-th token of
a chain, and the first n nodes of a tree are a tree.

Dynamic: from the drafter's own confidence, as EAGLE-2 grows it. Every level gives the most
promising nodes of the newest one `top_k` children each; of all nodes the most promising are
checked. What a node promises is the product of the probabilities along its branch. Candidates are
the best ones and not drawn, so that which nodes stay follows from what was known before, whatever
the rule.

Sources: Cai et al. 2024 (Medusa, arXiv 2401.10774); Li et al. 2024 (EAGLE-2, arXiv 2406.16858).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, final

from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.proposers.tree import Grown, Growth, TreeShape
from foretoken.runtime.candidates import Candidates
from foretoken.runtime.draft_tree import tree_of


def tree_shape(config: DrafterConfig) -> TreeShape | None:
    """The shape of the trees that a drafter is to draft; None: chains."""
    if config.tree.choices is not None:
        return StaticTree.of(config.tree.choices)
    if config.tree.tree_top_k is not None:
        return DynamicTree(config.tree.tree_top_k, config.tree.tree_depth)
    return None


@final
@dataclass(frozen=True, slots=True)
class StaticTree(TreeShape):
    """Nodes by index."""

    setting: ClassVar[str] = "choices"
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
    def depth(self) -> int:
        return tree_of(self.parents).depth

    def start(self, budget: int) -> "StaticGrowth":
        return StaticGrowth(self, budget)


@final
class StaticGrowth(Growth):
    """A tree of a static shape; nodes without a candidate, and what is below, are left out."""

    def __init__(self, shape: StaticTree, budget: int) -> None:
        """Nothing but the root, for the first `budget` nodes of `shape`; parents are among them."""
        self._shape, self._tree = shape, tree_of(shape.parents[:budget])
        self.fixed = False
        self.tokens: dict[int, int] = {}
        self.frontier = [-1]
        self._probs: dict[int, Tensor] = {}

    @property
    def inner(self) -> list[int]:
        return [node for node in sorted(self.tokens) if self._children(node)]

    def count(self, node: int) -> int:
        return max(self._shape.ranks[child] for child in self._children(node)) + 1

    def path(self, node: int) -> tuple[int, ...]:
        return self._tree.paths[node] if node >= 0 else ()

    def grow(self, chosen: Sequence[Candidates]) -> None:
        added = []
        for parent, found in zip(self.frontier, chosen, strict=True):
            for child in self._children(parent):
                rank = self._shape.ranks[child]
                if rank < len(found.ids):
                    self.tokens[child] = found.ids[rank]
                    added.append(child)
                    if found.probs_CV is not None:
                        self._probs[child] = found.probs_CV[rank]
        self.frontier = sorted(child for child in added if self._children(child))

    def finish(self) -> Grown:
        """The nodes that were filled, in order of index; they may be drawn, so all are checked."""
        nodes = sorted(self.tokens)
        place = {node: i for i, node in enumerate(nodes)}
        place[-1] = -1
        return Grown(
            ids=tuple(self.tokens[node] for node in nodes),
            parents=tuple(place[self._shape.parents[node]] for node in nodes),
            probs=[self._probs[node] for node in nodes if node in self._probs],
        )

    def _children(self, node: int) -> tuple[int, ...]:
        return self._tree.children[node + 1]


@final
@dataclass(frozen=True, slots=True)
class DynamicTree(TreeShape):
    """How wide and how deep trees may be that grow by confidence."""

    setting: ClassVar[str] = "tree_depth"
    top_k: int
    """Nodes of a level that have children, and children of each."""
    most: int
    """Most drafts on a branch."""

    @property
    def depth(self) -> int:
        return self.most

    def start(self, budget: int) -> "DynamicGrowth":
        """Also at most `budget` nodes get children, since each of those takes a place in the KV."""
        return DynamicGrowth(self, budget)


@final
class DynamicGrowth(Growth):
    """Nodes are numbered in the order in which they were found, parents first."""

    def __init__(self, shape: DynamicTree, budget: int) -> None:
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
        return sorted(self._inner, key=self._ranks.__getitem__)

    def count(self, node: int) -> int:
        return self._shape.top_k

    def path(self, node: int) -> tuple[int, ...]:
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self._parents[node]
        return tuple(reversed(found))

    def grow(self, chosen: Sequence[Candidates]) -> None:
        """Add candidates; the best of them, if any can be in the finished tree, go on."""
        first = len(self._parents)
        for parent, found in zip(self.frontier, chosen, strict=True):
            assert found.logs is not None, "asked for, since these places are fixed"
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
        """The most promising nodes, as many as may be checked; parents before children."""
        order = sorted(range(len(self._parents)), key=lambda n: (-self._promises[n], n))
        return order[: self._budget]
