"""The model of step time: how long a step takes, by what it computes.

Every estimate of time in Foretoken is a `CostModel` of this file: learnt from the steps of a
running engine (`RowCost`, `PlainCost`), fitted to a recorded run (`LineCost`), or derived from the
data sheet of a device (`RooflineCost`). Knows neither tokens nor drafters. What is learnt fades, so
that estimates follow the machine.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

_FADE = 0.97
"""What a step's weight is multiplied by at each later one."""
_ROW_SHARE = 0.04
"""Before it is known: what one more row costs, in plain steps."""
_DOUBT = 0.003
"""Relative variance of the rows from which on a measured slope counts more than that guess."""
_PLAIN_KEEPS = 0.9
"""Weight of the past in the running mean of a plain step."""
_LEAST_SHARE = 0.1
"""Nothing is believed to be more than ten times as fast as plain decoding."""
_PASS_LEARNS = 0.1
"""Share of a new measurement in what a drafter's pass takes."""
_PASS_OUTLIER = 3.0
"""A pass counts as at most this many usual ones."""
_PASS_DOUBT = 0.99
"""What the time of a pass is multiplied by whenever none is worth it, so that one is timed again
some day."""
_STEP_OUTLIER = 4.0
"""A step counts as at most this many usual ones of its draft length."""
TRIAL_STEPS = 6
"""Measured steps of a trial of one draft length."""


class StepShape(NamedTuple):
    """What a step of a model computes, as far as its time depends on it."""

    rows: int
    """Tokens of the forward pass, drafts and prompts included."""
    sequences: int = 1
    """Sequences that these rows belong to."""
    context: float = 0.0
    """Tokens with keys and values that a sequence attends to, on average."""
    prompt_rows: int = 0
    """How many of the rows are a prompt's, which have no logits."""


class StepTime(NamedTuple):
    """An estimate of a step's time."""

    seconds: float
    sd: float = math.inf
    """Standard deviation of the estimate; infinite where the model does not say."""


class CostModel(ABC):
    """Seconds of a step by its shape."""

    @abstractmethod
    def seconds(self, shape: StepShape) -> StepTime:
        """How long a step of this shape takes."""


@dataclass(slots=True)
class _LineSums:
    """Faded sums for a straight line through (rows, seconds)."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_squared: float = 0.0
    product: float = 0.0

    def add(self, rows: float, seconds: float) -> None:
        self.weight = _FADE * self.weight + 1.0
        self.rows = _FADE * self.rows + rows
        self.seconds = _FADE * self.seconds + seconds
        self.rows_squared = _FADE * self.rows_squared + rows * rows
        self.product = _FADE * self.product + rows * seconds


@final
class RowCost(CostModel):
    """A decoding step by the number of its rows, drafting aside; learns from every such step."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._sums = _LineSums()

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return self._sums.weight > 0.0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step without prompt tokens took so long."""
        self._sums.add(float(shape.rows), seconds)

    def row_seconds(self) -> float:
        """Seconds that one more row adds: the slope, as far as steps had different rows."""
        sums = self._sums
        if not self.known:
            return _ROW_SHARE
        mean_rows, mean_s = sums.rows / sums.weight, sums.seconds / sums.weight
        # Steps of one size say nothing of the slope. A guess stands in, weighed against the
        # measured slope by how much the sizes of the steps varied.
        guess = _ROW_SHARE * mean_s / (1.0 + _ROW_SHARE * (mean_rows - 1.0))
        variance = max(sums.rows_squared / sums.weight - mean_rows * mean_rows, 0.0)
        covariance = sums.product / sums.weight - mean_rows * mean_s
        doubt = _DOUBT * mean_rows * mean_rows
        slope = (covariance + doubt * guess) / (variance + doubt)
        return min(max(slope, 0.0), mean_s / mean_rows)

    def seconds(self, shape: StepShape) -> StepTime:
        """The line at `shape.rows`; while nothing was measured, in steps of one row."""
        sums = self._sums
        if not self.known:
            return StepTime(1.0 + _ROW_SHARE * (shape.rows - 1))
        mean_s, mean_rows = sums.seconds / sums.weight, sums.rows / sums.weight
        return StepTime(max(mean_s + self.row_seconds() * (shape.rows - mean_rows), 0.1 * mean_s))


@final
class PlainCost(CostModel):
    """A plain decoding step by the number of its sequences; learns from steps without drafts.

    Where no step of that number was seen, the nearest smaller one's time (or the nearest larger
    one's, scaled down) stands in, so that the estimate errs against speculation.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        """Know the times `seconds` already, by number of sequences."""
        self._seconds = dict(seconds or {})

    @property
    def known(self) -> bool:
        """Whether any plain step was seen."""
        return bool(self._seconds)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step without prompt tokens and drafts took so long."""
        known = self._seconds.get(shape.sequences, seconds)
        self._seconds[shape.sequences] = _PLAIN_KEEPS * known + (1 - _PLAIN_KEEPS) * seconds

    def seconds(self, shape: StepShape) -> StepTime:
        """A plain step of `shape.sequences`; asserts that any was seen."""
        assert self._seconds, "no plain step was seen"
        smaller = [seen for seen in self._seconds if seen <= shape.sequences]
        if smaller:
            return StepTime(self._seconds[max(smaller)])
        nearest = min(self._seconds)
        return StepTime(self._seconds[nearest] * shape.sequences / nearest)


@final
@dataclass(frozen=True, slots=True)
class LineCost(CostModel):
    """A straight line: the first row, and what each further one adds. Learns nothing."""

    first_s: float = 1.0
    """1: times are in plain steps."""
    row_s: float = 0.0

    def seconds(self, shape: StepShape) -> StepTime:
        """The line at `shape.rows`."""
        return StepTime(self.first_s + self.row_s * (shape.rows - 1))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost(CostModel):
    """The larger of reading and multiplying, and no less than the launches (Williams et al. 2009).

    A step reads every weight that some row needs and the keys and values of every sequence once,
    and multiplies each row with the weights that it passes through. Nothing here is measured.
    """

    weight_bytes: float
    """Read by every step."""
    expert_bytes: float = 0.0
    """Held by all routed experts of a mixture; read as far as some row needs them."""
    expert_share: float = 0.0
    """Share of the experts that one row passes through."""
    kv_bytes: Callable[[float], float]
    """Read for each token of a sequence with so many."""
    flops: Callable[[float], float]
    """Operations of one row that attends to so many tokens."""
    bandwidth: float
    """Bytes per second that reading reaches."""
    flops_per_s: float
    """Operations per second that multiplying reaches."""
    floor_s: float = 0.0
    """A step is not faster than its launches."""
    exchange_s: float = 0.0
    """Waiting for the other ranks, whatever the rows."""
    exchange_row_s: float = 0.0
    """What each row adds to that."""
    reread_share: float = 0.0
    """Share of the weights' reading that each further row repeats, where kernels unpack weights row
    by row."""
    reread_rows: float = 8
    """From this many rows on, kernels unpack a weight once for all."""

    def seconds(self, shape: StepShape) -> StepTime:
        """The bound for this shape."""
        # With few rows most experts are read by none of them, with many rows by at least one.
        touched = 1.0 - (1.0 - self.expert_share) ** shape.rows
        repeats = 1.0 + self.reread_share * (min(shape.rows, self.reread_rows) - 1)
        moved = (self.weight_bytes + touched * self.expert_bytes) * repeats
        moved += shape.sequences * shape.context * self.kv_bytes(shape.context)
        multiplying = shape.rows * self.flops(shape.context) / self.flops_per_s
        bound = max(moved / self.bandwidth, multiplying, self.floor_s)
        return StepTime(bound + self.exchange_s + self.exchange_row_s * shape.rows)


def speculative_step(verify_cost: float, draft_cost: float, k: float) -> float:
    """V + k c: plain steps that a step with k drafts takes, a verification taking V of them at the
    same batch and a draft step c."""
    return verify_cost + k * draft_cost


@final
class PassCost:
    """Seconds of a drafter's pass: a running mean to which no outlier adds much."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float | None = None) -> None:
        """Know `seconds` already; None: passes are taken to be free, so that one will be timed."""
        self._seconds = seconds

    @property
    def seconds(self) -> float:
        """The mean; 0 until measured."""
        return self._seconds or 0.0

    def observe(self, seconds: float) -> None:
        """A pass took so long."""
        before = seconds if self._seconds is None else self._seconds
        self._seconds = before + _PASS_LEARNS * (min(seconds, _PASS_OUTLIER * before) - before)

    def doubt(self) -> None:
        """No pass was worth it: what is known grows old."""
        if self._seconds is not None:
            self._seconds *= _PASS_DOUBT


@final
class RelativeCost:
    """What tokens take, over what plain steps would have taken for them."""

    __slots__ = ("_plain_s", "_seconds")

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._seconds = 0.0
        self._plain_s = 0.0

    def observe(self, seconds: float, plain_s: float) -> None:
        """A step took `seconds`; its tokens would have taken `plain_s` in plain steps."""
        self._seconds = _FADE * self._seconds + seconds
        self._plain_s = _FADE * self._plain_s + plain_s

    @property
    def share(self) -> float:
        """The time of a token over that of a plain one; 1 at most."""
        if self._plain_s <= 0.0:
            return 1.0
        return min(max(self._seconds / self._plain_s, _LEAST_SHARE), 1.0)


@final
class TokenCost:
    """Seconds between two tokens of a sequence, measured at one draft length and load.

    Time and acceptance in one number: the model-free arm, which no wrong model can mislead.
    """

    __slots__ = ("seconds", "steps", "tokens")

    def __init__(self) -> None:
        """Nothing measured yet."""
        self.steps = self.seconds = self.tokens = 0.0
        """Faded sums; tokens are those of one sequence."""

    def observe(self, seconds: float, tokens: float) -> None:
        """A step took so long and gave each sequence so many tokens."""
        usual = self.seconds / self.steps if self.steps >= TRIAL_STEPS / 2 else seconds
        self.steps = _FADE * self.steps + 1.0
        self.seconds = _FADE * self.seconds + min(seconds, _STEP_OUTLIER * usual)
        self.tokens = _FADE * self.tokens + tokens

    def doubt(self) -> None:
        """What is known is old: a trial is about to count for more."""
        share = min(1.0, TRIAL_STEPS / 4 / self.steps) if self.steps else 1.0
        self.steps, self.seconds, self.tokens = (
            share * self.steps, share * self.seconds, share * self.tokens
        )  # fmt: skip

    @property
    def per_token(self) -> float:
        """The estimate."""
        return self.seconds / self.tokens
