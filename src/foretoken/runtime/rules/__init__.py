"""Rules of acceptance, one file per rule, named by the word the user types."""

from foretoken.runtime.rules.base import Check, Rule, RuleSettings
from foretoken.runtime.rules.registry import create_rules

__all__ = ["Check", "Rule", "RuleSettings", "create_rules"]
