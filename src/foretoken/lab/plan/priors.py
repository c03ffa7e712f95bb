"""Which acceptance a plan assumes until somebody has measured it.

Ranges of alpha, the chance that a draft is accepted given that all before it were, and for look-up
methods the share of steps in which they find anything to draft. They are wide on purpose and shown
as assumptions; `--acceptance` replaces them.
"""

from dataclasses import dataclass

from foretoken.errors import ConfigError

_ALPHA = {
    "draft_model": {
        "chat": (0.60, 0.80), "code": (0.70, 0.88), "summarize": (0.65, 0.82),
        "rag": (0.62, 0.82), "edit": (0.70, 0.88), "json": (0.75, 0.92),
        "creative": (0.50, 0.70), "mixed": (0.55, 0.80),
    },
    "eagle3": {
        "chat": (0.65, 0.80), "code": (0.68, 0.84), "summarize": (0.58, 0.74),
        "rag": (0.58, 0.74), "edit": (0.62, 0.78), "json": (0.70, 0.86),
        "creative": (0.52, 0.68), "mixed": (0.55, 0.78),
    },
    "ngram": {"edit": (0.75, 0.92), "creative": (0.30, 0.55), "": (0.45, 0.70)},
    "suffix": {"edit": (0.80, 0.92), "json": (0.60, 0.85), "creative": (0.30, 0.55),
               "": (0.50, 0.72)},
}  # fmt: skip
_HITS = {
    "ngram": {"chat": 0.20, "code": 0.40, "summarize": 0.45, "rag": 0.40, "edit": 0.85,
              "json": 0.40, "creative": 0.08, "mixed": 0.25},
    "suffix": {"chat": 0.30, "code": 0.50, "summarize": 0.45, "rag": 0.45, "edit": 0.85,
               "json": 0.75, "creative": 0.10, "mixed": 0.35},
}  # fmt: skip
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
    hits = _HITS.get(method, {}).get(workload, 1.0)
    if given:
        low, high = _parse(given)
        return Acceptance(low=low, high=high, hits=hits, source="given")
    table = _ALPHA.get("eagle3" if method == "mtp" else method, _ALPHA["draft_model"])
    low, high = table[workload] if workload in table else table[""]
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
