"""Settings of the acceptance rules that have some: which rule may have them, and their ranges.

Knows the words of `rejection_sample_method`, not how a rule decides. Torch-free.
"""

import math
from collections.abc import Sequence

from foretoken.config.keys import require

RULES = ("auto", "matching", "standard", "block", "traversal", "typical", "synthetic")
RULES_NOT_YET = ("fly",)
THRESHOLD, ALPHA = 0.09, 0.3
_WHERE = "speculative_config."


def check_typical(rule: str, threshold: object, alpha: object) -> None:
    """Check the thresholds of `typical`; at other values than the default they need that rule.

    Raises:
        ConfigError: a value is out of range, or belongs to another rule.
    """
    for name, value, default in (
        ("posterior_threshold", threshold, THRESHOLD),
        ("posterior_alpha", alpha, ALPHA),
    ):
        ok = _is_real(value) and 0 < float(value) <= 1  # type: ignore[arg-type]
        require(_WHERE + name, value, ok, "a number in (0, 1]")
        if rule != "typical":
            allowed = f'{default}: only rejection_sample_method "typical" has thresholds'
            require(_WHERE + name, value, value == default, allowed)


def check_synthetic(rule: str, rates: object, length: object, num_drafts: int) -> None:
    """Check that `synthetic` has exactly one of its settings, in range, and no other rule any.

    Raises:
        ConfigError: a value is missing, out of range, or belongs to another rule.
    """
    given = {"synthetic_acceptance_rates": rates, "synthetic_acceptance_length": length}
    if rule != "synthetic":
        for name, value in given.items():
            allowed = 'None: only rejection_sample_method "synthetic" has rates'
            require(_WHERE + name, value, value is None, allowed)
        return
    where, both = _WHERE + "synthetic_acceptance_rates", rates is not None and length is not None
    require(where, rates, not both, "None beside synthetic_acceptance_length")
    missing = rates is None and length is None
    require(where, None, not missing, "rates, or a synthetic_acceptance_length")
    if rates is not None:
        text = f"{num_drafts} numbers in [0, 1], one per draft, none above the one before it"
        require(where, rates, _are_rates(rates, num_drafts), text)
    else:
        ok = _is_real(length) and 1 <= float(length) <= num_drafts + 1  # type: ignore[arg-type]
        where = _WHERE + "synthetic_acceptance_length"
        require(where, length, ok, f"1 to num_speculative_tokens + 1 ({num_drafts + 1})")


def synthetic_rates(
    rates: Sequence[float] | None, length: float | None, num_drafts: int
) -> tuple[float, ...]:
    """Share of verifications that keep draft 0, 1, ...; empty if neither setting is there.

    A `length` counts the recovered or bonus token too and becomes the rates of least variance:
    1 as far as it goes, one fraction, then 0.
    """
    if rates is not None:
        return tuple(rates)
    if length is None:
        return ()
    return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(num_drafts))


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_rates(rates: object, num_drafts: int) -> bool:
    if not isinstance(rates, Sequence) or len(rates) != num_drafts:
        return False
    if not all(_is_real(rate) and 0 <= rate <= 1 for rate in rates):
        return False
    return all(later <= earlier for earlier, later in zip(rates, rates[1:], strict=False))
