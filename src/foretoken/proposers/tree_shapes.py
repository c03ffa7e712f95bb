"""From a config to the shape of a drafter's trees."""

from foretoken.config import SpeculativeConfig
from foretoken.proposers.dynamic_tree import DynamicTree
from foretoken.proposers.static_tree import StaticTree
from foretoken.proposers.tree import TreeShape


def tree_shape(config: SpeculativeConfig) -> TreeShape | None:
    """The shape of the trees that a drafter is to draft; None: chains."""
    if config.choices is not None:
        return StaticTree.of(config.choices)
    if config.tree_top_k is not None:
        return DynamicTree(config.tree_top_k, config.tree_depth)
    return None
