"""Rules of acceptance, one file per rule, named by the word the user types."""

from foretoken.runtime.rules.base import Check, Rule, RuleSettings, TreeCheck, TreeRule
from foretoken.runtime.rules.registry import create_rules, create_tree_rules

__all__ = [
    "Check",
    "Rule",
    "RuleSettings",
    "TreeCheck",
    "TreeRule",
    "create_rules",
    "create_tree_rules",
]
