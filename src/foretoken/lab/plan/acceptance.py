"""Expected acceptance of a drafter, by a regression over published acceptance lengths.

A row of acceptance.toml is turned into the chance that a draft is accepted given that all before it
were. Its log-odds are a sum of effects of the method, the work, sizes and bits. Few rows speak of
each, so every effect begins at an assumed value with an assumed spread (effects.toml), which rows
then move: ridge regression towards a prior. Rows of one source and method share an error: how well
the drafters that it measured were trained (a mixed model, Laird and Ware 1982).

Invariant: an expectation depends only on the rows that it was fitted to, so that one made without a
source says what would have been expected before that source was published.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.errors import ConfigError
from foretoken.lab.plan.setup import DRAWN_FROM, Setup

EIGHTY = 1.2816
"""Standard deviations on either side of the middle that hold 80 of 100 cases."""
_NOISE = 0.40
"""Standard deviation of a row's log-odds around those of its source and method: an assumption."""
_BETWEEN = 0.50
"""Standard deviation of the error that rows of one source and method share: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedWork:
    """What is known of a drafter and its work before it has drafted anything."""

    method: str
    target_b: float
    draft_b: float = 0.0
    workload: str = "mixed"
    temperature: float = 0.0
    k: int = 4
    tree: bool = False
    foreign: bool = False
    low_bits: bool = False
    low_draft_bits: bool = False
    drawn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLength:
    source: str
    drafting: DraftedWork
    length: float
    """Tokens per verification, the recovered or bonus token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedAcceptance:
    low: float
    middle: float
    high: float
    """The chance that a draft is accepted given that all before it were. The ends should hold 80 of
    100 cases."""
    hits: float = 1.0
    """Share of steps with a draft; the others cost what plain ones do."""
    source: str = ""
    over_all_steps: bool = False
    """Whether the chance is one over all steps, those without drafts included, as published lengths
    of look-ups are; else it is that of the steps with drafts."""
    sources: tuple[str, ...] = ()

    def length(self, alpha: float, k: int) -> float:
        """Tokens per step with k drafts of such a chance, steps without drafts included."""
        found = ConstantAcceptance(alpha).length(k)
        return found if self.over_all_steps else 1.0 + self.hits * (found - 1.0)


@cache
def effects() -> Mapping[str, tuple[float, float]]:
    """Every effect, with its assumed log-odds and how sure they are, before any row is read."""
    text = resources.files(__package__).joinpath("effects.toml").read_text("utf-8")
    return {
        name if kind == "effect" else f"{kind} {name}": (float(value), float(spread))
        for kind, rows in tomllib.loads(text).items()
        for name, (value, spread) in rows.items()
    }


def _vector(drafting: DraftedWork) -> NDArray[np.float64]:
    """The effects that act on a drafter, each with its amount."""
    looks_up = f"look_up {drafting.method}" in effects()
    heat = min(drafting.temperature, 1.5)
    amounts = {
        f"{'look_up' if looks_up else 'method'} {drafting.method}": 1.0,
        f"{'text' if looks_up else 'workload'} {drafting.workload}": 1.0,
        "temperature": heat,
        "drawn": heat if drafting.drawn else 0.0,
        "depth": 0.0 if looks_up else math.log2(max(drafting.k, 1) / 4),
        "foreign": float(drafting.foreign),
        "target bits": float(drafting.low_bits),
        "draft bits": float(drafting.low_draft_bits),
        "tree": float(drafting.tree),
    }
    if drafting.draft_b > 0:
        amounts["ratio"] = math.log10(drafting.target_b / drafting.draft_b) - 1.0
        amounts["draft size"] = math.log10(drafting.draft_b)
    return np.array([amounts.get(name, 0.0) for name in effects()])


def _chance(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))


class AcceptancePrior:
    """The regression, fitted to rows."""

    def __init__(self, rows: Iterable[PublishedLength]) -> None:
        self.rows = tuple(rows)
        start_E = np.array([value for value, _ in effects().values()])
        sure_E = np.array([1.0 / sd**2 for _, sd in effects().values()])
        x_RE = np.array([_vector(row.drafting) for row in self.rows]).reshape(-1, len(effects()))
        found_R = np.array([_row_log_odds(row) for row in self.rows])
        drafters = [(row.source, row.drafting.method) for row in self.rows]
        alike_RR = np.array([[one == other for other in drafters] for one in drafters], dtype=float)
        shared_RR = _BETWEEN**2 * alike_RR.reshape(len(drafters), len(drafters))
        weighed_ER = x_RE.T @ np.linalg.inv(_NOISE**2 * np.eye(len(drafters)) + shared_RR)
        precision_EE = weighed_ER @ x_RE + np.diag(sure_E)
        moment_E = weighed_ER @ (found_R - x_RE @ start_E)
        self._covariance_EE = np.linalg.inv(precision_EE)
        self._effect_E = start_E + self._covariance_EE @ moment_E

    def expect(self, drafting: DraftedWork) -> AssumedAcceptance:
        assert knows(drafting.method), drafting.method
        x_E = _vector(drafting)
        middle = float(x_E @ self._effect_E)
        spread = EIGHTY * math.sqrt(float(x_E @ self._covariance_EE @ x_E) + _BETWEEN**2)
        telling: Counter[str] = Counter()  # of this workload first, then by how many rows
        for row in self.rows:
            if row.drafting.method == drafting.method:
                telling[row.source] += 100 if row.drafting.workload == drafting.workload else 1
        return AssumedAcceptance(
            low=_chance(middle - spread),
            middle=_chance(middle),
            high=_chance(middle + spread),
            over_all_steps=True,
            sources=tuple(source for source, _ in telling.most_common()),
        )


def _row_log_odds(row: PublishedLength) -> float:
    length = min(row.length, row.drafting.k + 0.95)
    chance = ConstantAcceptance.of_length(length, row.drafting.k).alpha
    chance = min(max(chance, 0.02), 0.98)
    return math.log(chance / (1.0 - chance))


def knows(method: str) -> bool:
    return bool({f"method {method}", f"look_up {method}"} & effects().keys())


@cache
def published_lengths() -> tuple[PublishedLength, ...]:
    text = resources.files(__package__).joinpath("acceptance.toml").read_text("utf-8")
    return tuple(
        _row(source, *values)
        for source, table in tomllib.loads(text).items()
        for values in table["rows"]
    )


def _row(source: str, *values: Any) -> PublishedLength:
    method, target, draft, workload, temperature, k, length, *marks = values
    drafting = DraftedWork(
        method=method,
        target_b=float(target),
        draft_b=float(draft),
        workload=workload,
        temperature=float(temperature),
        k=int(k),
        **dict.fromkeys(marks, True),
    )
    return PublishedLength(source=source, drafting=drafting, length=float(length))


@cache
def prior_without(*sources: str) -> AcceptancePrior:
    return AcceptancePrior(row for row in published_lengths() if row.source not in sources)


_FEW_BITS = 0.7


def assume_acceptance(setup: Setup, prior: AcceptancePrior | None = None) -> AssumedAcceptance:
    """The range for the method of a setup, by `prior` or, if None, by all that is published. Raises
    ConfigError if `--acceptance` or `--rate` is not a range within 0 and 1."""
    settings, plan = setup.settings, setup.method_plan
    hits = plan.hits.get(settings.workload, 1.0) if plan else 1.0
    if settings.acceptance:
        low, high = _parse("acceptance", settings.acceptance)
        middle = (low + high) / 2
        source = "given for each draft; what servers count over drafted tokens is --rate"
    elif settings.rate:
        low, high = _parse("rate", settings.rate)
        low, middle, high = (
            ConstantAcceptance.of_length(1.0 + setup.k * rate, setup.k).alpha
            for rate in (low, (low + high) / 2, high)
        )
        source = f"given as {settings.rate} of the drafted tokens at k = {setup.k}"
    elif knows(setup.method):
        expected = (prior or prior_without()).expect(drafting_of(setup))
        return replace(
            expected,
            hits=max(hits, expected.middle),  # a step that accepts a draft has found one
            source=f"published for {setup.method} on {settings.workload} at temperature "
            f"{settings.temperature:g}: {', '.join(expected.sources[:3]) or 'nothing comparable'}",
        )
    else:
        ranges = plan.acceptance if plan else {}
        low, high = ranges.get(settings.workload, ranges.get("", (0.0, 0.0)))
        middle = (low + high) / 2
        source = "the method's own record, not measured" if ranges else "nothing is drafted"
    return AssumedAcceptance(low=low, middle=middle, high=high, hits=hits, source=source)


def drafting_of(setup: Setup) -> DraftedWork:
    settings, draft = setup.settings, setup.draft_model
    hot = settings.temperature > DRAWN_FROM and draft is not None
    stored = setup.head_quantization if draft is None else setup.draft_quantization
    in_own_file = setup.has_weights and setup.method_plan is not None and setup.method_plan.own_file
    return DraftedWork(
        method=setup.method,
        target_b=setup.target.params / 1e9,
        draft_b=0.0 if draft is None else draft.params / 1e9,
        workload=settings.workload,
        temperature=settings.temperature,
        k=max(1, setup.k),
        foreign=draft is not None and draft.family != setup.target.family,
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
