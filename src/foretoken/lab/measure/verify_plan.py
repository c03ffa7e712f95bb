"""What the losslessness kit asks: how many prompts and samples, and which sampling parameters.

Plain settings; knows no server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.errors import ConfigError

KINDS = ("greedy", "seeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """How much is asked."""

    prompts: int = 20
    """Whose texts are compared."""
    max_tokens: int = 48
    samples: int = 200
    """Per prompt, arm and set of parameters."""
    sample_tokens: int = 3
    sample_prompts: int = 2
    concurrency: int = 8
    error: float = 0.01
    """Chance of a false alarm over all distribution tests together."""
    parameters: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    )

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        names = ("prompts", "max_tokens", "samples", "sample_tokens", "sample_prompts")
        for name in (*names, "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"plan.{name}", getattr(self, name), "an integer >= 1")
        if not 0 < self.error < 1:
            raise ConfigError("plan.error", self.error, "a chance between 0 and 1")

    def checks(self) -> list[tuple[str, int]]:
        """Every check in its order, and how many answers it asks for."""
        texts = [(kind, 2 * self.prompts) for kind in KINDS]
        each = 2 * self.samples * min(self.sample_prompts, self.prompts)
        return texts + [(describe(parameters), each) for parameters in self.parameters]


def describe(parameters: Mapping[str, Any]) -> str:
    """A set of parameters in words."""
    return ", ".join(f"{name} {value}" for name, value in parameters.items())
