"""Which branch of a tree of drafts stays: tests in a fixed order, one uniform number each.

Two rules that give every token the target's distribution. `RecursiveWalk` goes down from the
root and tests the children of a node in turn, each rejection leaving what the child's
distribution did not cover (SpecInfer, arXiv 2305.09781; without replacement Sequoia, arXiv
2402.12374; fixed children EAGLE, arXiv 2401.15077). `Traversal` goes up from the leaves and tests
whole paths (Weng et al. 2025, arXiv 2505.12398); on a chain it is block verification.

A node's children are drawn in the order in which they stand, each from a distribution that may
depend on its elder siblings: without replacement, or, where children are fixed by what came
before, from one that has all mass on them. Knows probabilities and tokens, not requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.ops.logits import NEVER


class Nodes:
    """A tree of drafts with its distributions; node -1 is the root."""

    __slots__ = ("_drafted_KV", "_logits_NV", "children", "ids")

    def __init__(
        self,
        ids: Sequence[int],
        children: Sequence[Sequence[int]],
        logits_NV: Tensor,
        drafted_KV: Tensor | None,
    ) -> None:
        """Describe a tree of K nodes.

        Args:
            ids: the token of each node.
            children: of the root, then of each node.
            logits_NV: processed target logits after the root, then after each node; N = K + 1.
            drafted_KV: the distribution that each node's token was drawn from, given its elder
                siblings; None: tokens are fixed by what came before.
        """
        self.ids = ids
        self.children = children
        self._logits_NV = logits_NV
        self._drafted_KV = drafted_KV

    def target(self, node: int) -> Tensor:
        """The target's distribution after a node, float32 [V]; a new tensor."""
        return self._logits_NV[node + 1].softmax(dim=-1)

    def drafted(self, node: int) -> Tensor | None:
        """What a node's token was drawn from, [V]; None: it is fixed."""
        return None if self._drafted_KV is None else self._drafted_KV[node]


class Branching:
    """What is left to try at one node: its remaining children, and what they may not cover."""

    __slots__ = ("_nodes", "accepted", "left", "node", "p_V")

    def __init__(self, nodes: Nodes, node: int, accepted: float) -> None:
        """Begin at `node`, which stays with probability `accepted` as far as is known."""
        self._nodes = nodes
        self.node = node
        self.accepted = accepted
        self.left = list(nodes.children[node + 1])
        self.p_V = nodes.target(node)

    def ratio(self) -> float:
        """accepted * p / q of the next child, at most 1."""
        child = self.left[0]
        token, q_V = self._nodes.ids[child], self._nodes.drafted(child)
        ratio = self.accepted * self.p_V[token]
        if q_V is not None:
            ratio = ratio / q_V[token].clamp(min=torch.finfo(torch.float32).tiny)
        return min(1.0, float(ratio))

    def reject(self) -> float:
        """Take the next child away; how much of accepted * p its distribution did not cover."""
        child = self.left.pop(0)
        token, q_V = self._nodes.ids[child], self._nodes.drafted(child)
        if q_V is None:
            mass = self.accepted * float(1 - self.p_V[token])
            rest_V = self.p_V.clone()
            rest_V[token] = 0
        else:
            rest_V = (self.accepted * self.p_V - q_V).clamp_(min=0)
            mass = float(rest_V.sum())
        total = rest_V.sum()
        if total > 0:
            self.p_V = rest_V / total
        return mass


class BranchTest(ABC):
    """A rule in the middle of its work: ask `chance`, draw, tell it by `step`, until `finished`."""

    finished: bool
    path: tuple[int, ...]
    """Accepted nodes from the root down, once finished."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Probability that the next test passes."""

    @abstractmethod
    def step(self, passed: bool) -> None:
        """Go on after the next test passed or failed."""

    @abstractmethod
    def last_logits(self) -> Tensor:
        """Logits [V] of the token after the accepted path, once finished."""


class RecursiveWalk(BranchTest):
    """From the root down, child by child."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._at = Branching(nodes, -1, 1.0)
        self.path = ()
        self.finished = not self._at.left

    @property
    def chance(self) -> float:
        """p / q of the next child."""
        return self._at.ratio()

    def step(self, passed: bool) -> None:
        """Go down to the child, or on to its next sibling."""
        child = self._at.left[0]
        if passed:
            self.path = (*self.path, child)
            self._at = Branching(self._nodes, child, 1.0)
        else:
            self._at.reject()
        self.finished = not self._at.left

    def last_logits(self) -> Tensor:
        """What the rejected children left over."""
        return _log(self._at.p_V)


class Traversal(BranchTest):
    """From the leaves up, path by path."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._frames = [Branching(nodes, -1, 1.0)]
        self.finished = False
        self._descend()
        self._finish_if(len(self._frames) == 1)

    @property
    def chance(self) -> float:
        """Probability that the path to the present leaf stays whole."""
        return self._frames[-1].accepted

    def step(self, passed: bool) -> None:
        """Keep the path, or drop its leaf and go on from there."""
        if passed:
            self._finish_if(True)
            return
        self._frames.pop()
        above = self._frames[-1]
        mass = above.reject()
        missing = 1 - above.accepted
        above.accepted = mass / (mass + missing) if mass + missing > 0 else 1.0
        self._descend()
        self._finish_if(len(self._frames) == 1)

    def last_logits(self) -> Tensor:
        """What is left over at the end of the path."""
        return _log(self._frames[-1].p_V)

    def _descend(self) -> None:
        while self._frames[-1].left:
            top = self._frames[-1]
            self._frames.append(Branching(self._nodes, top.left[0], top.ratio()))

    def _finish_if(self, done: bool) -> None:
        """The root stays whatever happens: a traversal that is back there ends."""
        self.finished = done
        self.path = tuple(frame.node for frame in self._frames[1:])


def _log(p_V: Tensor) -> Tensor:
    return torch.where(p_V > 0, p_V.log(), NEVER)
