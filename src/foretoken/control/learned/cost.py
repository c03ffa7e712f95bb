"""Seconds of target steps and of drafting, learnt from every step of a running engine.

A step of the target takes s (t0 + G(rows) + t1 sequences + t2 keys read + t3 rows x context
+ t4 rows with logits, and where drafts are checked t5 + t6 sequences), a drafter's passes and
feeding a similar sum. G is piecewise linear and never falls, no coefficient is negative, and s is
the `level`: how slow the machine is just now.
How coefficients are learnt is in `regression.py`. Costs are in seconds, know no tokens, and nothing
here decides.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from foretoken.control.cost import CostModel, StepShape, StepTime
from foretoken.control.learned.regression import Floats, Learner

_KNOTS = tuple(float(2**power) for power in range(11))
"""Rows at which the slope of G may change."""
_FROM_R = np.array(_KNOTS[:-1])
_WIDTH_R = np.array([*np.diff(_KNOTS[:-1]), math.inf])
_SEGMENTS = len(_FROM_R)
_FIRST = 1
_SEQUENCES, _KEYS, _PRODUCTS, _LOGITS, _CHECK, _CHECKED = range(
    _FIRST + _SEGMENTS, _FIRST + _SEGMENTS + 6
)
_NUM_COLUMNS = _CHECKED + 1
_THOUSAND = 1e-3
"""Keys are counted in thousands, so that all columns are of a size."""

_DRAFT_KNOTS = (0.0, 4.0, 16.0, 64.0)
"""Rows of a pass at which its slope may change."""
_DRAFT_WIDTHS = (4.0, 12.0, 48.0, math.inf)
_DRAFT_FROM_R, _DRAFT_WIDTH_R = np.array(_DRAFT_KNOTS), np.array(_DRAFT_WIDTHS)
_DRAFT_SLOPES = range(3, 3 + len(_DRAFT_KNOTS))
_DRAFT_KEYS, _FED_ANY, _FED, _FED_KEYS = range(_DRAFT_SLOPES.stop, _DRAFT_SLOPES.stop + 4)

_FILE_SD = 0.15
"""How well a cost is believed that an earlier process learnt."""
_REST_STEPS = 15
"""Steps without drafts after which a drafter's level is too old: its target's stands in."""
_HOST_SHARE = 0.2
"""Of a plain step, what a sequence may take besides its rows."""
_HOST_STEPS = 256
"""Steps after which one knows what they take beside the model's pass."""
_TABLE_ROWS = 512
"""Rows for which G is tabulated at first; the table grows with what is asked."""


@final
class LearnedCost(CostModel):
    """All of a target step's time but drafting."""

    __slots__ = ("_by_rows", "_learner", "_passes_only", "_ramp", "_shapes", "_tail")

    def __init__(
        self, prior: Iterable[tuple[StepShape, float]], *, sd: float, passes_only: bool = False
    ) -> None:
        """Begin with the seconds of `prior`, each known up to the share `sd`.

        Args:
            prior: shapes and their seconds.
            sd: 0.1 for what was timed at start-up, 0.4 for what a data sheet promises.
            passes_only: the seconds are of bare passes of the model. What the rest of a step takes,
                of its own and for each sequence, is still to be learnt.
        """
        known = list(prior)
        self._passes_only = passes_only
        self._shapes = [shape for shape, _ in known]
        self._learner = Learner(
            _step_columns, known, sd=sd, slopes=range(_FIRST, _SEQUENCES), knots=_KNOTS
        )
        self._tabulate(_TABLE_ROWS)
        if passes_only:
            plain_s = self._expected(StepShape(1, 1))
            each_s = _HOST_SHARE * plain_s
            self._learner.widen({0: plain_s, _SEQUENCES: each_s, _CHECK: each_s, _CHECKED: each_s})
            self._tabulate(_TABLE_ROWS)

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

    def seconds(self, shape: StepShape) -> StepTime:
        """How long such a step takes at the present level."""
        expected = self._expected(shape)
        return self._time(expected, _step_columns(np.array([shape], dtype=np.float64))[0])

    def difference(self, shape: StepShape, than: StepShape) -> StepTime:
        """How much longer one step takes than another; doubts that they share cancel."""
        columns_SP = _step_columns(np.array([shape, than], dtype=np.float64))
        return self._time(
            self._expected(shape) - self._expected(than), columns_SP[0] - columns_SP[1]
        )

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
        return found

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step, drafting aside, took so long."""
        # Shapes of one region take about as long: each count within a power of two.
        rows, sequences, context, _ = shape
        region = rows.bit_length() << 12 | sequences.bit_length() << 6 | int(context).bit_length()
        if self._learner.observe(shape, seconds, self._expected(shape), region):
            self._tabulate(len(self._by_rows) - 1)

    def describe(self) -> dict[str, Any]:
        """What is known, for people: errors, level, coefficients in seconds."""
        values = self._learner.coefficients
        return {
            **self._learner.describe(),
            "level": self.level,
            "step_s": float(values[0]),
            "row_s": {
                int(knot): float(slope)
                for knot, slope in zip(_FROM_R, values[_FIRST:_SEQUENCES], strict=True)
            },
            "sequence_s": float(values[_SEQUENCES]),
            "key_s": float(values[_KEYS]) * _THOUSAND,
            "row_key_s": float(values[_PRODUCTS]) * _THOUSAND,
            "logits_s": float(values[_LOGITS]),
            "check_s": float(values[_CHECK]),
            "checked_sequence_s": float(values[_CHECKED]),
        }

    def to_dict(self) -> dict[str, Any]:
        """What a later process may begin with: shapes and their seconds at the usual level."""
        usual = self._learner.usual_level
        return {
            "passes_only": self._passes_only and self.steps < _HOST_STEPS,
            "shapes": [[*shape, usual * self._expected(shape)] for shape in self._points()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What an earlier process learnt, believed a little less than what is timed now."""
        return cls(_step_points(data["shapes"]), sd=_FILE_SD, passes_only=bool(data["passes_only"]))

    def _points(self) -> list[StepShape]:
        """Shapes that say all that the coefficients do."""
        most = max(shape.rows for shape in self._shapes)
        deep = max(1024.0, *(shape.context for shape in self._shapes))
        added = [StepShape(int(rows)) for rows in _KNOTS if rows < 2 * most]
        added += [StepShape(4, sequences=num, context=at) for num in (1, 4) for at in (0.0, deep)]
        added += [StepShape(32, context=at, prompt_rows=31) for at in (0.0, deep)]
        added += [StepShape(num, sequences=num) for num in (4, 16)]
        return list(dict.fromkeys([*self._shapes, *added]))

    def _expected(self, shape: StepShape) -> float:
        """Seconds at level 1, in plain Python: called for every step."""
        rows, sequences, context, prompt_rows = shape
        if rows >= len(self._by_rows):
            self._tabulate(2 * rows)
        each, keys, product, logits, check, checked = self._tail
        seconds: float = self._by_rows.item(rows)
        seconds += each * sequences + (keys * sequences + product * rows) * context
        if _checks_drafts(shape):
            seconds += check + checked * sequences
        return seconds + logits * (rows - prompt_rows)

    def _time(self, expected: float, columns_P: Floats) -> StepTime:
        learner = self._learner
        chance = (learner.noise * expected) ** 2 / 16.0
        sd = math.sqrt(learner.variance(columns_P) + chance)
        return StepTime(learner.level * expected, learner.level * sd)

    def _tabulate(self, most_rows: int) -> None:
        """t0 + G for every number of rows, and the other coefficients per token."""
        values = self._learner.coefficients
        at_knots = values[0] + np.concatenate(
            ([0.0], np.cumsum(values[_FIRST : _SEQUENCES - 1] * _WIDTH_R[:-1]))
        )
        rows_R = np.arange(most_rows + 1, dtype=np.float64)
        self._by_rows: Floats = np.interp(rows_R, _FROM_R, at_knots)
        last = int(_FROM_R[-1])
        if most_rows > last:
            self._by_rows[last:] += values[_SEQUENCES - 1] * (rows_R[last:] - last)
        self._ramp: Floats = rows_R
        each, keys, product, *rest = values[_SEQUENCES:].tolist()
        self._tail: tuple[float, ...] = (each, _THOUSAND * keys, _THOUSAND * product, *rest)


class DraftShape(NamedTuple):
    """What drafting in one step computes, as far as its time depends on it."""

    sequences: int
    """Sequences that drafts are made for."""
    passes: int
    """Forward passes of the drafter, one after another; for a look-up 1."""
    rows: int
    """Sequences still drafting, summed over the passes."""
    context: float
    """Tokens with keys and values that a sequence attends to, on average."""
    fed_rows: int = 0
    """Tokens fed to catch up, beyond the one that each draft begins with."""


@final
class DrafterCost:
    """What one drafter takes: the fixed part, its passes, and feeding what it missed."""

    __slots__ = (
        "_learner", "_machine", "_machine_level", "_machine_steps", "_one_pass", "_points", "_ramp",
        "_values",
    )  # fmt: skip

    def __init__(
        self,
        prior: Iterable[tuple[DraftShape, float]],
        *,
        sd: float,
        one_pass: bool = False,
        machine: LearnedCost | None = None,
    ) -> None:
        """Begin with the seconds of `prior`, each known up to the share `sd`.

        `one_pass` drafters make all their drafts in one forward pass or look them up. `machine`
        is the target's cost: a drafter that rests grows slower with it.
        """
        self._points = list(prior)
        self._learner = Learner(
            _draft_columns, self._points, sd=sd, slopes=_DRAFT_SLOPES, knots=_DRAFT_KNOTS
        )
        self._one_pass = one_pass
        self._machine = machine
        self._machine_level, self._machine_steps = 1.0, 0
        self._values: list[float] = self._learner.coefficients.tolist()
        self._ramp: Floats = np.arange(65, dtype=np.float64)

    @property
    def one_pass(self) -> bool:
        """Whether all drafts come of one pass: a `DraftShape` of it has `passes` 1."""
        return self._one_pass

    @property
    def reads(self) -> bool:
        """Whether feeding it was timed at the start: it has keys and values of its own."""
        return any(shape.fed_rows for shape, _ in self._points)

    @property
    def level(self) -> float:
        """How many times as long as at the prior everything takes at the moment."""
        if self._machine is None:
            return self._learner.level
        return self._learner.level * self._machine.level / self._machine_level

    @property
    def error(self) -> tuple[float, float]:
        """Median and ninth decile of |log(measured / predicted)|; NaN before any draft."""
        return self._learner.error

    def drafting(self, sequences: int, most: int, context: float) -> Floats:
        """Seconds of drafts of 0 to `most` tokens for caught-up sequences, float64 [most + 1]."""
        if most >= len(self._ramp):
            self._ramp = np.arange(2 * most, dtype=np.float64)
        first = self._expected(DraftShape(sequences, 1, sequences, context))
        level = self.level
        if self._one_pass:
            found = np.full(most + 1, level * first)
        else:
            second = self._expected(DraftShape(sequences, 2, 2 * sequences, context))
            found = self._ramp[: most + 1] * (level * (second - first))
            found += level * (2.0 * first - second)
        found[0] = 0.0
        return found

    def feeding(self, rows: int, context: float) -> float:
        """Seconds of feeding so many tokens, each attending to `context`, without drafting."""
        if rows <= 0:
            return 0.0
        any_row, row, key = self._values[_FED_ANY:]
        return float(self.level * (any_row + rows * (row + key * _THOUSAND * context)))

    def feeding_each(self, rows_N: NDArray[np.int64], context: float) -> Floats:
        """Seconds of feeding so many tokens of each sequence by itself, float64 [N]."""
        any_row, row, key = self._values[_FED_ANY:]
        each = any_row * (rows_N > 0) + rows_N * (row + key * _THOUSAND * context)
        found: Floats = self.level * each
        return found

    def observe(self, shape: DraftShape, seconds: float) -> None:
        """Drafting and feeding of a step took so long."""
        if self._one_pass and shape.passes:
            shape = shape._replace(passes=1, rows=shape.sequences)
        learner = self._learner
        region = shape.rows.bit_length() << 6 | shape.fed_rows.bit_length()
        machine = self._machine
        if machine is not None:
            if machine.steps > self._machine_steps + _REST_STEPS:
                learner.shift_level(machine.level / self._machine_level)
            self._machine_level, self._machine_steps = machine.level, machine.steps
        if learner.observe(shape, seconds, self._expected(shape), region):
            self._values = learner.coefficients.tolist()

    def describe(self) -> dict[str, Any]:
        """What is known, for people: errors, level, coefficients in seconds."""
        values = self._values
        return {
            **self._learner.describe(),
            "level": self.level,
            "call_s": values[0],
            "sequence_s": values[1],
            "pass_s": values[2],
            "row_s": dict(
                zip((int(knot) for knot in _DRAFT_KNOTS), values[3:_DRAFT_KEYS], strict=True)
            ),
            "key_s": values[_DRAFT_KEYS] * _THOUSAND,
            "feed_s": values[_FED_ANY],
            "fed_row_s": values[_FED],
            "fed_key_s": values[_FED_KEYS] * _THOUSAND,
        }

    def to_dict(self) -> dict[str, Any]:
        """What a later process may begin with: shapes and their seconds at the usual level."""
        usual = self._learner.usual_level
        shapes = [shape for shape, _ in self._points]
        return {
            "one_pass": self._one_pass,
            "shapes": [[*shape, usual * self._expected(shape)] for shape in shapes],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], machine: LearnedCost | None = None) -> Self:
        """What an earlier process learnt, believed a little less than what is timed now."""
        points = [
            (DraftShape(int(n), int(passes), int(rows), float(context), int(fed)), float(seconds))
            for n, passes, rows, context, fed, seconds in data["shapes"]
        ]
        return cls(points, sd=_FILE_SD, one_pass=bool(data["one_pass"]), machine=machine)

    def _expected(self, shape: DraftShape) -> float:
        """Seconds at level 1, in plain Python: called for every step."""
        sequences, passes, rows, context, fed_rows = shape
        call, each, one, *slopes, key, any_fed, fed, fed_key = self._values
        seconds = 0.0
        if passes:
            left = mean = rows / passes
            seconds = one + (mean * _THOUSAND * key) * context
            for slope, width in zip(slopes, _DRAFT_WIDTHS, strict=True):
                seconds += slope * min(left, width)
                left -= width
                if left <= 0.0:
                    break
            seconds = call + each * sequences + passes * seconds
        if fed_rows:
            seconds += any_fed + fed_rows * (fed + fed_key * _THOUSAND * context)
        return float(seconds)


def _step_columns(shapes_NF: Floats) -> Floats:
    """The summands of steps without their coefficients, [N, P]."""
    rows_N, sequences_N, context_N, prompt_rows_N = shapes_NF.T
    columns_NP = np.empty((len(shapes_NF), _NUM_COLUMNS))
    columns_NP[:, 0] = 1.0
    columns_NP[:, _FIRST:_SEQUENCES] = np.clip(rows_N[:, None] - _FROM_R, 0.0, _WIDTH_R)
    columns_NP[:, _SEQUENCES] = sequences_N
    context_N = _THOUSAND * context_N
    columns_NP[:, _KEYS] = sequences_N * context_N
    columns_NP[:, _PRODUCTS] = rows_N * context_N
    columns_NP[:, _LOGITS] = rows_N - prompt_rows_N
    columns_NP[:, _CHECK] = rows_N - prompt_rows_N > sequences_N
    columns_NP[:, _CHECKED] = columns_NP[:, _CHECK] * sequences_N
    return columns_NP


def _checks_drafts(shape: StepShape) -> bool:
    """Whether there are more rows with logits than sequences."""
    return shape.rows - shape.prompt_rows > shape.sequences


def _draft_columns(shapes_NF: Floats) -> Floats:
    """The summands of drafting without their coefficients, [N, P]."""
    sequences_N, passes_N, rows_N, context_N, fed_N = shapes_NF.T
    columns_NP = np.empty((len(shapes_NF), _FED_KEYS + 1))
    drafts_N = passes_N > 0.0
    columns_NP[:, 0] = drafts_N
    columns_NP[:, 1] = sequences_N * drafts_N
    columns_NP[:, 2] = passes_N
    mean_N = rows_N / np.maximum(passes_N, 1.0)
    segments_NR = np.clip(mean_N[:, None] - _DRAFT_FROM_R, 0.0, _DRAFT_WIDTH_R)
    columns_NP[:, _DRAFT_SLOPES.start : _DRAFT_SLOPES.stop] = passes_N[:, None] * segments_NR
    context_N = _THOUSAND * context_N
    columns_NP[:, _DRAFT_KEYS] = rows_N * context_N
    columns_NP[:, _FED_ANY] = fed_N > 0.0
    columns_NP[:, _FED] = fed_N
    columns_NP[:, _FED_KEYS] = fed_N * context_N
    return columns_NP


def _step_points(rows: Iterable[Sequence[float]]) -> list[tuple[StepShape, float]]:
    return [
        (StepShape(int(num), int(sequences), float(context), int(prompt_rows)), float(seconds))
        for num, sequences, context, prompt_rows, seconds in rows
    ]
