"""What a tree of drafts is while it grows, level by level.

How it takes its shape is the business of its `Growth`, and `tree_shapes.py` has the two ways. Knows
nothing of where logits come from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foretoken.runtime.batch import Span
from foretoken.runtime.candidates import Candidates, OpenNode
from foretoken.runtime.rows import Rows


@dataclass(frozen=True, slots=True)
class Grown:
    """A finished tree, as in `Draft`."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    probs: list[Tensor]
    """What each token was drawn from, [V]; empty: they are fixed."""


class Growth(ABC):
    """One span's tree while it is drafted; node -1 is the newest committed token.

    Invariant: whether a drawn token stays depends only on what was known before it was drawn.
    """

    tokens: dict[int, int]
    """By node."""
    frontier: list[int]
    """Nodes of the newest level that are to have children, in order; the root at first."""
    fixed: bool
    """Whether candidates must be the best ones even where the rule could weigh drawn ones."""

    @property
    @abstractmethod
    def inner(self) -> list[int]:
        """Drafted nodes that have children or are to have some, the first branch first."""

    @abstractmethod
    def count(self, node: int) -> int:
        """How many candidates a node of the frontier needs."""

    @abstractmethod
    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`."""

    @abstractmethod
    def grow(self, chosen: Sequence[Candidates]) -> None:
        """Add a level: candidates of each node of the frontier, in its order."""

    @abstractmethod
    def finish(self) -> Grown:
        """The tree that is to be checked, first branches first."""


class TreeShape(ABC):
    """How trees of a drafter take their shape."""

    setting: ClassVar[str]
    """The key of `speculative_config` that says how deep they are."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Most drafts on a branch."""

    @abstractmethod
    def start(self, budget: int) -> Growth:
        """A tree of at most `budget` nodes, with nothing but its root."""


@dataclass(frozen=True, slots=True)
class SpanTree:
    """One span and its tree."""

    index: int
    """Its place among the trees of the call."""
    span: Span
    growth: Growth

    def parent(self, node: int) -> int:
        """The node that `node` comes after."""
        path = self.growth.path(node)
        return path[-2] if len(path) > 1 else -1

    def fed_branch(self) -> list[int]:
        """Tokens of the first branch that were fed. They lie where those of a chain would; an
        accepted branch beside it is fed again."""
        found: list[int] = []
        for place, node in enumerate(self.growth.inner):
            if len(self.growth.path(node)) != place + 1:
                break
            found.append(self.growth.tokens[node])
        return found

    def open_nodes(self) -> list[OpenNode]:
        """The nodes of the frontier, with what their children are chosen by."""
        found = []
        for node in self.growth.frontier:
            path = tuple(self.growth.tokens[n] for n in self.growth.path(node))
            row = Rows(sequence=self.span.sequence, drafts=path, first=len(path))
            found.append(OpenNode(row, self.growth.count(node), node + 1, self.growth.fixed))
        return found


def newest_tokens(trees: Sequence[SpanTree]) -> list[int]:
    """The tokens of the frontiers, tree after tree."""
    return [tree.growth.tokens[node] for tree in trees for node in tree.growth.frontier]
