"""EAGLE-3 and P-EAGLE: the network, its published files, its compiled twin, parallel drafts."""

from foretoken.config import DrafterConfig
from foretoken.proposers.heads.base import find_head
from foretoken.proposers.heads.eagle3.serving import Eagle3
from foretoken.proposers.method import DrafterSpec, Target


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The EAGLE-3 or P-EAGLE head that `config` names; errors as of `find_head`."""
    return find_head(Eagle3, config, target)
