"""A draft model that drafts trees, level by level.

Each pass feeds all nodes so far that have children, each on its own branch, and takes the logits
of the newest level. Passes are as many as for a chain of the tree's depth; where reading the
weights is what costs, so is their time. The draft's keys and values after a step are those of the
first branch, as far as it has children; an accepted branch beside it is fed again.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from foretoken.models.tensors import Draft, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.models.draft_model.chain import DraftModelProposer
from foretoken.proposers.models.language import DraftLanguageModel
from foretoken.proposers.tree import SpanTree, TreeShape, TreeSteps, draft_trees, planted, spread
from foretoken.runtime.draft_sampler import DraftSampler


@final
class _ModelSteps(TreeSteps):
    """Feeds what is missing, then inner nodes again and again."""

    def __init__(
        self, chain: DraftModelProposer, runner: DraftLanguageModel, trees: Sequence[SpanTree]
    ) -> None:
        self._chain, self._runner, self._trees = chain, runner, trees

    def first(self) -> Tensor:
        return self._chain.catch_up([tree.span for tree in self._trees])

    def after(self, trees: Sequence[SpanTree]) -> Tensor:
        layouts, ids = [], []
        rows: list[int] = []
        at = 0
        for tree in trees:
            growth, inner = tree.growth, tree.growth.inner
            place = {node: i for i, node in enumerate(inner)}
            layouts.append(
                SpanLayout(
                    start=tree.span.sequence.num_tokens,
                    num_tokens=len(inner),
                    page_table=tree.span.sequence.page_table,
                    paths=tuple(tuple(place[n] for n in growth.path(node)) for node in inner),
                )
            )
            ids.append([growth.tokens[node] for node in inner])
            rows.extend(at + place[node] for node in growth.frontier)
            at += len(inner)
        return self._runner.logits_at(layouts, ids, rows)


def _first_branch(tree: SpanTree) -> list[int]:
    """Tokens of the first branch that were fed, at the places that a chain has."""
    found: list[int] = []
    for place, node in enumerate(tree.growth.inner):
        if len(tree.growth.path(node)) != place + 1:
            break
        found.append(tree.growth.tokens[node])
    return found


@final
class TreeDraftProposer(Proposer):
    """Drafts trees with a model that shares the target's page tables."""

    name = "draft_model"

    def __init__(
        self,
        chain: DraftModelProposer,
        runner: DraftLanguageModel,
        sampler: DraftSampler,
        shape: TreeShape,
    ) -> None:
        """Draft trees of `shape`.

        Args:
            chain: keeps the book of the draft's KV and feeds committed tokens.
            runner: the model that it runs.
            sampler: how it chooses tokens.
            shape: of the trees.
        """
        self._chain = chain
        self._runner = runner
        self._sampler = sampler
        self._shape = shape

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Trees for the spans that want one."""
        wanted = [i for i in context.wanted if self._chain.fits(context.spans[i])]
        if not wanted:
            return Draft.empty(len(context.spans))
        trees = planted(self._shape, [context.spans[i] for i in wanted])
        steps = _ModelSteps(self._chain, self._runner, trees)
        found = draft_trees(steps, self._sampler, trees)
        for tree in trees:
            self._chain.remember(tree.span.sequence, [*_first_branch(tree), -1])
        return spread(found, wanted, len(context.spans), self.name)

    def release(self, request_id: str) -> None:
        """Forget how far a request's draft KV reached."""
        self._chain.release(request_id)
