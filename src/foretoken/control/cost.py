"""The model of step time: how long a step takes, by what it computes.

A `CostModel` of this file is the mean of plain steps of a running engine (`PlainCost`), or derived
from the data sheet of a device (`RooflineCost`); the one that plans are made by is
`learned.target_step_time`. Knows neither tokens nor drafters. What is learnt fades, so that
estimates follow the machine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

from foretoken.shape.mixtures.experts import share_read

KEEPS = 0.9
"""Weight of the past in running means."""


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
    experts: float = 0.0
    """Experts of a layer that the rows read, on average; 0: not known before it, or it has none."""


class CostModel(ABC):
    """Seconds of a step by its shape."""

    @abstractmethod
    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes."""


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
        self._seconds[shape.sequences] = KEEPS * known + (1 - KEEPS) * seconds

    def seconds(self, shape: StepShape) -> float:
        """A plain step of `shape.sequences`; asserts that any was seen."""
        assert self._seconds, "no plain step was seen"
        smaller = [seen for seen in self._seconds if seen <= shape.sequences]
        if smaller:
            return self._seconds[max(smaller)]
        nearest = min(self._seconds)
        return self._seconds[nearest] * shape.sequences / nearest


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost(CostModel):
    """Reading and multiplying, and no less than the launches (Williams et al. 2009).

    A step reads every weight that some row needs and the keys and values of every sequence once,
    and multiplies each row with the weights that it passes through. Nothing here is measured.
    """

    weight_bytes: float
    """Read by every step."""
    expert_bytes: float = 0.0
    """Held by all routed experts of a mixture; read as far as some row needs them."""
    expert_share: float = 0.0
    """Share of the experts that one row passes through."""
    experts: float = 0.0
    """Of a layer, where it may be known what a step reads."""
    kv_bytes: Callable[[float], float]
    """Read for each token of a sequence with so many."""
    flops: Callable[[float], float]
    """Operations of one row that attends to so many tokens."""
    bandwidth: float
    """Bytes per second that reading reaches."""
    flops_per_s: float
    """Operations per second that multiplying reaches."""
    side_by_side: bool = True
    """Whether a device reads while it multiplies, so that the longer of both counts. Threads of a
    processor take the sum of both, as was measured."""
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

    def seconds(self, shape: StepShape) -> float:
        """The bound for this shape."""
        touched = share_read(self.expert_share, shape.rows)
        if shape.experts and self.experts:
            touched = shape.experts / self.experts
        repeats = 1.0 + self.reread_share * (min(shape.rows, self.reread_rows) - 1)
        moved = (self.weight_bytes + touched * self.expert_bytes) * repeats
        moved += shape.sequences * shape.context * self.kv_bytes(shape.context)
        multiplying = shape.rows * self.flops(shape.context) / self.flops_per_s
        reading = moved / self.bandwidth
        took = max(reading, multiplying) if self.side_by_side else reading + multiplying
        bound = max(took, self.floor_s)
        return bound + self.exchange_s + self.exchange_row_s * shape.rows


def speculative_step(verify_cost: float, draft_cost: float, k: float) -> float:
    """V + k c: plain steps that a step with k drafts takes, a verification taking V of them at the
    same batch and a draft step c."""
    return verify_cost + k * draft_cost
