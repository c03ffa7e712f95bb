"""The rules for trees: matching, two that keep the distribution, and those that do not.

What a rule is called on a chain it is called on a tree; block verification of a tree is
traversal. Sources are in `foretoken.ops.tree_rejection` and in the rules for chains.
"""

from collections.abc import Sequence as Seq
from functools import partial
from typing import final

import torch
from torch import Tensor

from foretoken.ops.noise import Stream, row_key, uniform
from foretoken.ops.rejection import typical
from foretoken.ops.tree_rejection import BranchTest, Nodes, RecursiveWalk, Traversal
from foretoken.runtime.rows import Rows
from foretoken.runtime.rules.base import DRAWN, Branch, TreeCheck, TreeRule, draw_last
from foretoken.runtime.rules.native_rules import complete, weigh
from foretoken.runtime.rules.synthetic import num_kept
from foretoken.runtime.sampler import Sampler


def _runs(checks: Seq[TreeCheck]) -> list[Rows]:
    return [run for check in checks for run in check.runs]


@final
class TreeMatching(TreeRule):
    """The branch that the target itself takes, and the token where it leaves the tree."""

    name = "matching"

    def decide(
        self, logits_PV: Tensor, checks: Seq[TreeCheck], probs_KV: Tensor | None
    ) -> list[Branch]:
        """Follow the target's own tokens down the tree."""
        targets: list[int] = self._sampler.choose(logits_PV, _runs(checks)).tolist()
        found, start = [], 0
        for check in checks:
            found.append(matched_branch(check, targets[start : start + check.num_rows]))
            start += check.num_rows
        return found


def matched_branch(check: TreeCheck, own: list[int]) -> Branch:
    """The longest path of nodes that are the target's own tokens, and its next one."""
    path, at = list[int](), 0
    while True:
        same = (node for node in check.tree.children[at] if check.ids[node] == own[at])
        child = next(same, None)
        if child is None:
            return Branch(tuple(path), (*check.tokens(path), own[at]))
        path.append(child)
        at = child + 1


@final
class TreeRejection(TreeRule):
    """Tests branches until one stays; every token has the target's distribution."""

    def __init__(self, sampler: Sampler, name: str) -> None:
        """`standard` walks down from the root, `block` and `traversal` up from the leaves."""
        assert name in DRAWN, name
        super().__init__(sampler)
        self.name = name

    def decide(
        self, logits_PV: Tensor, checks: Seq[TreeCheck], probs_KV: Tensor | None
    ) -> list[Branch]:
        """Test branches; every token has the target's distribution."""
        block = self.name != "standard"
        found = weigh(self._sampler, logits_PV, checks, probs_KV, block=block)
        return complete(found, logits_PV, checks, partial(self._twin, probs_KV=probs_KV))

    def _twin(
        self, logits_PV: Tensor, checks: Seq[TreeCheck], probs_KV: Tensor | None
    ) -> list[Branch]:
        """Decide with PyTorch's operations."""
        processed_PV = self._sampler.process(logits_PV, _runs(checks))
        tests, start = [], 0
        for check in checks:
            drafts = slice(check.drafted_row, check.drafted_row + len(check.ids))
            nodes = Nodes(
                check.ids,
                check.tree.children,
                processed_PV[start : start + check.num_rows],
                None if probs_KV is None else probs_KV[drafts],
            )
            tests.append(self._tested(check, nodes))
            start += check.num_rows
        kept = [len(test.path) for test in tests]
        last_SV = torch.stack([test.last_logits() for test in tests])
        # Elsewhere than at a leaf some child was rejected. It may have been drawn with the target's
        # own noise of that position, so what replaces it gets other noise.
        inside = [
            bool(check.tree.children[test.path[-1] + 1 if test.path else 0])
            for check, test in zip(checks, tests, strict=True)
        ]
        last = draw_last(self._sampler, last_SV, checks, kept, inside)
        return [
            Branch(test.path, (*check.tokens(test.path), token))
            for check, test, token in zip(checks, tests, last, strict=True)
        ]

    def _tested(self, check: TreeCheck, nodes: Nodes) -> BranchTest:
        test = RecursiveWalk(nodes) if self.name == "standard" else Traversal(nodes)
        start = check.rows.position
        key = self._sampler.profile(check.rows.sequence.request).key
        # How many tests there are depends on how they end, so uniforms are numbered by test and not
        # by position; anchored at this verification, no other one uses them.
        base = row_key(key, start, Stream.ACCEPT, start)
        count = 0
        while not test.finished:
            test.step(uniform(row_key(base, count, Stream.ACCEPT)) < test.chance)
            count += 1
        return test


@final
class TreeTypical(TreeRule):
    """The longest branch of tokens that are probable enough, the likeliest of several. LOSSY."""

    name = "typical"

    def decide(
        self, logits_PV: Tensor, checks: Seq[TreeCheck], probs_KV: Tensor | None
    ) -> list[Branch]:
        """Keep the longest branch whose tokens are all probable enough."""
        processed_PV = self._sampler.process(logits_PV, _runs(checks))
        found, ends, start = [], [], 0
        for check in checks:
            parents = [start + parent + 1 for parent in check.tree.parents]
            probs_KV = processed_PV[parents].softmax(dim=-1)
            path = self._path(check, probs_KV)
            found.append(path)
            ends.append(start + (path[-1] + 1 if path else 0))
            start += check.num_rows
        kept = [len(path) for path in found]
        own = [False] * len(checks)
        last = draw_last(self._sampler, processed_PV[ends], checks, kept, own)
        return [
            Branch(path, (*check.tokens(path), token))
            for check, path, token in zip(checks, found, last, strict=True)
        ]

    def _path(self, check: TreeCheck, probs_KV: Tensor) -> tuple[int, ...]:
        passed = typical(
            probs_KV,
            check.ids,
            threshold=self._settings.posterior_threshold,
            alpha=self._settings.posterior_alpha,
        )
        ids_K1 = torch.tensor(check.ids, device=probs_KV.device).unsqueeze(1)
        logs: list[float] = probs_KV.gather(1, ids_K1).squeeze(1).log().tolist()
        whole = [path for path in check.tree.paths if all(passed[node] for node in path)]
        best = max(
            whole, key=lambda path: (len(path), sum(logs[node] for node in path)), default=()
        )
        return best


@final
class TreeSynthetic(TreeRule):
    """Goes down first children as far as the rates say. The output is INVALID."""

    name = "synthetic"

    def decide(
        self, logits_PV: Tensor, checks: Seq[TreeCheck], probs_KV: Tensor | None
    ) -> list[Branch]:
        """Go down first children by the rates alone."""
        targets: list[int] = self._sampler.choose(logits_PV, _runs(checks)).tolist()
        found, start = [], 0
        for check in checks:
            path: list[int] = []
            while children := check.tree.children[path[-1] + 1 if path else 0]:
                path.append(children[0])
            key = self._sampler.profile(check.rows.sequence.request).key
            count = num_kept(
                check.tokens(path), self._settings.synthetic_rates, key, check.rows.position
            )
            del path[count:]
            after = path[-1] + 1 if path else 0
            found.append(Branch(tuple(path), (*check.tokens(path), targets[start + after])))
            start += check.num_rows
        return found
