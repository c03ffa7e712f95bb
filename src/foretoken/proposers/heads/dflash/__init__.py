"""DFlash: the network that block heads share, its published files, and how blocks are drafted."""

from functools import partial

from foretoken.proposers.heads.base import find_head
from foretoken.proposers.heads.dflash.network import DFlash
from foretoken.proposers.heads.dflash.runner import serve_blocks

load_spec = partial(find_head, DFlash, serve_blocks)
