"""What follows from how far a run is: learning rate and sequence length.

Owns the warm-up, stable, decay schedule (WSD; Hu et al. 2024, MiniCPM), the cosine (Loshchilov and
Hutter 2017) and a rise and fall for each stage. It knows neither optimizer nor data.
Invariant: the rate is a function of (step, progress) alone, so a resumed run repeats it.
"""

import math
from dataclasses import dataclass


def wsd(step: int, progress: float, warmup_steps: int, decay_share: float) -> float:
    """The factor on the peak learning rate: linear warm-up over `warmup_steps`, a flat stretch,
    linear decay over the last share."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    left = (1.0 - progress) / decay_share if decay_share > 0 else 1.0
    return max(0.0, min(warm, left, 1.0))


def cosine(step: int, progress: float, warmup_steps: int) -> float:
    """The factor on the peak learning rate: linear warm-up, then half a cosine to zero."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
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


def staged(stages: tuple[Stage, ...], progress: float, warmup_steps: int, max_steps: int) -> float:
    """The factor on the peak learning rate: each stage rises along a parabola to its `rate`, and
    falls along a cosine to a tenth of it.

    The rise takes `warmup_steps`, but at most a twentieth of the stage (the MLP speculator's two
    stages in IBM's fms-fsdp).
    """
    stage = current_stage(stages, progress)
    begin = max((s.until for s in stages if s.until < stage.until), default=0.0)
    steps = max(1.0, max_steps * (stage.until - begin))
    share = min(1.0, (progress - begin) / (stage.until - begin))
    warmup = max(1.0, min(warmup_steps, LONGEST_WARMUP * steps))
    left = max(0.0, 1.0 - (share * steps + 1.0) / warmup)
    fall = FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * share))
    return stage.rate * min(1.0 - left * left, fall)
