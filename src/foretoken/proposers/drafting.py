"""How the tokens of a drafter are chosen: sampled into chains, or into trees of its shape.

Owns what the settings of one drafter say about that, and the loop that all drafters of trees share;
that of chains is `chain.py`. A drafter brings its steps. Knows nothing of where logits come from.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import torch

from foretoken.config import DrafterConfig
from foretoken.errors import ConfigError
from foretoken.models.tensors import Draft
from foretoken.proposers.chain import Confidence, draft_chain
from foretoken.proposers.steps import DraftSteps
from foretoken.proposers.tree import Grown, SpanTree, TreeShape
from foretoken.proposers.tree_shapes import tree_shape
from foretoken.runtime.batch import Span
from foretoken.runtime.candidates import choose_candidates
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.verifier import Verifier


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """Turns the logits of one drafter into drafts."""

    sampler: DraftSampler
    """Turns logits into tokens and, under rejection, distributions."""
    trees: TreeShape | None = None
    """None: chains."""
    confidence: Confidence | None = None
    """Where chains stop before their budget; None: nowhere."""

    @classmethod
    def of(cls, config: DrafterConfig, verifier: Verifier, sampler: Sampler | None = None) -> Self:
        """As the settings say; `sampler` is over the ids that are drafted, if not the target's."""
        over = sampler or verifier.sampler
        return cls(
            DraftSampler(over, verifier.rule, config.draft_sample_method),
            tree_shape(config),
            Confidence.of(config),
        )

    def check_depth(self, max_drafts: int) -> None:
        """Raise ConfigError if trees are deeper than a head with so many drafts."""
        trees = self.trees
        if trees is not None and trees.depth > max_drafts:
            allowed = f"at most {max_drafts}: the head drafts no further"
            field = f"speculative_config.{trees.setting}"
            raise ConfigError(field, f"a depth of {trees.depth}", allowed)

    def clipped(self, spans: Seq[Span], max_drafts: int | None) -> Seq[Span]:
        """The spans with no more drafts than a drafter has; trees have their own depth."""
        if max_drafts is None or self.trees is not None:
            return spans
        return [span.clipped(max_drafts) for span in spans]

    def draft(
        self, steps: DraftSteps, spans: list[Span], places: Seq[int], count: int, name: str
    ) -> tuple[Draft, list[list[int]]]:
        """Draft by `steps`.

        Args:
            steps: of these spans.
            spans: that want a draft.
            places: of each among the spans of the step.
            count: spans of the step.
            name: of the drafter.

        Returns:
            The draft of the step, and the tokens of each span that were fed and lie where those of
            a chain do: all but the last of a chain, the first branch of a tree.
        """
        if self.trees is None:
            drafted = draft_chain(steps, self.sampler, spans, self.confidence)
            return drafted.as_draft(places, count, name), [ids[:-1] for ids in drafted.ids]
        shape = self.trees
        trees = [SpanTree(i, one, shape.start(one.draft_budget)) for i, one in enumerate(spans)]
        found = draft_trees(steps, self.sampler, trees)
        ids: list[tuple[int, ...]] = [()] * count
        parents: list[tuple[int, ...] | None] = [None] * count
        for place, grown in zip(places, found, strict=True):
            ids[place], parents[place] = grown.ids, grown.parents
        probs = [row for grown in found for row in grown.probs]
        draft = Draft(
            ids=tuple(ids),
            parents=tuple(parents),
            probs_KV=torch.stack(probs) if probs else None,
            drafter=name,
        )
        return draft, [tree.fed_branch() for tree in trees]


def draft_trees(steps: DraftSteps, sampler: DraftSampler, trees: Seq[SpanTree]) -> list[Grown]:
    """Draft all levels of all trees; distributions of all trees if any has some."""
    draws = any(
        sampler.draws(tree.span.sequence.request.params) and not tree.growth.fixed for tree in trees
    )
    logits_NV, growing = steps.first(), list(trees)
    while True:
        # All places of all trees are filled together: one sort and one draw for the whole level.
        nodes = [tree.open_nodes() for tree in growing]
        flat = [node for some in nodes for node in some]
        found = choose_candidates(sampler, logits_NV, flat, with_probs=draws)
        # What a tree keeps of its candidates is its own business; one without a new level is done.
        for tree, some in zip(growing, nodes, strict=True):
            tree.growth.grow(found[: len(some)])
            found = found[len(some) :]
        growing = [tree for tree in growing if tree.growth.frontier]
        if not growing:
            return [tree.growth.finish() for tree in trees]
        logits_NV = steps.after_nodes(growing)
