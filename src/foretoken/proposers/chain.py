"""Drafting one token after the other: the loop that all drafters of chains share.

A drafter gives logits, this loop turns them into tokens: rounds of one token over the spans that
still want some. It knows nothing of where logits come from. What is kept of a distribution is what
the token was really drawn from.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.models.tensors import Draft, RolledOut, RolloutPlan, StopRule
from foretoken.proposers.steps import DraftSteps
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How sure of its next token a drafter must be to go on.

    Decided on the distribution before its token is drawn, and a token that was drawn is always
    checked; what is dropped is never dropped for what it turned out to be.
    """

    threshold: float = 0.0
    """Stop where the best next token has less probability than this, filters and temperature
    aside; 0: never."""
    least: int = 0
    """Never stop before this many drafts."""

    @classmethod
    def of(cls, config: DrafterConfig) -> Self:
        """What a drafter's settings say."""
        stop = config.stop
        return cls(threshold=stop.draft_confidence_threshold, least=stop.min_speculative_tokens)

    def keeps(self, logits_BV: Tensor, count: int, sure: Seq[float] | None = None) -> list[int]:
        """Rows whose next token is to be drafted: before the first one, this may be none.

        Args:
            logits_BV: float32, of that token.
            count: the drafts that each has.
            sure: the chance of each row's draft, if something better is known than that of its best
                token.
        """
        if count < self.least:
            return list(range(len(logits_BV)))
        best_B = sure or best_chances(logits_BV)
        return [row for row, chance in enumerate(best_B) if chance >= self.threshold]

    def on(self, plan: RolloutPlan, count: int) -> RolloutPlan:
        """The rollout `plan` of sequences with `count` drafts each, made to end where this says."""
        rule = StopRule(least_sure=self.threshold, least=max(self.least - count, 0))
        return replace(plan, stop=rule)


def best_chances(logits_BV: Tensor) -> list[float]:
    """The probability of each row's best token."""
    chances: list[float] = (logits_BV.amax(dim=-1) - logits_BV.logsumexp(dim=-1)).exp().tolist()
    return chances


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainDraft:
    """Drafts of the spans, in order."""

    ids: list[list[int]]
    probs_KV: Tensor | None
    """float32 distributions of all drafts, span after span; None: one-hot."""

    def as_draft(self, places: Seq[int], count: int, drafter: str) -> Draft:
        """The draft of a step of `count` spans: these tokens at `places`, none elsewhere."""
        ids: list[tuple[int, ...]] = [()] * count
        for place, tokens in zip(places, self.ids, strict=True):
            ids[place] = tuple(tokens)
        return Draft(ids=tuple(ids), probs_KV=self.probs_KV, drafter=drafter)


def draft_chain(
    steps: DraftSteps,
    sampler: DraftSampler,
    spans: list[Span],
    confidence: Confidence | None = None,
) -> ChainDraft:
    """Draft every span up to its budget, or to where `confidence` ends; default: never before."""
    stopping = confidence if confidence is not None and confidence.threshold else None
    chains = _Chains(spans, sampler)
    while chains.active:
        # The fast way: one call drafts several tokens of each span. Python between two tokens would
        # take longer than a small drafter's arithmetic.
        found = chains.roll_out(steps, stopping) if steps.rolls_out else None
        if found is None:
            before = chains.before
            logits_BV = steps.after(chains.active, before) if before[0] else steps.first()
        elif found.undecided_BV is None or not chains.active:
            chains.drop_full()
            continue
        else:
            # The call came to a token that it may not choose, and left its logits.
            logits_BV = found.undecided_BV
        # Stopping looks at the distribution and never at the token. A token that was dropped for
        # what it turned out to be would bias what is left.
        if stopping is not None:
            sure = steps.sure(chains.active, chains.before)
            logits_BV = chains.drop_unsure(logits_BV, stopping, sure)
            if not chains.active:
                break
        chains.choose(logits_BV)
        chains.drop_full()
    return chains.draft()


class _Chains:
    """The drafts of some spans while they grow. All active spans have equally many."""

    def __init__(self, spans: list[Span], sampler: DraftSampler) -> None:
        self._spans, self._sampler = spans, sampler
        self._drafted: list[list[int]] = [[] for _ in spans]
        # One span that needs distributions makes all rows keep theirs (one-hot where the token was
        # not drawn): a verification takes one tensor for all spans, or none.
        self._draws = any(sampler.draws(span.sequence.request.params) for span in spans)
        self._probs: list[Tensor] = []
        self._owners: list[int] = []
        self.active = list(range(len(spans)))
        self.drop_full()

    @property
    def before(self) -> list[list[int]]:
        """The drafts so far of the active spans."""
        return [self._drafted[i] for i in self.active]

    def roll_out(self, steps: DraftSteps, stopping: Confidence | None) -> RolledOut | None:
        """Draft several tokens of each active span by one call, if that can be done."""
        active, before = self.active, self.before
        left = [self._spans[i].draft_budget - len(self._drafted[i]) for i in active]
        if steps.all_or_none and (before[0] or min(left) != max(left)):
            return None
        sequences = [self._spans[i].sequence for i in active]
        # No plan where some logits are edited before a token is chosen (penalties, grammars): a
        # call chooses from raw logits only.
        plan = self._sampler.plan(sequences, before, min(left), with_probs=self._draws)
        if plan is None:
            return None
        if stopping is not None:
            plan = stopping.on(plan, len(before[0]))
        found = steps.roll_out(active, before, plan)
        if found is None or (steps.all_or_none and found.undecided_BV is not None):
            return None
        self._append(found, sequences)
        if found.going is not None:
            self.active = [active[row] for row in found.going]
        return found

    def _append(self, found: RolledOut, sequences: Seq[Sequence]) -> None:
        """Add the drafts of a call; its logits become the distributions that they were drawn from.

        Logits come step by step and include rows of spans that had ended by then.
        """
        logits_KV, count = found.logits_KV, len(sequences)
        if logits_KV is not None:
            kept, rows, ids = list[int](), list[Rows](), list[int]()
            for at in range(max(len(more) for more in found.ids)):
                for place, (i, more) in enumerate(zip(self.active, found.ids, strict=True)):
                    if at < len(more):
                        drafts = (*self._drafted[i], *more[:at])
                        rows.append(
                            Rows(sequence=sequences[place], drafts=drafts, first=len(drafts))
                        )
                        kept.append(at * count + place)
                        ids.append(more[at])
                        self._owners.append(i)
            if rows:
                logits_NV = logits_KV if len(kept) == logits_KV.shape[0] else logits_KV[kept]
                self._probs.append(self._sampler.distributions(logits_NV, rows, ids))
        for i, more in zip(self.active, found.ids, strict=True):
            self._drafted[i].extend(more)

    def choose(self, logits_BV: Tensor) -> None:
        """Draft the next token of each active span."""
        sequences = [self._spans[i].sequence for i in self.active]
        chosen = self._sampler.choose(logits_BV, sequences, self.before, with_probs=self._draws)
        for i, token in zip(self.active, chosen.ids, strict=True):
            self._drafted[i].append(token)
        if chosen.probs_BV is not None:
            self._probs.append(chosen.probs_BV)
            self._owners.extend(self.active)

    def drop_full(self) -> None:
        """Go on with the spans that want more drafts."""
        drafted, spans = self._drafted, self._spans
        self.active = [i for i in self.active if len(drafted[i]) < spans[i].draft_budget]

    def drop_unsure(
        self, logits_BV: Tensor, stopping: Confidence, sure: list[float] | None
    ) -> Tensor:
        """Go on with the spans whose next token is to be drafted; their logits."""
        kept = stopping.keeps(logits_BV, len(self.before[0]), sure)
        if len(kept) < len(self.active):
            logits_BV, self.active = logits_BV[kept], [self.active[i] for i in kept]
        return logits_BV

    def draft(self) -> ChainDraft:
        """All drafts; distributions were kept round by round and are wanted span by span."""
        if not self._probs:
            return ChainDraft(ids=self._drafted, probs_KV=None)
        probs_KV = self._probs[0] if len(self._probs) == 1 else torch.cat(self._probs)
        order = sorted(range(len(self._owners)), key=self._owners.__getitem__)
        if order != list(range(len(order))):
            probs_KV = probs_KV[order]
        return ChainDraft(ids=self._drafted, probs_KV=probs_KV)
