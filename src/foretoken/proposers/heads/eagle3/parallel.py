"""P-EAGLE's drafts: one pass over true features and, for every further draft, a mask slot.

All of it is one call into C where the network is on kernels and drafts of equal number need no
edits of their logits; else PyTorch's operations give logits to choose from. Masks' keys and values
are overwritten by the next pass.

Source: P-EAGLE (arXiv 2602.01469).
"""

from typing import final

import torch
from torch import Tensor

from foretoken.models.rollout import MaskSlots
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.proposers.heads.chain_head import SlotFeed
from foretoken.proposers.heads.eagle3.network import Eagle3Network
from foretoken.proposers.heads.paged_head import HeadRunner
from foretoken.proposers.kv_progress import Stretches
from foretoken.proposers.kv_proposer import KVSteps
from foretoken.proposers.tree import DepthSteps, TreeSteps
from foretoken.runtime.batch import Span


@final
class MaskedDrafts:
    """Makes the steps of a network with a mask; what its masks mix to is kept between steps."""

    def __init__(self, net: Eagle3Network, depth: int | None = None) -> None:
        """Draft with `net`; trees no deeper than `depth`."""
        assert net.parallel, "only a parallel head has a mask"
        self.anchored, self.mask_token_id = net.shape.anchored, net.mask_token_id
        self._net, self._depth = net, depth
        self._rows_KD: Tensor | None = None

    def __call__(self, runner: HeadRunner, spans: list[Span], fed: Stretches) -> "ParallelSteps":
        """The steps of one draft."""
        depth = self._depth
        budgets = [s.draft_budget if depth is None else min(s.draft_budget, depth) for s in spans]
        known = SlotFeed.of([span.sequence for span in spans], fed)
        return ParallelSteps(runner, self, known, budgets)

    def rows(self, runner: HeadRunner, count: int) -> Tensor:
        """What stands for the mixed features of the first `count` mask slots, [count, D]."""
        known = self._rows_KD
        if known is None:
            width = self._net.layer_shape.hidden_size
            known = self._rows_KD = runner.features.slots_SF.new_empty(0, width)
        if count > known.shape[0]:
            known = self._rows_KD = runner.mix(self._net.mask_features(count))
        return known[:count]


@final
class ParallelSteps(KVSteps):
    """Reads rows of logits that are all there, or has the tokens at once."""

    rolls_out = True
    all_or_none = True

    def __init__(
        self, runner: HeadRunner, masks: MaskedDrafts, known: SlotFeed, budgets: list[int]
    ) -> None:
        """Nothing is run yet.

        Args:
            runner: of a network that has a mask.
            masks: what stands in the slots whose features are not known.
            known: the slots that are to be fed first.
            budgets: the drafts wanted of each span.
        """
        self.runner, self._masks = runner, masks
        self._known, self._budgets = known, budgets
        self._fed = _with_masks(known, [count - 1 for count in budgets], masks.mask_token_id)
        self._starts = [sum(budgets[:i]) for i in range(len(budgets))]
        self._logits_KV: Tensor | None = None

    @property
    def ran(self) -> bool:
        """Whether logits were made in PyTorch."""
        return self._logits_KV is not None

    def trees(self) -> TreeSteps:
        """The nodes of a level have the same logits."""
        return DepthSteps(self.at, len(self._budgets))

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        """All drafts; asked with nothing drafted and equal numbers wanted."""

        def masks(count: int) -> MaskSlots:
            return MaskSlots(self._masks.rows(self.runner, count), self._masks.anchored)

        return self.runner.draft_at_once(self._fed.layouts, self._fed.tokens, plan, masks)

    def first(self) -> Tensor:
        """Logits after the newest tokens."""
        return self.at(list(range(len(self._budgets))), 0)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """Logits of the next mask slot, whatever was drafted before."""
        rows = [self._starts[i] + len(tokens) for i, tokens in zip(active, drafted, strict=True)]
        return self._logits()[rows]

    def at(self, spans: list[int], depth: int) -> Tensor:
        """Logits after `depth` drafts of some spans, whatever those are."""
        return self._logits()[[self._starts[i] + depth for i in spans]]

    def _logits(self) -> Tensor:
        """Logits of all drafts, span after span, float32 [K, V]."""
        if self._logits_KV is None:
            self._logits_KV = self._run()
        return self._logits_KV

    def _run(self) -> Tensor:
        budgets, runner = self._budgets, self.runner
        sizes = [layout.num_tokens for layout in self._known.layouts]
        masks_KD = self._masks.rows(runner, max(budgets) - 1)
        parts, wanted, row = [], list[int](), 0
        for hidden_TD, drafts in zip(
            runner.mixed_features(self._known.layouts).split(sizes), budgets, strict=True
        ):
            extra_KD = masks_KD[: drafts - 1]
            # Anchored masks are added to the newest features, others stand alone.
            parts += [hidden_TD, extra_KD + hidden_TD[-1] if self._masks.anchored else extra_KD]
            last = row + hidden_TD.shape[0] - 1
            wanted.extend(range(last, last + drafts))
            row = last + drafts
        outputs_TD = runner.forward(self._fed.layouts, self._fed.tokens, torch.cat(parts))
        return runner.logits(outputs_TD[wanted])


def _with_masks(known: SlotFeed, extra: list[int], token: int | None) -> SlotFeed:
    """So many mask slots after each span: with `token`; None: with its newest token."""
    layouts, tokens, at = [], [], 0
    for layout, count in zip(known.layouts, extra, strict=True):
        given = known.tokens[at : at + layout.num_tokens]
        at += layout.num_tokens
        whole = layout.num_tokens + count
        layouts.append(
            SpanLayout(start=layout.start, num_tokens=whole, page_table=layout.page_table)
        )
        tokens.extend([*given, *[given[-1] if token is None else token] * count])
    return SlotFeed(layouts=layouts, tokens=tokens)
