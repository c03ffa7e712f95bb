"""How a rule of a policy is declared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foretoken.lab.decide.evidence import Evidence, RuleResult


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A named rule, the framework's ids it stands for, its parameters and its judgement."""

    name: str
    ids: tuple[str, ...]
    parameters: type[Any]
    """A frozen dataclass; its fields are the keys in the policy file."""
    judge: Callable[[Evidence, Any], RuleResult]
