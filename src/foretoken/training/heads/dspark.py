"""Training of DSpark heads: DFlash's blocks, with a part that knows the token before each draft and
a judgement of the draft.

Both are trained with the rest, given the true token before: logits are U y + W2 e, of the output y
and the short embedding e = W1[x] of that token. The judgement of (y, e) learns, by cross entropy,
the overlap of the head's distribution with the target's: the chance that a draft is accepted.

Source: DSpark (arXiv 2607.05147), DeepSpec's training.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.proposers.heads.dspark import DSpark, MarkovShape
from foretoken.training.heads.dflash import (
    BlockGuesser,
    begin_blocks,
    block_layout,
    block_points,
    block_shape,
    require_blocks_fit,
    usual_blocks,
)
from foretoken.training.heads.guesses import Guess
from foretoken.training.heads.kind import FreshHead, HeadKind, Layout
from foretoken.training.heads.target import TargetParts
from foretoken.training.losses import Head
from foretoken.training.settings import Settings

SHORT_STD = 0.01
"""Of the first short embeddings: a new head begins as DFlash."""


@final
class DSparkGuesser(BlockGuesser):
    """What the rows of blocks say once the tokens before them are known, and how sure they are."""

    def __init__(self, net: DSpark, target_head_VD: Tensor, share: float) -> None:
        super().__init__(net, target_head_VD, share)
        assert net.markov_head is not None and net.confidence_head is not None, net.markov
        self._markov, self._judge = net.markov_head, net.confidence_head

    def guess(self, outputs_BND: Tensor, previous_BN: Tensor) -> Guess:
        """What the short embeddings add, and a judgement of both."""
        shorts_BNr = self._markov.markov_w1(previous_BN)
        return Guess(
            states_BTD=outputs_BND,
            weight_VD=self.head_VD,
            added=Head(shorts_BNr, self._markov.markov_w2.weight),
            ids_V=self.net.target_ids,
            sure_BT=self._judge.logit(torch.cat((outputs_BND, shorts_BNr), dim=-1)),
        )


def _fresh(target: TargetParts, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    head = settings.of_head
    markov = MarkovShape(rank=head.markov_rank, judges=True, judges_by_token=True)
    net = DSpark(block_shape(target, settings, first_row=0), markov)
    assert net.markov_head is not None, markov
    nn.init.normal_(net.markov_head.markov_w1.weight, std=SHORT_STD)
    begin_blocks(net, target, frequent_ids)
    return FreshHead(net, DSparkGuesser(net, target.head_VD, head.block_share), net.points)


def _require_fit(target: TargetParts, settings: Settings) -> None:
    require_blocks_fit(target, settings)
    for stage in settings.stages:
        if stage.loss == "tokens":
            allowed = "distributions: dspark learns to judge its drafts by them"
            raise ConfigError("stages.loss", stage.loss, allowed)


def _layout(state: Mapping[str, Any], verifier: str, form: str | None) -> Layout:
    rank = state["model"]["markov_head.markov_w1.weight"].shape[1]
    return block_layout(
        "dspark",
        state,
        verifier,
        form,
        {
            "markov_rank": rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    )


def _usual(target: TargetParts) -> dict[str, Any]:
    return {**usual_blocks(target), "markov_rank": max(16, min(256, target.hidden_size // 3))}


KIND = HeadKind(
    fresh=_fresh, layout=_layout, points=block_points, require_fit=_require_fit, usual=_usual
)
