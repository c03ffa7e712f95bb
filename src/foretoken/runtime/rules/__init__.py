"""Rules of acceptance: one file per rule of chains, named by the word the user types, and `trees`.

The words are those of `rejection_sample_method`; `base.rule_of` says which rule
checks which request.
"""

from foretoken.runtime.rules.base import ChainRule, Check, RuleSettings, TreeCheck, TreeRule
from foretoken.runtime.rules.block import BlockRule
from foretoken.runtime.rules.matching import MatchingRule
from foretoken.runtime.rules.standard import StandardRule
from foretoken.runtime.rules.synthetic import SyntheticRule
from foretoken.runtime.rules.trees import TreeMatching, TreeRejection, TreeSynthetic, TreeTypical
from foretoken.runtime.rules.typical import TypicalRule
from foretoken.runtime.sampler import Sampler

__all__ = [
    "ChainRule",
    "Check",
    "RuleSettings",
    "TreeCheck",
    "TreeRule",
    "create_rules",
    "create_tree_rules",
]


def create_rules(sampler: Sampler, settings: RuleSettings) -> dict[str, ChainRule]:
    """Every rule for chains by its name."""
    rules: tuple[ChainRule, ...] = (
        MatchingRule(sampler),
        StandardRule(sampler),
        BlockRule(sampler, "block"),
        BlockRule(sampler, "traversal"),
        TypicalRule(sampler, settings),
        SyntheticRule(sampler, settings),
    )
    return {rule.name: rule for rule in rules}


def create_tree_rules(sampler: Sampler, settings: RuleSettings) -> dict[str, TreeRule]:
    """Every rule for trees by its name."""
    rules: tuple[TreeRule, ...] = (
        TreeMatching(sampler),
        TreeRejection(sampler, "standard"),
        TreeRejection(sampler, "block"),
        TreeRejection(sampler, "traversal"),
        TreeTypical(sampler, settings),
        TreeSynthetic(sampler, settings),
    )
    return {rule.name: rule for rule in rules}
