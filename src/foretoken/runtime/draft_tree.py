"""The shape of a tree of drafts: who comes after whom, in the forms that a step needs.

A tree is a tuple of parents: node i comes after node parents[i] < i, or after the newest
committed token where that is -1. Knows no tokens. Shapes repeat from step to step, so what is
derived from one is kept.
"""

from dataclasses import dataclass
from functools import lru_cache

ROOT = -1
"""The newest committed token, as a parent."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What follows from a tuple of parents; made by `tree_of`."""

    parents: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    """For each node the nodes from the root's child down to itself."""
    children: tuple[tuple[int, ...], ...]
    """Children in order of index; entry 0 is the root's, entry 1 + i node i's."""
    runs: tuple[range, ...]
    """Nodes cut into runs of consecutive indices, each node the child of the one before it. The
    first run begins at the root and so may begin with node 0 or be empty."""

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        return max(map(len, self.paths), default=0)

    def window_paths(self, length: int) -> tuple[tuple[int, ...], ...]:
        """Paths of `SpanWindow` for a span of `length` committed tokens and these nodes."""
        before = tuple(range(length))
        committed = tuple(before[: i + 1] for i in range(length))
        drafted = tuple((*before, *(length + node for node in path)) for path in self.paths)
        return committed + drafted


@lru_cache(maxsize=256)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """The tree of these parents; asserts that parents come first."""
    paths: list[tuple[int, ...]] = []
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    starts: list[int] = []
    for node, parent in enumerate(parents):
        assert ROOT <= parent < node, (node, parent)
        paths.append((*(paths[parent] if parent >= 0 else ()), node))
        children[parent + 1].append(node)
        if parent != node - 1:
            starts.append(node)
    ends = [*starts, len(parents)]
    runs = (range(ends[0]), *(range(a, b) for a, b in zip(starts, ends[1:], strict=True)))
    return Tree(
        parents=parents,
        paths=tuple(paths),
        children=tuple(tuple(some) for some in children),
        runs=runs,
    )


def is_chain(parents: tuple[int, ...]) -> bool:
    """Whether every node comes after the one before it."""
    return all(parent == node - 1 for node, parent in enumerate(parents))
