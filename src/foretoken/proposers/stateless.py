"""Drafters that need one hidden state of the target and keep nothing: MLP speculator and Medusa.

The state is that of the newest computed token, read from the feature store; rollback, preemption
and prefix hits therefore need no care.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.heads.medusa import Medusa
from foretoken.heads.mlp import MLPSpeculator
from foretoken.kv.features import FeatureView
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainDraft, ChainSteps, draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.levels import TreeShape, TreeSteps, draft_trees, planted, spread
from foretoken.proposers.stateless_kernels import StatelessKernels
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler

MakeSteps = Callable[[Tensor, list[Span]], ChainSteps]
"""(hidden states of the newest computed tokens [B, D], spans) -> the steps of one draft."""
MakeTreeSteps = Callable[[Tensor, list[Span]], TreeSteps]
"""The same for trees."""


@dataclass(frozen=True, slots=True)
class StatelessManner:
    """How a head drafts, and what."""

    chains: MakeSteps
    trees: MakeTreeSteps
    most: int
    """Most drafts on a branch."""
    shape: TreeShape | None = None
    """Of trees, none of which may be deeper; None: chains."""
    confidence: Confidence | None = None
    """Where chains stop before their budget; None: nowhere."""
    kernels: StatelessKernels | None = None
    """Drafts chains at once."""


class StatelessProposer(Proposer):
    """Drafts from the newest hidden state of each sequence."""

    def __init__(
        self,
        name: str,
        manner: StatelessManner,
        *,
        features: FeatureView,
        page_size: int,
        sampler: DraftSampler,
    ) -> None:
        """Draft in this manner from the features of a store with pages of `page_size`."""
        self.name = name
        self._manner = manner
        self._features = features
        self._page_size = page_size
        self._sampler = sampler

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one."""
        wanted = context.wanted
        if not wanted:
            return Draft.empty(len(context.spans))
        spans = [context.spans[i] for i in wanted]
        manner, slots = self._manner, [self._newest_slot(span) for span in spans]
        if manner.shape is None:
            drafted = self._at_once([span.clipped(manner.most) for span in spans], slots)
            if drafted is not None:
                return drafted.spread(wanted, len(context.spans), self.name)
        hidden_BD = self._features.read(torch.tensor(slots, device=self._features.slots_SF.device))
        if manner.shape is not None:
            trees = planted(manner.shape, spans)
            found = draft_trees(manner.trees(hidden_BD, spans), self._sampler, trees)
            return spread(found, wanted, len(context.spans), self.name)
        spans = [span.clipped(manner.most) for span in spans]
        steps = manner.chains(hidden_BD, spans)
        drafted = draft_chain(steps, self._sampler, spans, manner.confidence)
        return drafted.spread(wanted, len(context.spans), self.name)

    def release(self, request_id: str) -> None:
        """Forget the request's sampling state; nothing else is kept."""
        self._sampler.release(request_id)

    def _at_once(self, spans: list[Span], slots: list[int]) -> ChainDraft | None:
        """All drafts in one foreign call; None: it cannot, or leaves a choice to the caller."""
        kernels, budget = self._manner.kernels, spans[0].draft_budget
        confidence = self._manner.confidence
        if kernels is None or (confidence is not None and confidence.threshold > 0.0):
            return None
        if any(span.draft_budget != budget for span in spans):
            return None
        sequences = [span.sequence for span in spans]
        plan = self._sampler.plan(sequences, [()] * len(spans), budget)
        if plan is None:
            return None
        found = kernels(slots, [sequence.token_ids[-1] for sequence in sequences], plan)
        if found.undecided_BV is not None:
            return None
        if found.logits_KV is None:
            return ChainDraft(ids=found.ids, probs_KV=None)
        probs_KV = self._sampler.distributions(found.logits_KV, sequences, found.ids)
        order = [step * len(spans) + i for i in range(len(spans)) for step in range(budget)]
        return ChainDraft(ids=found.ids, probs_KV=probs_KV[order])

    def _newest_slot(self, span: Span) -> int:
        """Where the newest computed token's features are: that of the one before the newest."""
        position = span.sequence.num_tokens - 2
        page = span.sequence.page_table[position // self._page_size]
        return page * self._page_size + position % self._page_size


class MLPSteps(ChainSteps):
    """One stage a token."""

    def __init__(self, net: MLPSpeculator, hidden_BD: Tensor, spans: list[Span]) -> None:
        """Start from the hidden states and the newest tokens."""
        self._net = net
        self._newest = [span.sequence.token_ids[-1] for span in spans]
        self._state_BD = net.start(hidden_BD)
        self._rows = list(range(len(spans)))

    def first(self) -> Tensor:
        """The first stage."""
        return self._advance(0, self._newest)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """The next stage, for the spans that go on."""
        if len(active) < len(self._rows):
            kept = [self._rows.index(i) for i in active]
            self._state_BD, self._rows = self._state_BD[kept], active
        return self._advance(len(drafted[0]), [tokens[-1] for tokens in drafted])

    def _advance(self, stage: int, tokens: Sequence[int]) -> Tensor:
        tokens_B = torch.tensor(tokens, device=self._state_BD.device)
        self._state_BD = self._net.advance(stage, self._state_BD, tokens_B)
        return self._net.logits(stage, self._state_BD).float()


class MedusaSteps(ChainSteps):
    """All heads in one pass; what was drafted before does not count."""

    def __init__(
        self,
        net: Medusa,
        target_logits: Callable[[Tensor], Tensor],
        hidden_BD: Tensor,
        spans: list[Span],
    ) -> None:
        """Run as many heads as the longest budget, or all of them."""
        longest = max(span.draft_budget for span in spans)
        count = min(longest, net.shape.medusa_num_heads)
        states_BKD = net.states(hidden_BD, count)
        if net.shape.share_head:
            logits_KV = target_logits(states_BKD.flatten(0, 1))
            self._logits_BKV = logits_KV.view(len(spans), count, -1)
        else:
            self._logits_BKV = net.logits(states_BKD).float()

    def first(self) -> Tensor:
        """Of the first head."""
        return self._logits_BKV[:, 0]

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """Of the next head."""
        return self.at(active, len(drafted[0]))

    def at(self, spans: list[int], depth: int) -> Tensor:
        """Of the head for drafts at this depth."""
        return self._logits_BKV[spans, depth]
