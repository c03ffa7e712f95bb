"""How far a run is, and what follows from it: learning rate and sequence length.

Owns the warm-up, stable, decay schedule (WSD; Hu et al. 2024, MiniCPM), the cosine (Loshchilov and
Hutter 2017) and a rise and fall for each stage. It knows neither optimizer nor data.
Invariant: the rate is a function of (step, progress) alone, so a resumed run repeats it.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
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
    """What is trained on until `until` (a share of the budget): rows of `length` tokens."""

    until: float
    """The share of the budget at which it ends; 1 for the last."""
    length: int
    """Tokens of a row."""
    rows: str | None = None
    """Heads: `text`, or the target's own `answers`. None: answers; packaged targets: a mix."""
    loss: str = "distributions"
    """Heads: `distributions`, their distance from the target's, or `tokens`, the cross entropy of
    the row's own tokens."""
    rate: float = 1.0
    """The stage's peak as a factor on the peak rates; for schedule `stages` only."""


def current_stage(stages: tuple[Stage, ...], progress: float) -> Stage:
    """The stage in force at `progress`."""
    for stage in stages:
        if progress < stage.until:
            return stage
    return stages[-1]


LONGEST_WARMUP, FLOOR = 0.05, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Each stage rises along a parabola to its `rate`, and falls along a cosine to a tenth of it.

    The rise takes `warmup_steps`, but at most a twentieth of the stage (the MLP speculator's two
    stages in IBM's fms-fsdp).
    """

    stages: tuple[Stage, ...]
    warmup_steps: int
    max_steps: int

    def scale(self, step: int, progress: float) -> float:
        """The factor on the peak learning rate, 0..1."""
        stage = current_stage(self.stages, progress)
        begin = max((s.until for s in self.stages if s.until < stage.until), default=0.0)
        steps = max(1.0, self.max_steps * (stage.until - begin))
        share = min(1.0, (progress - begin) / (stage.until - begin))
        warmup = max(1.0, min(self.warmup_steps, LONGEST_WARMUP * steps))
        left = max(0.0, 1.0 - (share * steps + 1.0) / warmup)
        fall = FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * share))
        return stage.rate * min(1.0 - left * left, fall)
