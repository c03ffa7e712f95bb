"""EAGLE-3 and P-EAGLE: the network, its published files, its compiled twin, parallel drafts."""

from functools import partial

from foretoken.proposers.base import Proposer
from foretoken.proposers.heads.base import HeadServingContext, find_head
from foretoken.proposers.heads.chain_head import serve_chains
from foretoken.proposers.heads.eagle3.compiled import compile_eagle3
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.eagle3.parallel import Masks


def _serve(net: Eagle3, site: HeadServingContext) -> Proposer:
    """Drafts from its own outputs, one slot a draft, or all at once from masks."""
    return serve_chains(net, site, compile_eagle3, Masks(net).steps if net.parallel else None)


load_spec = partial(find_head, Eagle3, _serve)
