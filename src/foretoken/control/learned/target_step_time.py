"""Seconds of target steps, learnt from every step of a running engine.

A step takes s (t0 + G(rows) + t1 sequences + t2 keys read + t3 rows x context + t4 rows with
logits, where drafts are checked t5 + t6 sequences, and of a mixture t7 experts). G is piecewise
linear and never falls, no coefficient is negative, and s is the `level`: how slow the machine is
just now. What tells rows of one draft from rows of many sequences is the experts that they read.
How coefficients are learnt is in `regression.py`. Costs are in seconds, know no tokens, and nothing
here decides.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, final

import numpy as np

from foretoken.control.cost import CostModel, StepShape
from foretoken.control.learned.experts_read import ExpertsRead
from foretoken.control.learned.regression import Floats, Learner

_KNOTS = tuple(float(2**power) for power in range(11))
"""Rows at which the slope of G may change."""
_FROM_R = np.array(_KNOTS[:-1])
_WIDTH_R = np.array([*np.diff(_KNOTS[:-1]), math.inf])
_SEGMENTS = len(_FROM_R)
_SEQUENCES, _KEYS, _PRODUCTS, _LOGITS, _CHECK, _CHECKED, _EXPERTS = range(
    1 + _SEGMENTS, 8 + _SEGMENTS
)
THOUSAND = 1e-3
"""Keys are counted in thousands, so that all columns are of a size."""

FILE_SD = 0.15
"""How well a cost is believed that an earlier process learnt."""
_HOST_SHARE = 0.2
"""Of a plain step, what a sequence may take besides its rows."""
_HOST_STEPS = 256
"""Steps after which one knows what they take beside the model's pass."""


@final
class TargetStepTimeModel(CostModel):
    """All of a target step's time but drafting."""

    __slots__ = (
        "_by_rows", "_expert_s", "_experts", "_learner", "_passes_only", "_ramp", "_shapes",
        "_tail",
    )  # fmt: skip

    def __init__(
        self,
        prior: Iterable[tuple[StepShape, float]],
        *,
        sd: float,
        passes_only: bool = False,
        experts: ExpertsRead | None = None,
    ) -> None:
        """Begin with the seconds of `prior`, each known up to the share `sd`.

        Args:
            prior: shapes and their seconds.
            sd: 0.1 for what was timed at start-up, 0.4 for what a data sheet promises.
            passes_only: the seconds are of bare passes of the model. What the rest of a step takes,
                of its own and for each sequence, is still to be learnt.
            experts: how many of them a step reads; None: a model without.
        """
        known = list(prior)
        self._passes_only, self._experts = passes_only, experts
        self._shapes = [shape for shape, _ in known]
        self._learner = Learner(
            partial(_step_columns, counts_experts=experts is not None),
            [(self._with_experts(shape), seconds) for shape, seconds in known],
            sd=sd, slopes=range(1, _SEQUENCES), knots=_KNOTS,
        )  # fmt: skip
        self._tabulate(int(_FROM_R[-1]))
        if passes_only:
            plain_s = self._expected(StepShape(1, 1))
            each_s = _HOST_SHARE * plain_s
            self._learner.widen({0: plain_s, _SEQUENCES: each_s, _CHECK: each_s, _CHECKED: each_s})
            self._tabulate(int(_FROM_R[-1]))

    @property
    def level(self) -> float:
        """How many times as long as at the prior everything takes at the moment."""
        return self._learner.level

    @property
    def steps(self) -> int:
        """Steps observed."""
        return self._learner.count

    @property
    def error(self) -> tuple[float, float]:
        """Median and ninth decile of |log(measured / predicted)|; NaN before any step."""
        return self._learner.error

    def seconds(self, shape: StepShape) -> float:
        """How long such a step takes at the present level."""
        return self._learner.level * self._expected(shape)

    def curve(self, shape: StepShape, most: int) -> Floats:
        """Seconds of the same step with 0 to `most` rows more, float64 [most + 1].

        Each further row attends to `shape.context` tokens and has logits.
        """
        if shape.rows + most >= len(self._by_rows):
            self._tabulate(2 * (shape.rows + most))
        first = shape.rows
        each, key, product, logits, check, checked = self._tail
        keys = key * shape.sequences * shape.context
        slope = product * shape.context + logits
        fixed = each * shape.sequences + keys + slope * first - logits * shape.prompt_rows
        checking = check + checked * shape.sequences
        level = self._learner.level
        found: Floats = self._ramp[: most + 1] * (level * slope)
        found += level * fixed
        found += level * self._by_rows[first : first + most + 1]
        found[max(shape.sequences + shape.prompt_rows + 1 - first, 0) :] += level * checking
        if self._experts is not None:
            found += level * self._expert_s * self._experts.curve(shape, most)
        return found

    def observe(self, shape: StepShape, seconds: float, *, times: int = 1) -> None:
        """A step, drafting aside, took so long: the mean of so many."""
        if self._experts is not None:
            if shape.experts:
                self._experts.observe(shape, times)
            shape = self._with_experts(shape)
        # Shapes of one region take about as long: each count within a power of two, contexts,
        # which grow while sequences run, within a power of four.
        rows, sequences, context, *_ = shape
        deep = int(context).bit_length() // 2
        region = rows.bit_length() << 12 | sequences.bit_length() << 6 | deep
        if self._learner.observe(shape, seconds, self._expected(shape), region, times=times):
            self._tabulate(len(self._by_rows) - 1)

    def describe(self) -> dict[str, Any]:
        """What is known, for people: errors, level, coefficients in seconds."""
        values = self._learner.coefficients
        read = self._experts
        mixture = {"expert_s": self._expert_s, "experts": read.to_dict()} if read else {}
        return {
            **self._learner.describe(),
            **mixture,
            "level": self.level,
            "step_s": float(values[0]),
            "row_s": {
                int(knot): float(slope)
                for knot, slope in zip(_FROM_R, values[1:_SEQUENCES], strict=True)
            },
            "sequence_s": float(values[_SEQUENCES]),
            "key_s": float(values[_KEYS]) * THOUSAND,
            "row_key_s": float(values[_PRODUCTS]) * THOUSAND,
            "logits_s": float(values[_LOGITS]),
            "check_s": float(values[_CHECK]),
            "checked_sequence_s": float(values[_CHECKED]),
        }

    def to_dict(self) -> dict[str, Any]:
        """What a later process may begin with: shapes and their seconds at the usual level."""
        usual = self._learner.usual_level
        return {
            "passes_only": self._passes_only and self.steps < _HOST_STEPS,
            "experts": None if self._experts is None else self._experts.to_dict(),
            "shapes": [[*shape, usual * self._expected(shape)] for shape in self._points()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What an earlier process learnt, believed a little less than what is timed now."""
        experts = None if data["experts"] is None else ExpertsRead(**data["experts"])
        only, points = bool(data["passes_only"]), _step_points(data["shapes"])
        return cls(points, sd=FILE_SD, passes_only=only, experts=experts)

    def _points(self) -> list[StepShape]:
        """Shapes that say all that the coefficients do."""
        most = max(shape.rows for shape in self._shapes)
        deep = max(1024.0, *(shape.context for shape in self._shapes))
        added = [StepShape(int(rows)) for rows in _KNOTS if rows < 2 * most]
        added += [StepShape(4, sequences=num, context=at) for num in (1, 4) for at in (0.0, deep)]
        added += [StepShape(32, context=at, prompt_rows=31) for at in (0.0, deep)]
        added += [StepShape(num, sequences=num) for num in (4, 16)]
        if self._experts is not None:
            added += self._experts.alike(added)
        return [self._with_experts(s) for s in dict.fromkeys([*self._shapes, *added])]

    def _with_experts(self, shape: StepShape) -> StepShape:
        """The step with what it is expected to read, where what it read is not known."""
        if self._experts is None or shape.experts:
            return shape
        return shape._replace(experts=self._experts.expected(shape))

    def _expected(self, shape: StepShape) -> float:
        """Seconds at level 1, in plain Python: called for every step."""
        rows, sequences, context, prompt_rows, experts = shape
        if rows >= len(self._by_rows):
            self._tabulate(2 * rows)
        each, keys, product, logits, check, checked = self._tail
        seconds: float = self._by_rows.item(rows)
        seconds += each * sequences + (keys * sequences + product * rows) * context
        if _checks_drafts(shape):
            seconds += check + checked * sequences
        if self._experts is not None:
            seconds += self._expert_s * (experts or self._experts.expected(shape))
        return seconds + logits * (rows - prompt_rows)

    def _tabulate(self, most_rows: int) -> None:
        """t0 + G for every number of rows, and the other coefficients per token."""
        values = self._learner.coefficients
        at_knots = values[0] + np.concatenate(
            ([0.0], np.cumsum(values[1 : _SEQUENCES - 1] * _WIDTH_R[:-1]))
        )
        rows_R = np.arange(most_rows + 1, dtype=np.float64)
        self._by_rows: Floats = np.interp(rows_R, _FROM_R, at_knots)
        last = int(_FROM_R[-1])
        if most_rows > last:
            self._by_rows[last:] += values[_SEQUENCES - 1] * (rows_R[last:] - last)
        self._ramp: Floats = rows_R
        each, keys, product, *rest = values[_SEQUENCES:_EXPERTS].tolist()
        self._expert_s = 0.0 if self._experts is None else values.item(_EXPERTS)
        self._tail: tuple[float, ...] = (each, THOUSAND * keys, THOUSAND * product, *rest)


def _step_columns(shapes_NF: Floats, *, counts_experts: bool) -> Floats:
    """The summands of steps without their coefficients, [N, P]."""
    rows_N, sequences_N, context_N, prompt_rows_N, experts_N = shapes_NF.T
    columns_NP = np.empty((len(shapes_NF), _EXPERTS + counts_experts))
    columns_NP[:, 0] = 1.0
    columns_NP[:, 1:_SEQUENCES] = np.clip(rows_N[:, None] - _FROM_R, 0.0, _WIDTH_R)
    columns_NP[:, _SEQUENCES] = sequences_N
    context_N = THOUSAND * context_N
    columns_NP[:, _KEYS] = sequences_N * context_N
    columns_NP[:, _PRODUCTS] = rows_N * context_N
    columns_NP[:, _LOGITS] = rows_N - prompt_rows_N
    columns_NP[:, _CHECK] = rows_N - prompt_rows_N > sequences_N
    columns_NP[:, _CHECKED] = columns_NP[:, _CHECK] * sequences_N
    if counts_experts:
        columns_NP[:, _EXPERTS] = experts_N
    return columns_NP


def _checks_drafts(shape: StepShape) -> bool:
    """Whether there are more rows with logits than sequences."""
    return shape.rows - shape.prompt_rows > shape.sequences


def _step_points(rows: Iterable[Sequence[float]]) -> list[tuple[StepShape, float]]:
    return [
        (
            StepShape(int(num), int(sequences), float(context), int(prompts), float(experts)),
            float(s),
        )
        for num, sequences, context, prompts, experts, s in rows
    ]
