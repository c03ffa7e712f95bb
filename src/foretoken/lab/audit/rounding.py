"""How near two tokens may be for rounding to turn their order, and whether two answers part there.

Two starts of a batch add up in another order, and their results are rounded. A number of p
significant bits lies on a grid: from 2^e to 2^(e + 1) its step is 2^(e - p + 1), and rounding moves
it by half a step at most (Higham 2002, section 2.1). bfloat16 has 8 significant bits, so that a
logit of 16 to 32, which is usual, stands on eighths. An order turns where the difference of two
logits changes its sign; it is made of two roundings, and so is that of the other start: together
they move it by four half steps. Log-probabilities of one place are logits less one number for all:
their differences tell the step, and with it precision and size of the logits.

Where there is no grid, numbers were rounded earlier: what they differ by when the same is asked
again, alone and in a batch, is then the measure. Answers are compared by tokens where both servers
tell them, else by texts.
"""

import asyncio
import math
from collections.abc import Sequence

from foretoken.lab.audit.asking import Asker, Case, Reply
from foretoken.lab.audit.judging import FINE, Look

LEAST, MOST = 0.02, 0.5
"""Of a width: sums of 32 bit over many layers differ by so much; the step of 8 significant bits for
a logit of 32, twice."""
MOST_MEASURED = 0.25
"""Of a width, as far as it rests on answers: a few wrong ones may be among them."""
_TIMES_MEASURED = 4.0
"""Of normal noise, beyond four times the middle of the differences lies one in a hundred and
fifty."""
_HALF_STEPS = 4
"""Two logits, in two starts."""
_STEPS = tuple(2.0**-power for power in range(1, 9))
_OFF_GRID = 1e-4
"""Log-probabilities come as numbers of 32 bit, or with six digits."""
_FEWEST_GAPS = 3
"""Differences of one place that must lie on a grid: by chance they seldom do."""


def step_of(places: Sequence[Sequence[float]]) -> float:
    """The step that logits stand on at half of the places or more; 0: they stand on none.

    Args:
        places: log-probabilities of the likeliest tokens, place by place.
    """
    # Differences to the likeliest that are not zero.
    gaps_of = ([max(place) - value for value in place if max(place) - value > _OFF_GRID]
               for place in places)  # fmt: skip
    told = [gaps for gaps in gaps_of if len(gaps) >= _FEWEST_GAPS]
    for step in _STEPS if told else ():
        off_grid = [max(abs(gap - step * round(gap / step)) for gap in gaps) for gaps in told]
        if 2 * sum(off < _OFF_GRID for off in off_grid) >= len(told):
            return step
    return 0.0


def near_tie(places: Sequence[Sequence[float]], apart: Sequence[float] = ()) -> float:
    """Differences of log-probabilities that rounding may turn, from LEAST to MOST.

    Args:
        places: log-probabilities of the likeliest tokens, place by place.
        apart: by prompt, the most that a log-probability differed by when it was asked again. Their
            middle counts, so that a few wrong answers do not excuse what is to be found.
    """
    measured = _TIMES_MEASURED * sorted(apart)[len(apart) // 2] if apart else 0.0
    by_step = min(MOST, _HALF_STEPS * step_of(places) / 2.0)
    return max(LEAST, by_step, min(MOST_MEASURED, measured))


async def measure_near_tie(arm: Asker, plain: Asker | None, cases: Sequence[Case]) -> float:
    """`near_tie` of two servers, by their greedy answers to `cases`."""
    other = plain if plain is not None else arm
    once = await asyncio.gather(*(other.greedy(case) for case in cases))
    again = [await asyncio.gather(*(other.greedy(case, again=True) for case in cases))]
    again.append(await asyncio.gather(*(arm.greedy(case) for case in cases)))
    places = [list(tops.values()) for reply in once for tops in reply.tops]
    return max(near_tie(places, _apart(once, more)) for more in again)


def _apart(once: Sequence[Reply], again: Sequence[Reply]) -> list[float]:
    """By prompt, the most that the log-probability of a token differs, while tokens are the
    same."""
    found = []
    for one, two in zip(once, again, strict=True):
        if one.tokens is None or two.tokens is None:
            continue
        length = common(one.tokens, two.tokens)
        # A row without likeliest tokens may stand for a token that nobody scored.
        scored = [at for at in range(length) if bool(one.tops[at]) == bool(two.tops[at])]
        found.append(max((abs(one.logprobs[i] - two.logprobs[i]) for i in scored), default=0.0))
    return found


Divergence = tuple[float | None, str]
"""Of the first place where two answers differ: how much less likely the second one's token is, by
the first one's log-probabilities, if they tell; and in words."""


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many entries are the same at the beginning."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def divergence(first: Reply, second: Reply) -> Divergence | None:
    """Where `second` leaves `first`; None if the texts are equal."""
    if first.text == second.text:
        return None
    if first.tokens is None or not first.tells_all:
        return None, f"differs after {common(first.text, second.text)} characters"
    if second.tokens is None or not second.tells_all:
        return _divergence_of_text(first, first.tokens, second.text)
    at = common(first.tokens, second.tokens)
    where = f"differs at token {at + 1}"
    if at >= len(first.tokens) or at >= len(second.tokens):
        return None, f"{where}, where one ends"
    mine, other = first.tokens[at], second.tokens[at]
    tops = first.tops[at] if at < len(first.tops) else {}
    where = f"{where}: {other!r} instead of {mine!r}"
    if mine not in tops:
        return None, where
    if other not in tops:
        rest = f"{where}, not among the likeliest {len(tops)}"
        return tops[mine] - min(tops.values()), rest
    gap = tops[mine] - tops[other]
    return gap, f"{where}, {gap:.3f} less likely"


def _divergence_of_text(first: Reply, tokens: Sequence[str], other: str) -> Divergence:
    """Where a text whose tokens are not told leaves `first`, by the likeliest of its tokens."""
    at, begin, parts, least = 0, 0, common(first.text, other), math.inf
    while begin + len(tokens[at]) <= parts and at + 1 < len(tokens):
        least = min(least, _least_gap(first, tokens, at, other[begin:]))
        begin += len(tokens[at])
        at += 1
    mine, tops = tokens[at], first.tops[at] if at < len(first.tops) else {}
    where = f"differs at token {at + 1}, after {parts} characters"
    if mine not in tops or begin + len(mine) <= parts or len(other) <= begin:
        return None, where
    fitting = [name for name in tops if name and name != mine and other.startswith(name, begin)]
    if not fitting:
        # A token that spans more may have been drawn before, where none that fits is told either.
        gap = min(least, _least_gap(first, tokens, at, other[begin:]))
        told = f"{where}: none of the likeliest {len(tops)} tokens, of which {mine!r} is first"
        return (gap, told) if gap > MOST else (None, where)
    found = max(fitting, key=len)
    gap = tops[mine] - tops[found]
    return gap, f"{where}: {found!r} instead of {mine!r}, {gap:.3f} less likely"


def _least_gap(first: Reply, tokens: Sequence[str], at: int, text: str) -> float:
    """How much less likely another token that `text` begins with is at least, by what is told."""
    mine, tops = tokens[at], first.tops[at] if at < len(first.tops) else {}
    if mine not in tops:
        return 0.0
    told = [value for name, value in tops.items()
            if name != mine and (text.startswith(name) or _is_part(name))]  # fmt: skip
    return tops[mine] - max(told, default=min(tops.values()))


def _is_part(name: str) -> bool:
    """Whether a token is told as a part of a character, so that no text shows it."""
    return "\ufffd" in name or name.startswith("bytes:")


def same(first: Reply, second: Reply, tie: float) -> Look:
    """Fine if the answers are equal or part at a near-tie."""
    found = divergence(first, second)
    if found is None:
        return FINE
    gap, why = found
    return NEAR_TIE if gap is not None and gap <= tie else Look("differs", why)


def same_or_near(first: Reply, second: Reply, plain: Reply | None, tie: float) -> Look:
    """As `same`; where `first` does not tell how likely its tokens were, both may instead be what
    plain decoding writes, but for near-ties."""
    found, where = same(first, second, tie), divergence(first, second)
    told = where is None or where[0] is not None
    if found.sort == "fine" or told or plain is None or not plain.ok:
        return found
    both = (same(plain, one, tie) for one in (first, second))
    return NEAR_TIE if all(look.sort == "fine" for look in both) else found


NEAR_TIE = Look("fine", "near-tie")
