"""Seconds of drafting, learnt from every step in which a drafter worked.

A fixed part, passes with their sequences and rows, and tokens that are read to catch up. How
coefficients are learnt is in `regression.py`. Knows no tokens, and nothing here decides.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from foretoken.control.learned.regression import WINDOW, Floats, Learner
from foretoken.control.learned.target_step_time import FILE_SD, THOUSAND, TargetStepTimeModel

READ_TOGETHER = 64
"""Tokens that are read in one call at the least, where there are more."""
_DRAFT_KNOTS = (0.0, 4.0, 16.0, 64.0)
"""Rows of a pass at which its slope may change."""
_DRAFT_WIDTHS = (4.0, 12.0, 48.0, math.inf)
_DRAFT_FROM_R, _DRAFT_WIDTH_R = np.array(_DRAFT_KNOTS), np.array(_DRAFT_WIDTHS)
_DRAFT_SLOPES = range(3, 3 + len(_DRAFT_KNOTS))
_DRAFT_KEYS, _FED_ANY, _FED, _FED_KEYS = range(_DRAFT_SLOPES.stop, _DRAFT_SLOPES.stop + 4)


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
        machine: TargetStepTimeModel | None = None,
    ) -> None:
        """Begin with the seconds of `prior`, each known up to the share `sd`.

        `one_pass` drafters make all their drafts in one forward pass, of as many rows as drafts, or
        look them up. `machine` is the target's cost: a drafter that rests grows slower with it.
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
    def sequence_s(self) -> float:
        """Seconds that drafting takes once for each sequence, its rows aside."""
        return self.level * self._values[1]

    @property
    def error(self) -> tuple[float, float]:
        """Median and ninth decile of |log(measured / predicted)|; NaN before any draft."""
        return self._learner.error

    def drafting(self, sequences: int, max_drafts: int, context: float) -> Floats:
        """Seconds of 0 to `max_drafts` drafts of caught-up sequences, float64 [max_drafts + 1]."""
        if max_drafts >= len(self._ramp):
            self._ramp = np.arange(2 * max_drafts, dtype=np.float64)
        first = self._expected(DraftShape(sequences, 1, sequences, context))
        level = self.level
        if self._one_pass:
            shapes = (
                DraftShape(sequences, 1, sequences * k, context) for k in range(max_drafts + 1)
            )
            found = np.array([level * self._expected(shape) for shape in shapes])
        else:
            second = self._expected(DraftShape(sequences, 2, 2 * sequences, context))
            found = self._ramp[: max_drafts + 1] * (level * (second - first))
            found += level * (2.0 * first - second)
        found[0] = 0.0
        return found

    def feeding(self, rows: int, context: float) -> float:
        """Seconds of feeding so many tokens, each attending to `context`, without drafting."""
        if rows <= 0:
            return 0.0
        any_row, row, key = self._values[_FED_ANY:]
        return float(self.level * (any_row + rows * (row + key * THOUSAND * context)))

    def feeding_each(self, rows_N: NDArray[np.int64], context: float) -> Floats:
        """Seconds of feeding so many tokens of each sequence, float64 [N]. Several are read
        together, so that each has its part of what a call takes."""
        any_row, row, key = self._values[_FED_ANY:]
        calls_N = np.minimum(rows_N / READ_TOGETHER, 1.0) if len(rows_N) > 1 else rows_N > 0
        each = any_row * calls_N + rows_N * (row + key * THOUSAND * context)
        found: Floats = self.level * each
        return found

    def observe(self, shape: DraftShape, seconds: float, *, times: int = 1) -> None:
        """Drafting and feeding of a step took so long: the mean of so many."""
        if self._one_pass and shape.passes:
            shape = shape._replace(passes=1)
        learner = self._learner
        region = shape.rows.bit_length() << 6 | shape.fed_rows.bit_length()
        machine = self._machine
        if machine is not None:
            # After so many steps without drafts its level is too old: its target's stands in.
            if machine.steps > self._machine_steps + WINDOW:
                learner.shift_level(machine.level / self._machine_level)
            self._machine_level, self._machine_steps = machine.level, machine.steps
        if learner.observe(shape, seconds, self._expected(shape), region, times=times):
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
            "key_s": values[_DRAFT_KEYS] * THOUSAND,
            "feed_s": values[_FED_ANY],
            "fed_row_s": values[_FED],
            "fed_key_s": values[_FED_KEYS] * THOUSAND,
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
    def from_dict(cls, data: Mapping[str, Any], machine: TargetStepTimeModel | None = None) -> Self:
        """What an earlier process learnt, believed a little less than what is timed now."""
        points = [
            (DraftShape(int(n), int(passes), int(rows), float(context), int(fed)), float(seconds))
            for n, passes, rows, context, fed, seconds in data["shapes"]
        ]
        return cls(points, sd=FILE_SD, one_pass=bool(data["one_pass"]), machine=machine)

    def _expected(self, shape: DraftShape) -> float:
        """Seconds at level 1, in plain Python: called for every step."""
        sequences, passes, rows, context, fed_rows = shape
        call, each, one, *slopes, key, any_fed, fed, fed_key = self._values
        seconds = 0.0
        if passes:
            left = mean = rows / passes
            seconds = one + (mean * THOUSAND * key) * context
            for slope, width in zip(slopes, _DRAFT_WIDTHS, strict=True):
                seconds += slope * min(left, width)
                left -= width
                if left <= 0.0:
                    break
            seconds = call + each * sequences + passes * seconds
        if fed_rows:
            seconds += any_fed + fed_rows * (fed + fed_key * THOUSAND * context)
        return float(seconds)


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
    context_N = THOUSAND * context_N
    columns_NP[:, _DRAFT_KEYS] = rows_N * context_N
    columns_NP[:, _FED_ANY] = fed_N > 0.0
    columns_NP[:, _FED] = fed_N
    columns_NP[:, _FED_KEYS] = fed_N * context_N
    return columns_NP
