"""DFlash: the network that block heads share, its published files, and how blocks are drafted."""

from foretoken.config import DrafterConfig
from foretoken.proposers.heads.base import find_head
from foretoken.proposers.heads.dflash.network import DFlash
from foretoken.proposers.method import DrafterSpec, Target


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The DFlash head that `config` names; errors as of `find_head`."""
    return find_head(DFlash, config, target)
