"""Log-probabilities of greedy answers with and without speculation.

They are the target's and no draft's: up to where the texts part they are those of plain decoding,
and none is above 0.
"""

import math

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import FINE, NO_PLAIN, AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.parting import common

_MOST = 0.3
"""Difference that no rounding makes for a token as likely as those of greedy answers."""


async def _look(sides: Sides, case: Case) -> Look:
    given = await sides.arm.greedy(case, again=sides.control)
    missing = unanswered(given)
    if missing is not None:
        return missing
    if given.tokens is None:
        return Look(sort="unasked", why="completions come without log-probabilities")
    if any(value > 1e-3 for value in given.logprobs):
        return Look(sort="wrong", why=f"a log-probability of {max(given.logprobs):.3f}")
    if sides.plain is None:
        return NO_PLAIN
    expected = await sides.plain.greedy(case)
    missing = unanswered(expected)
    if missing is not None or expected.tokens is None:
        return missing or Look(sort="unasked", why="the baseline tells no log-probabilities")
    for at in range(common(expected.tokens, given.tokens)):
        ours, theirs = expected.logprobs[at], given.logprobs[at]
        if not abs(ours - theirs) <= _MOST and not (math.isnan(ours) and math.isnan(theirs)):
            why = f"token {at + 1} has {theirs:.3f}, plain decoding says {ours:.3f}"
            return Look(sort="differs", why=why)
    return FINE


LOGPROBS = AuditCheck(
    name="logprobs",
    sentence="log-probabilities are those of plain decoding, not a draft's",
    look=_look,
    answers=0,
)
