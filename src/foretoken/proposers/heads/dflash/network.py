"""DFlash: all tokens of a block filled in by one pass, each row on its own.

Row k predicts the token at its own position, whatever the rows before it predict; row 0 is the
newest token and predicts nothing.

Source: DFlash (arXiv 2602.06036).
"""

from typing import ClassVar, Self, final

import torch

from foretoken.proposers.base import Proposer
from foretoken.proposers.heads.base import HeadServingContext, TargetFacts
from foretoken.proposers.heads.dflash.formats import describe
from foretoken.proposers.heads.dflash.head import BlockHead
from foretoken.proposers.heads.dflash.serving import build_blocks
from foretoken.proposers.heads.folder import HeadFolder
from foretoken.shape.fields import refuse_unless


@final
class DFlash(BlockHead):
    """A block head without anything more."""

    method: ClassVar[str] = "dflash"

    def proposer(self, site: HeadServingContext) -> Proposer:
        """Drafts of a block, each chosen without the others."""
        return build_blocks(self, site)

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        """The network of a folder in any published layout."""
        found = describe(folder, target)
        refuse_unless(found.fields, {"projector_type": ("dflash", "dflash")})
        with torch.device("meta"):
            net = cls(found.shape)
        found.fill(net)
        return net
