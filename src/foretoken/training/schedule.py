"""How far a run is, and what follows from it: learning rate and sequence length.

Owns the warm-up, stable, decay schedule (WSD; Hu et al. 2024, MiniCPM) and the cosine (Loshchilov
and Hutter 2017). It knows no optimizer.
Invariant: the rate is a function of (step, progress) alone, so a resumed run repeats it.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a run ends: after `max_steps`, or `max_minutes` of work, whichever comes first."""

    max_steps: int
    max_minutes: float | None = None

    def progress(self, step: int, seconds: float) -> float:
        """The share of the budget used up, 0..1, after `step` steps and `seconds` of work."""
        used = step / self.max_steps
        if self.max_minutes is not None:
            used = max(used, seconds / (60 * self.max_minutes))
        return min(used, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wsd:
    """Linear warm-up over `warmup_steps`, a flat stretch, linear decay over the last share."""

    warmup_steps: int
    decay_share: float

    def scale(self, step: int, progress: float) -> float:
        """The factor on the peak learning rate, 0..1."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (1.0 - progress) / self.decay_share if self.decay_share > 0 else 1.0
        return max(0.0, min(warm, left, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """Linear warm-up over `warmup_steps`, then half a cosine from the peak to zero."""

    warmup_steps: int

    def scale(self, step: int, progress: float) -> float:
        """The factor on the peak learning rate, 0..1."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return min(warm, 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Rows of `length` tokens are used until `until` (a share of the budget)."""

    until: float
    length: int


def current_stage(stages: tuple[Stage, ...], progress: float) -> Stage:
    """The stage in force at `progress`."""
    for stage in stages:
        if progress < stage.until:
            return stage
    return stages[-1]
