"""How an EAGLE-3 network drafts: on kernels where all its parts have some, else by PyTorch."""

from typing import final

from foretoken.proposers.base import Proposer
from foretoken.proposers.heads.base import HeadServingContext
from foretoken.proposers.heads.chain_head import build_paged
from foretoken.proposers.heads.eagle3.compiled import compile_eagle3
from foretoken.proposers.heads.eagle3.network import Eagle3Network
from foretoken.proposers.heads.eagle3.parallel import MaskedDrafts
from foretoken.proposers.heads.paged_head import CompiledHead, RunnerParts


@final
class Eagle3(Eagle3Network):
    """The network, with how it drafts."""

    def proposer(self, site: HeadServingContext) -> Proposer:
        """Drafts from its own outputs, one slot a draft, or all at once from masks."""
        if not self.parallel:
            return build_paged(self, site)
        depth = None if site.trees is None else site.trees.depth
        return build_paged(self, site, MaskedDrafts(self, depth))

    def compiled(self, parts: RunnerParts) -> CompiledHead | None:
        """The network on kernels, or None if some part has none."""
        return compile_eagle3(self, parts)
