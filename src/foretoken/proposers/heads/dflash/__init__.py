"""DFlash: the network that block heads share, its published files, and how blocks are drafted."""

from foretoken.config import DrafterConfig
from foretoken.proposers.heads.base import find_head
from foretoken.proposers.heads.dflash.network import DFlash
from foretoken.proposers.method import FoundDrafter, Target


def find(config: DrafterConfig, target: Target) -> FoundDrafter:
    """The DFlash head that `config` names; errors as of `find_head`."""
    return find_head(DFlash, config, target)
