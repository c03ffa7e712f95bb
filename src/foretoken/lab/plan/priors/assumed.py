"""What is assumed of a drafter's acceptance on a setup, with where that comes from.

Published lengths answer for the methods that they speak of; a method of one's own brings its range
in its record; `--acceptance` replaces either. Knows no costs.
"""

from dataclasses import dataclass

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.errors import ConfigError
from foretoken.lab.plan.priors.acceptance import AcceptancePrior, DraftedWork, knows, prior_without
from foretoken.lab.plan.setup import DRAWN_FROM, Setup

_FEW_BITS = 0.7
"""Bytes per weight below which a model counts as one of few bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedAcceptance:
    """What is assumed about the drafts of one method."""

    low: float
    middle: float
    high: float
    """The chance that a draft is accepted given that all before it were. The ends should hold 80 of
    100 cases."""
    hits: float
    """Share of steps with a draft; the others cost what plain ones do."""
    source: str
    over_all_steps: bool = False
    """Whether the chance is one over all steps, those without drafts included, as published lengths
    of look-ups are; else it is that of the steps with drafts."""
    sources: tuple[str, ...] = ()
    """Where the rows stand that say most about it."""

    def length(self, alpha: float, k: int) -> float:
        """Tokens per step with k drafts of such a chance, steps without drafts included."""
        found = ConstantAcceptance(alpha).length(k)
        return found if self.over_all_steps else 1.0 + self.hits * (found - 1.0)


def assume_acceptance(setup: Setup, prior: AcceptancePrior | None = None) -> AssumedAcceptance:
    """The range for the method of a setup.

    Args:
        setup: its method, models, workload and temperature count.
        prior: what is expected of drafters; None: all that is published.

    Raises:
        ConfigError: `--acceptance` or `--rate` is not a range within 0 and 1.
    """
    settings, drafting = setup.settings, setup.drafting
    plan = drafting.plan if drafting else None
    hits = plan.hits.get(settings.workload, 1.0) if plan else 1.0
    if setup.own_measured is not None:
        own, hits = setup.own_measured.acceptance.alpha, setup.own_measured.draft_share
        return AssumedAcceptance(low=own, middle=own, high=own, hits=hits, source="measured")
    if settings.acceptance or settings.rate:
        return _given(setup, hits)
    if knows(setup.method):
        expected = (prior or prior_without()).expect(drafting_of(setup))
        return AssumedAcceptance(
            low=expected.low, middle=expected.middle, high=expected.high,
            hits=max(hits, expected.middle),  # a step that accepts a draft has found one
            over_all_steps=True,
            source=f"published for {setup.method} on {settings.workload} at temperature "
            f"{settings.temperature:g}: {', '.join(expected.sources[:3]) or 'nothing comparable'}",
            sources=expected.sources,
        )  # fmt: skip
    ranges = plan.acceptance if plan else {}
    low, high = ranges.get(settings.workload, ranges.get("", (0.0, 0.0)))
    return AssumedAcceptance(
        low=low, middle=(low + high) / 2, high=high, hits=hits,
        source="the method's own record, not measured" if ranges else "nothing is drafted",
    )  # fmt: skip


def _given(setup: Setup, hits: float) -> AssumedAcceptance:
    """What `--acceptance` says of each draft, or `--rate` of all that are made."""
    settings = setup.settings
    if settings.acceptance:
        low, high = _parse("acceptance", settings.acceptance)
        middle = (low + high) / 2
        return AssumedAcceptance(low=low, middle=middle, high=high, hits=hits, source="given")
    low, high = _parse("rate", settings.rate)
    low, middle, high = (chance_of_rate(one, setup.k) for one in (low, (low + high) / 2, high))
    source = f"given as {settings.rate} of the drafted tokens at k = {setup.k}"
    return AssumedAcceptance(low=low, middle=middle, high=high, hits=hits, source=source)


def chance_of_rate(rate: float, k: int) -> float:
    """The chance that a draft is accepted given that all before it were, of which comes such a
    share of k drafted tokens."""
    return ConstantAcceptance.of_length(1.0 + k * rate, k).alpha


def drafting_of(setup: Setup) -> DraftedWork:
    """A setup as the regression sees it."""
    settings, draft = setup.settings, setup.draft
    with_model = setup.drafts_with == "model" and draft is not None
    hot = settings.temperature > DRAWN_FROM and with_model
    stored = setup.draft_quantization if with_model else setup.head_quantization
    in_own_file = setup.drafting is not None and setup.has_weights and setup.drafting.own_file
    return DraftedWork(
        method=setup.method,
        target_b=setup.target.params / 1e9,
        draft_b=draft.params / 1e9 if with_model and draft else 0.0,
        workload=settings.workload,
        temperature=settings.temperature,
        k=max(1, setup.k),
        foreign=bool(with_model and draft and draft.family != setup.target.family),
        low_bits=setup.quantization.stored_bytes < _FEW_BITS,
        low_draft_bits=in_own_file and stored.stored_bytes < _FEW_BITS,
        drawn=setup.has_weights and (hot or settings.engine == "foretoken"),
    )


def _parse(name: str, given: str) -> tuple[float, float]:
    try:
        parts = [float(part) for part in given.split(":")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or not all(0 <= p <= 1 for p in parts) or parts[0] > parts[-1]:
        raise ConfigError(f"plan.{name}", given, "LOW:HIGH within 0 and 1, such as 0.6:0.8")
    return parts[0], parts[-1]
