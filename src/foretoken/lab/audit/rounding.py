"""How near two tokens may be for rounding to turn their order, from a server's own numbers. Pure.

Two starts of a batch add up in another order, and their results are rounded. A number of p
significant bits lies on a grid: from 2^e to 2^(e + 1) its step is 2^(e - p + 1), and rounding moves
it by half a step at most (Higham 2002, section 2.1). bfloat16 has 8 significant bits, so that a
logit of 16 to 32, which is usual, stands on eighths. An order turns where the difference of two
logits changes its sign; it is made of two roundings, and so is that of the other start: together
they move it by four half steps. Log-probabilities of one place are logits less one number for all:
their differences tell the step, and with it precision and size of the logits.

Where there is no grid, numbers were rounded earlier: what they differ by when the same is asked
again, alone and in a batch, is then the measure.
"""

from collections.abc import Sequence

LEAST, MOST = 0.02, 0.5
"""Of a width: sums of 32 bit over many layers differ by so much; the step of 8 significant bits for
a logit of 32, twice."""
_HALF_STEPS = 4
"""Two logits, in two starts."""
_STEPS = tuple(2.0**-power for power in range(1, 9))
_OFF_GRID = 1e-4
"""Log-probabilities come as numbers of 32 bit, or with six digits."""
_FEWEST_GAPS = 3
"""Differences of one place that must lie on a grid: by chance they seldom do."""
_TIMES_MEASURED = 4.0
"""Of normal noise, beyond four times the middle of the differences lies one in a hundred and
fifty."""


def step_of(places: Sequence[Sequence[float]]) -> float:
    """The step that logits stand on at half of the places or more; 0: they stand on none.

    Args:
        places: log-probabilities of the likeliest tokens, place by place.
    """
    told = [gaps for place in places if len(gaps := _gaps(place)) >= _FEWEST_GAPS]
    if not told:
        return 0.0
    for step in _STEPS:
        on_grid = sum(all(_is_multiple(gap, step) for gap in gaps) for gaps in told)
        if 2 * on_grid >= len(told):
            return step
    return 0.0


def _below(place: Sequence[float]) -> list[float]:
    """How far each token but the likeliest is below it, the next likeliest first."""
    ordered = sorted(place, reverse=True)
    return [ordered[0] - value for value in ordered[1:]]


def _gaps(place: Sequence[float]) -> list[float]:
    """Differences to the likeliest that are not zero."""
    return [gap for gap in _below(place) if gap > _OFF_GRID]


def _is_multiple(gap: float, step: float) -> bool:
    return abs(gap - step * round(gap / step)) < _OFF_GRID


def near_tie(places: Sequence[Sequence[float]], again: Sequence[Sequence[float]] = ()) -> float:
    """Differences of log-probabilities that rounding may turn, from LEAST to MOST.

    Args:
        places: log-probabilities of the likeliest tokens, place by place.
        again: the same places, asked another time.
    """
    pairs = ((_below(a), _below(b)) for a, b in zip(places, again, strict=False))
    apart = sorted(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=False))
    measured = apart[len(apart) // 2] if apart else 0.0
    by_step = _HALF_STEPS * step_of(places) / 2.0
    return min(MOST, max(LEAST, by_step, _TIMES_MEASURED * measured))
