"""PARD: a language model that drafts all tokens in one pass over mask tokens.

The pass feeds every committed token the model has not seen and then one mask token per further
draft; the logits at the newest token and at the masks give the drafts. The masks' keys and values
are overwritten by the next pass. The KV lies under the target's page tables.

Source: An et al. 2025 (arXiv 2504.18583); checkpoints name the mask as `pard_token`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.models.tensors import Draft, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainSteps, draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.progress import DraftLimits, DraftProgress, feed_ahead
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.runner import Runner
from foretoken.runtime.sequence import Sequence as TokenSequence


class ParallelProposer(Proposer):
    """Drafts with a masked language model that shares the target's vocabulary and page tables."""

    name = "parallel"

    def __init__(
        self,
        runner: Runner,
        sampler: DraftSampler,
        progress: DraftProgress,
        *,
        mask_token_id: int,
        limits: DraftLimits,
        confidence: Confidence | None = None,
    ) -> None:
        """Draft with `runner`.

        Args:
            runner: the draft model over its own KV store.
            sampler: turns logits into tokens and, under rejection, distributions.
            progress: the book of the draft's keys and values.
            mask_token_id: fed where a token is to be guessed.
            limits: of sequences and passes.
            confidence: when to stop before the budget; default: never.
        """
        self._runner = runner
        self._sampler = sampler
        self._progress = progress
        self._mask = mask_token_id
        self._confidence = confidence
        self.gain = None if confidence is None else confidence.gain
        self._limits = limits

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one."""
        wanted = [i for i in context.wanted if self._fits(context.spans[i])]
        if not wanted:
            return Draft.empty(len(context.spans))
        spans = [context.spans[i] for i in wanted]
        steps = _MaskSteps(self._pass(spans), [span.draft_budget for span in spans])
        drafted = draft_chain(steps, self._sampler, spans, self._confidence)
        for span in spans:
            self._progress.record(span.sequence, span.sequence.num_tokens)
        return drafted.spread(wanted, len(context.spans), self.name)

    def release(self, request_id: str) -> None:
        """Forget how far a request's draft KV reached."""
        self._progress.release(request_id)
        self._sampler.release(request_id)

    def _fits(self, span: Span) -> bool:
        return span.sequence.num_tokens + span.draft_budget <= self._limits.max_model_len

    def _pass(self, spans: list[Span]) -> Tensor:
        """Logits of all drafts, span after span, [sum of budgets, V]."""
        ends = [span.sequence.num_tokens for span in spans]
        starts = self._limits.starts([self._first_missing(s.sequence) for s in spans], ends)
        feed_ahead(
            starts,
            ends,
            self._limits.max_num_batched_tokens,
            lambda i, start, stop: self._feed([spans[i]], [start], [stop], masks=[0]),
        )
        return self._feed(spans, starts, ends, masks=[span.draft_budget - 1 for span in spans])

    def _feed(
        self,
        spans: Sequence[Span],
        starts: Sequence[int],
        ends: Sequence[int],
        masks: Sequence[int],
    ) -> Tensor:
        """Feed tokens [start, end) of each span and its masks; logits from its last token on."""
        layouts, ids, rows, at = [], [], list[int](), 0
        for span, start, end, extra in zip(spans, starts, ends, masks, strict=True):
            sequence = span.sequence
            count = end - start + extra
            layouts.append(
                SpanLayout(start=start, num_tokens=count, page_table=sequence.page_table)
            )
            ids.append([*sequence.token_ids[start:end], *[self._mask] * extra])
            at += count
            rows.extend(range(at - extra - 1, at))
        return self._runner.forward(layouts, ids, rows).logits_RV

    def _first_missing(self, sequence: TokenSequence) -> int:
        return min(self._progress.num_valid(sequence), sequence.num_tokens - 1)


class _MaskSteps(ChainSteps):
    """Reads rows of logits that are all there."""

    def __init__(self, logits_KV: Tensor, budgets: list[int]) -> None:
        self._logits_KV = logits_KV
        self._starts = [sum(budgets[:i]) for i in range(len(budgets))]

    def first(self) -> Tensor:
        return self._logits_KV[self._starts]

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        rows = [self._starts[i] + len(tokens) for i, tokens in zip(active, drafted, strict=True)]
        return self._logits_KV[rows]
