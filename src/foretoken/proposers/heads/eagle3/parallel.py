"""P-EAGLE's drafts: one pass over true features and, for every further draft, a mask slot.

All of it is one call into C where the network is on kernels and drafts of equal number need no
edits of their logits; else PyTorch's operations give logits to choose from. Masks' keys and values
are overwritten by the next pass.

Source: P-EAGLE (arXiv 2602.01469).
"""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from foretoken.models.rollout import MOST_ROWS, MaskSlots
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.proposers.heads.chain_head import ChainRunner
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.kv_progress import Stretches
from foretoken.proposers.steps import DepthSteps
from foretoken.runtime.batch import Span


@final
class Masks:
    """The masks of a network, and what they mix to, which is kept between steps."""

    def __init__(self, net: Eagle3) -> None:
        assert net.parallel, "only a parallel head has a mask"
        self.anchored, self.token_id = net.shape.anchored, net.mask_token_id
        self._net = net
        self._rows_KD: Tensor | None = None

    def steps(
        self, runner: ChainRunner, spans: list[Span], fed: Stretches, depths: list[int]
    ) -> "ParallelSteps":
        return ParallelSteps(runner, self, spans, fed, depths)

    def rows(self, runner: ChainRunner, count: int) -> Tensor:
        """What stands for the mixed features of the first `count` mask slots, [count, D]."""
        known = self._rows_KD
        if known is None:
            width = self._net.layer_shape.hidden_size
            known = self._rows_KD = runner.features.slots_SF.new_empty(0, width)
        if count > known.shape[0]:
            known = self._rows_KD = runner.mix(self._net.mask_features(count))
        return known[:count]


@final
class ParallelSteps(DepthSteps):
    """Reads rows of logits that are all there, or has the tokens at once."""

    rolls_out = True

    def __init__(
        self,
        runner: ChainRunner,
        masks: Masks,
        spans: list[Span],
        fed: Stretches,
        depths: list[int],
    ) -> None:
        """Nothing is run yet; `masks` stand in the slots whose features are not known."""
        super().__init__(spans, depths)
        self.runner, self._masks, self._fed = runner, masks, fed

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        kernels, (layouts, tokens) = self.runner.kernels, self._with_masks()
        if kernels is None or not kernels.rollout.reads_features or len(tokens) > MOST_ROWS:
            return None
        rows_KD = self._masks.rows(self.runner, plan.steps - 1)
        masks = MaskSlots(rows_KD, self._masks.anchored)
        return kernels.rollout(layouts, [tokens], plan, self.runner.store, masks=masks)

    def run(self) -> Tensor:
        runner, known = self.runner, self._fed.layouts(self.sequences)
        masks_KD = self._masks.rows(runner, max(self.depths) - 1)
        features_TD = runner.mixed_features(known).split([one.num_tokens for one in known])
        parts, wanted, row = list[Tensor](), list[int](), 0
        for hidden_TD, depth in zip(features_TD, self.depths, strict=True):
            extra_KD = masks_KD[: depth - 1]
            # Anchored masks are added to the newest features, others stand alone.
            parts += [hidden_TD, extra_KD + hidden_TD[-1] if self._masks.anchored else extra_KD]
            last = row + hidden_TD.shape[0] - 1
            wanted.extend(range(last, last + depth))
            row = last + depth
        outputs_TD = runner.forward(*self._with_masks(), torch.cat(parts))
        return runner.logits(outputs_TD[wanted])

    def _with_masks(self) -> tuple[list[SpanLayout], list[int]]:
        """The slots of the pass and their tokens: those that are to be fed, and masks behind."""
        layouts, tokens, mask = list[SpanLayout](), list[int](), self._masks.token_id
        known = zip(self._fed.layouts(self.sequences), self._fed.tokens(self.sequences, 1),
                    self.depths, strict=True)  # fmt: skip
        for layout, given, depth in known:
            layouts.append(replace(layout, num_tokens=layout.num_tokens + depth - 1))
            tokens += [*given, *[given[-1] if mask is None else mask] * (depth - 1)]
        return layouts, tokens
