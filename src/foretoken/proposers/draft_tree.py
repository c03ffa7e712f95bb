"""A draft model that drafts a static tree, level by level.

Each pass feeds all nodes so far that have children, each on its own branch, and takes the logits
of the newest level. Passes are as many as for a chain of the tree's depth; where reading the
weights is what costs, so is their time. The draft's keys and values after a step are those of the
first branch, as far as it has children; an accepted branch beside it is fed again.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foretoken.models.tensors import Draft, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.draft_model import DraftModelProposer, LastLogits
from foretoken.proposers.static_tree import GrowingTree, StaticTree
from foretoken.runtime.batch import Span
from foretoken.runtime.branching import Candidates, Fork, choose_candidates
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import DraftSampler


@dataclass(frozen=True, slots=True)
class _Tree:
    """One span, its tree, and what its nodes were drawn from."""

    span: Span
    grown: GrowingTree
    probs: dict[int, Tensor]

    def forks(self) -> list[Fork]:
        """The frontier's nodes as places to be filled."""
        found = []
        for node in self.grown.frontier:
            path = tuple(self.grown.tokens[n] for n in self.grown.path(node))
            row = Rows(sequence=self.span.sequence, drafts=path, first=len(path))
            found.append(Fork(row, self.grown.count(node), node + 1))
        return found

    def grow(self, chosen: list[Candidates]) -> None:
        """Fill the frontier's places."""
        by_node = dict(zip(list(self.grown.frontier), chosen, strict=True))
        for node, parent, rank in self.grown.grow({n: c.ids for n, c in by_node.items()}):
            probs_CV = by_node[parent].probs_CV
            if probs_CV is not None:
                self.probs[node] = probs_CV[rank]

    def layout(self) -> tuple[SpanLayout, list[int], list[int]]:
        """Where the nodes to be fed lie, their tokens, and which of them are the frontier."""
        inner, start = self.grown.inner, self.span.sequence.num_tokens
        place = {node: i for i, node in enumerate(inner)}
        paths = tuple(tuple(place[n] for n in self.grown.path(node)) for node in inner)
        table = self.span.sequence.page_table
        layout = SpanLayout(start=start, num_tokens=len(inner), page_table=table, paths=paths)
        tokens = [self.grown.tokens[node] for node in inner]
        return layout, tokens, [place[node] for node in self.grown.frontier]

    def first_branch(self) -> list[int]:
        """Tokens of the first branch."""
        found: list[int] = []
        while len(found) in self.grown.tokens and self._follows(len(found)):
            found.append(self.grown.tokens[len(found)])
        return found

    def _follows(self, node: int) -> bool:
        return self.grown.shape.parents[node] == node - 1


@final
class TreeDraftProposer(Proposer):
    """Drafts trees of one shape with a model that shares the target's page tables."""

    name = "draft_model"

    def __init__(
        self,
        chain: DraftModelProposer,
        runner: LastLogits,
        sampler: DraftSampler,
        shape: StaticTree,
    ) -> None:
        """Draft trees of `shape`.

        Args:
            chain: keeps the book of the draft's KV and feeds committed tokens.
            runner: the model that it runs.
            sampler: how it chooses tokens.
            shape: of a whole tree; a smaller budget takes its first nodes.
        """
        self._chain = chain
        self._runner = runner
        self._sampler = sampler
        self._shape = shape

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Trees for the spans that want one."""
        wanted = [i for i in context.wanted if self._chain.fits(context.spans[i])]
        count = len(context.spans)
        if not wanted:
            return Draft(ids=((),) * count, drafter=self.name)
        trees = {i: self._rooted(context.spans[i]) for i in wanted}
        self._fill(list(trees.values()))
        ids: list[tuple[int, ...]] = [()] * count
        parents: list[tuple[int, ...] | None] = [None] * count
        probs: list[Tensor] = []
        for i, tree in trees.items():
            ids[i], parents[i], nodes = tree.grown.finish()
            probs.extend(tree.probs[node] for node in nodes if node in tree.probs)
            branch = tree.first_branch()
            fed = [node for node in tree.grown.inner if node < len(branch)]
            self._chain.remember(tree.span.sequence, [*branch[: len(fed)], -1])
        probs_KV = torch.stack(probs) if probs else None
        return Draft(ids=tuple(ids), parents=tuple(parents), probs_KV=probs_KV, drafter=self.name)

    def release(self, request_id: str) -> None:
        """Forget how far a request's draft KV reached."""
        self._chain.release(request_id)

    def _rooted(self, span: Span) -> _Tree:
        return _Tree(span, GrowingTree(self._shape, span.draft_budget), {})

    def _fill(self, trees: list[_Tree]) -> None:
        """Draft all levels of all trees."""
        draws = any(self._sampler.draws(tree.span.sequence.request.params) for tree in trees)
        logits_FV = self._chain.catch_up([tree.span for tree in trees])
        while trees:
            forks = [tree.forks() for tree in trees]
            flat = [fork for some in forks for fork in some]
            found = choose_candidates(self._sampler, logits_FV, flat, with_probs=draws)
            for tree, some in zip(trees, forks, strict=True):
                tree.grow(found[: len(some)])
                found = found[len(some) :]
            trees = [tree for tree in trees if tree.grown.frontier]
            if trees:
                logits_FV = self._after(trees)

    def _after(self, trees: list[_Tree]) -> Tensor:
        """Logits after every node of the frontiers, tree after tree."""
        layouts, ids = [], []
        rows: list[int] = []
        at = 0
        for tree in trees:
            layout, tokens, wanted = tree.layout()
            layouts.append(layout)
            ids.append(tokens)
            rows.extend(at + place for place in wanted)
            at += len(tokens)
        return self._runner.logits_at(layouts, ids, rows)
