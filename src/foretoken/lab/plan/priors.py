"""Which acceptance a plan assumes until somebody has measured it.

Ranges of alpha, the chance that a draft is accepted given that all before it were, and for look-up
methods the share of steps in which they find anything to draft, from the table of methods. They are
wide on purpose and shown as assumptions; `--acceptance` replaces them.
"""

from dataclasses import dataclass

from foretoken.errors import ConfigError
from foretoken.lab.plan.setup import planned_methods

ONE_HOT_LOSS_PER_T = 0.25
"""Share of alpha lost at temperature 1 when drafts are greedy: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What is assumed about the drafts of one method."""

    low: float
    high: float
    """Bounds of alpha."""
    hits: float
    """Share of steps with a draft."""
    source: str

    @property
    def middle(self) -> float:
        """Half way between the bounds."""
        return (self.low + self.high) / 2


def assume_acceptance(method: str, workload: str, temperature: float, given: str) -> Acceptance:
    """The range for a method on a workload; `given` is LOW:HIGH, one number, or empty.

    Raises:
        ConfigError: `given` is not a range within 0 and 1.
    """
    plan = (planned_methods().get(method) or planned_methods()["draft_model"]).plan
    assert plan is not None, method
    hits = plan.hits.get(workload, 1.0)
    if given:
        low, high = _parse(given)
        return Acceptance(low=low, high=high, hits=hits, source="given")
    low, high = plan.acceptance[workload if workload in plan.acceptance else ""]
    kept = 1.0 - ONE_HOT_LOSS_PER_T * min(temperature, 1.0)
    return Acceptance(
        low=low * kept,
        high=high * kept,
        hits=hits,
        source=f"assumed for {workload} at temperature {temperature:g}, not measured",
    )


def _parse(given: str) -> tuple[float, float]:
    try:
        parts = [float(part) for part in given.split(":")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or not all(0 <= p <= 1 for p in parts) or parts[0] > parts[-1]:
        raise ConfigError("plan.acceptance", given, "LOW:HIGH within 0 and 1, such as 0.6:0.8")
    return parts[0], parts[-1]
