"""Drafters that need one hidden state of the target and keep nothing: MLP speculator and Medusa.

The state is that of the newest computed token, read from the feature store; rollback, preemption
and prefix hits therefore need no care.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.kv.features import FeatureView
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainSteps, Rolled, draft_chain, take_rolled
from foretoken.proposers.confidence import Confidence, Stopping
from foretoken.proposers.heads.medusa import Medusa
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.proposers.heads.stateless_kernels import StatelessKernels
from foretoken.proposers.tree import TreeShape, TreeSteps, draft_trees, planted, spread
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
        confidence: Confidence | None = None,
    ) -> None:
        """Draft in this manner from the features of a store with pages of `page_size`.

        `confidence` says where chains stop before their budget; None: nowhere.
        """
        self.name = name
        self._manner = manner
        self._features = features
        self._page_size = page_size
        self._sampler = sampler
        self._confidence = confidence
        self.gain = None if confidence is None else confidence.gain

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one."""
        wanted = context.wanted
        if not wanted:
            return Draft.empty(len(context.spans))
        spans = [context.spans[i] for i in wanted]
        manner, count = self._manner, len(context.spans)
        if manner.shape is not None:
            trees = planted(manner.shape, spans)
            steps = manner.trees(self.newest_states(spans), spans)
            return spread(draft_trees(steps, self._sampler, trees), wanted, count, self.name)
        spans = [span.clipped(manner.most) for span in spans]
        chains = _Chains(self, manner, self._sampler, spans)
        drafted = draft_chain(chains, self._sampler, spans, self._confidence)
        return drafted.spread(wanted, count, self.name)

    def release(self, request_id: str) -> None:
        """Forget the request's sampling state; nothing else is kept."""
        self._sampler.release(request_id)

    def newest_slots(self, spans: Sequence[Span]) -> list[int]:
        """Where the newest computed tokens' features are: those before the newest ones."""
        slots = []
        for span in spans:
            position = span.sequence.num_tokens - 2
            page = span.sequence.page_table[position // self._page_size]
            slots.append(page * self._page_size + position % self._page_size)
        return slots

    def newest_states(self, spans: Sequence[Span]) -> Tensor:
        """Hidden states of the newest computed tokens, [B, D]."""
        slots_B = torch.tensor(self.newest_slots(spans), device=self._features.slots_SF.device)
        return self._features.read(slots_B)


class _Chains(ChainSteps):
    """All drafts in one foreign call where it can; else the manner's steps, token by token."""

    def __init__(
        self,
        proposer: StatelessProposer,
        manner: StatelessManner,
        sampler: DraftSampler,
        spans: list[Span],
    ) -> None:
        self._proposer, self._manner, self._sampler = proposer, manner, sampler
        self._spans = spans
        self._steps: ChainSteps | None = None

    def first(self) -> Tensor:
        states_BD = self._proposer.newest_states(self._spans)
        self._steps = self._manner.chains(states_BD, self._spans)
        return self._steps.first()

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        assert self._steps is not None, "a rollout drafts everything or nothing"
        return self._steps.after(active, drafted)

    def roll_out(
        self,
        active: list[int],
        drafted: list[list[int]],
        *,
        with_probs: bool,
        stopping: Stopping | None = None,
    ) -> Rolled | None:
        kernels, budget = self._manner.kernels, self._spans[0].draft_budget
        if kernels is None or drafted[0]:
            return None
        if any(span.draft_budget != budget for span in self._spans):
            return None
        sequences = [span.sequence for span in self._spans]
        plan = self._sampler.plan(sequences, drafted, budget, with_probs=with_probs)
        if plan is not None and stopping is not None:
            plan = stopping.on(plan, active, 0, at_once=kernels.at_once)
        if plan is None:
            return None
        newest = [sequence.token_ids[-1] for sequence in sequences]
        found = kernels(self._proposer.newest_slots(self._spans), newest, plan)
        if found.undecided_BV is not None:
            return None
        return take_rolled(found, self._sampler, sequences, drafted)


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
