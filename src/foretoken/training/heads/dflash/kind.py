"""Training of DFlash heads: each row of a block guesses the token at its own place, whatever the
others guess.

Source: DFlash (arXiv 2602.06036). The loss is that of all heads here; the authors' is `tokens`.
"""

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from foretoken.proposers.heads.dflash.network import DFlash
from foretoken.training.heads.dflash.blocks import (
    BlockGuesser,
    begin_blocks,
    block_points,
    block_shape,
    require_blocks_fit,
    usual_blocks,
)
from foretoken.training.heads.dflash.files import block_layout
from foretoken.training.heads.guesses import Guess
from foretoken.training.heads.kind import FreshHead, HeadKind, Layout
from foretoken.training.heads.target import TargetParts
from foretoken.training.settings import Settings


@final
class DFlashGuesser(BlockGuesser):
    """What the rows of blocks say, as it is."""

    def guess(self, outputs_BND: Tensor, previous_BN: Tensor) -> Guess:
        """The same whichever tokens come before."""
        return Guess(states_BTD=outputs_BND, weight_VD=self.head_VD, ids_V=self.net.target_ids)


def _fresh(target: TargetParts, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    head = settings.head
    assert head is not None, "a run of a head"
    net = DFlash(block_shape(target, settings, first_row=1))
    begin_blocks(net, target, frequent_ids)
    return FreshHead(net, DFlashGuesser(net, target.head_VD, head.block_share), net.points)


def _layout(state: Mapping[str, Any], verifier: str, form: str | None) -> Layout:
    return block_layout("dflash", state, verifier, form)


KIND = HeadKind(
    fresh=_fresh,
    layout=_layout,
    points=block_points,
    require_fit=require_blocks_fit,
    usual=usual_blocks,
)
