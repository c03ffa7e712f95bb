"""What the nodes of a tree cost each kind of head: one pass a level, over the new nodes only.

An MLP speculator keeps a state a node, EAGLE its own output and a slot a node, and heads that
guess all depths at once (Medusa, P-EAGLE) need no further pass at all. Knows nothing of how trees
take their shape.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.proposers.heads.runner import HeadRunner
from foretoken.proposers.tree import SpanTree, TreeSteps
from foretoken.runtime.batch import Span


def _parents(trees: Sequence[SpanTree]) -> list[tuple[int, int]]:
    """(tree, node before it) of every node of the frontiers."""
    return [(t.index, t.parent(node)) for t in trees for node in t.growth.frontier]


def _rows(trees: Sequence[SpanTree]) -> dict[tuple[int, int], int]:
    """Which row of the next logits each node of the frontiers has."""
    nodes = [(tree.index, node) for tree in trees for node in tree.growth.frontier]
    return {key: row for row, key in enumerate(nodes)}


def _tokens(trees: Sequence[SpanTree]) -> list[int]:
    return [tree.growth.tokens[node] for tree in trees for node in tree.growth.frontier]


@final
class DepthSteps(TreeSteps):
    """Logits that depend on the depth of a node alone."""

    def __init__(self, read: Callable[[list[int], int], Tensor], count: int) -> None:
        """Read them by `read`(trees by index, depth), for `count` trees."""
        self._read, self._count = read, count
        self._depth = 0

    def first(self) -> Tensor:
        """Of depth 0."""
        return self._read(list(range(self._count)), 0)

    def after(self, trees: Sequence[SpanTree]) -> Tensor:
        """Of the next depth, the same for all nodes of a tree."""
        self._depth += 1
        owners = [tree.index for tree in trees for _ in tree.growth.frontier]
        return self._read(owners, self._depth)


@final
class MLPTreeSteps(TreeSteps):
    """A stage a level, a state a node."""

    def __init__(self, net: MLPSpeculator, hidden_BD: Tensor, spans: Sequence[Span]) -> None:
        """Start from the hidden states and the newest tokens."""
        self._net = net
        self._newest = [span.sequence.token_ids[-1] for span in spans]
        self._state_FD = net.start(hidden_BD)
        self._row = {(index, -1): index for index in range(len(spans))}
        self._stage = 0

    def first(self) -> Tensor:
        """The first stage."""
        return self._advance(self._newest)

    def after(self, trees: Sequence[SpanTree]) -> Tensor:
        """The next stage, from the states of the nodes before."""
        self._stage += 1
        self._state_FD = self._state_FD[[self._row[key] for key in _parents(trees)]]
        self._row = _rows(trees)
        return self._advance(_tokens(trees))

    def _advance(self, tokens: Sequence[int]) -> Tensor:
        tokens_F = torch.tensor(tokens, device=self._state_FD.device)
        self._state_FD = self._net.advance(self._stage, self._state_FD, tokens_F)
        return self._net.logits(self._stage, self._state_FD).float()


@final
class EagleTreeSteps(TreeSteps):
    """A slot a node, behind the true ones; each node attends to its own branch."""

    def __init__(
        self, runner: HeadRunner, spans: Sequence[Span], first: Callable[[], Tensor]
    ) -> None:
        """Begin with `first`: the outputs at the newest true slot of each span, [B, D]."""
        self._runner, self._first = runner, first
        self._row = {(index, -1): index for index in range(len(spans))}
        self._fed: list[dict[int, int]] = [{} for _ in spans]
        self._output_FD: Tensor

    def first(self) -> Tensor:
        """From the target's features."""
        self._output_FD = self._first()
        return self._runner.logits(self._output_FD)

    def after(self, trees: Sequence[SpanTree]) -> Tensor:
        """From the outputs at the nodes before."""
        hidden_FD = self._output_FD[[self._row[key] for key in _parents(trees)]]
        self._row = _rows(trees)
        layouts = [self._layout(tree) for tree in trees]
        self._output_FD = self._runner.forward(layouts, _tokens(trees), hidden_FD)
        return self._runner.logits(self._output_FD)

    def _layout(self, tree: SpanTree) -> SpanLayout:
        """The frontier behind the nodes that were fed before."""
        growth, fed = tree.growth, self._fed[tree.index]
        known = len(fed)
        for node in growth.frontier:
            fed[node] = len(fed)
        return SpanLayout(
            start=tree.span.sequence.num_tokens - 1,
            num_tokens=len(growth.frontier),
            page_table=tree.span.sequence.page_table,
            paths=tuple(tuple(fed[n] for n in growth.path(node)) for node in growth.frontier),
            known=known,
        )
