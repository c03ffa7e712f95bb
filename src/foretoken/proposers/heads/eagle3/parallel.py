"""P-EAGLE's drafts: one pass over true features and, for every further draft, a mask slot.

All of it is one foreign call where the network is on kernels and drafts of equal number need no
edits of their logits; else PyTorch's operations give logits to choose from. Masks' keys and values
are overwritten by the next pass.

Source: P-EAGLE (arXiv 2602.01469).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from foretoken.proposers.chain import ChainSteps, Rolled, take_rolled
from foretoken.proposers.confidence import Stopping
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.feed import HeadFeed
from foretoken.proposers.heads.runner import HeadRunner
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler


@final
class ParallelSteps(ChainSteps):
    """Reads rows of logits that are all there, or has the tokens at once."""

    def __init__(
        self,
        runner: HeadRunner,
        spans: Sequence[Span],
        starts: Sequence[int],
        masks: tuple[int | None, Sequence[int]],
        sampler: DraftSampler,
    ) -> None:
        """Nothing is run yet.

        Args:
            runner: of a network that has a mask.
            spans: to be drafted for.
            starts: the first slot of each that is to be fed.
            masks: the token of mask slots (None: the newest), and the drafts wanted of each span.
            sampler: chooses among logits.
        """
        assert isinstance(runner.net, Eagle3), "only EAGLE-3 networks have a mask"
        self._runner, self._net, self._sampler = runner, runner.net, sampler
        self._sequences = [span.sequence for span in spans]
        token, self._counts = masks
        self._known = HeadFeed.missing(spans, starts)
        self._fed = self._known.masked([count - 1 for count in self._counts], token)
        self._starts = [sum(self._counts[:i]) for i in range(len(self._counts))]
        self._logits_KV: Tensor | None = None

    def roll_out(
        self,
        active: list[int],
        drafted: list[list[int]],
        *,
        with_probs: bool,
        stopping: Stopping | None = None,
    ) -> Rolled | None:
        """All drafts, if nothing was run before."""
        count = self._counts[0]
        if self._logits_KV is not None:
            return None
        if any(other != count for other in self._counts):
            return None
        plan = self._sampler.plan(self._sequences, drafted, count, with_probs=with_probs)
        if plan is None:
            return None
        if stopping is not None:
            plan = stopping.on(plan, active, 0, at_once=True)
        found = self._runner.draft_at_once(self._fed.layouts, self._fed.tokens, plan)
        if found is None or found.undecided_BV is not None:
            return None
        return take_rolled(found, self._sampler, self._sequences, drafted)

    def first(self) -> Tensor:
        """After the newest tokens."""
        return self.at(list(range(len(self._counts))), 0)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """Of the next mask slot, whatever was drafted before."""
        rows = [self._starts[i] + len(tokens) for i, tokens in zip(active, drafted, strict=True)]
        return self._logits()[rows]

    def at(self, spans: list[int], depth: int) -> Tensor:
        """Logits after `depth` drafts of some spans, whatever those are."""
        return self._logits()[[self._starts[i] + depth for i in spans]]

    def _logits(self) -> Tensor:
        """Of all drafts, span after span, float32 [K, V]."""
        if self._logits_KV is None:
            self._logits_KV = self._run()
        return self._logits_KV

    def _run(self) -> Tensor:
        counts, runner, anchored = self._counts, self._runner, self._net.shape.anchored
        sizes = [layout.num_tokens for layout in self._known.layouts]
        masks_KD = runner.mixed_masks(max(counts) - 1)
        parts, wanted, row = [], list[int](), 0
        for hidden_TD, drafts in zip(
            runner.mixed_features(self._known.layouts).split(sizes), counts, strict=True
        ):
            extra_KD = masks_KD[: drafts - 1]
            parts += [hidden_TD, extra_KD + hidden_TD[-1] if anchored else extra_KD]
            last = row + hidden_TD.shape[0] - 1
            wanted.extend(range(last, last + drafts))
            row = last + drafts
        outputs_TD = runner.forward(self._fed.layouts, self._fed.tokens, torch.cat(parts))
        return runner.logits(outputs_TD[wanted])
