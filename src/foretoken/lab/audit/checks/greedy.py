"""Greedy answers with and without speculation.

Verification at temperature 0 lets only the likeliest token through, so the texts are the same, or
part where the two likeliest tokens are nearly tied.
"""

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import NO_PLAIN, AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.parting import same


async def _look(sides: Sides, case: Case) -> Look:
    if sides.plain is None:
        return NO_PLAIN
    expected = await sides.plain.greedy(case)
    # Plain decoding is asked anew where it is held against itself: its own reply would always fit.
    given = await sides.arm.greedy(case, again=sides.control)
    return unanswered(expected, given) or same(expected, given, sides.tie)


GREEDY = AuditCheck(
    name="greedy",
    sentence="at temperature 0 the text is that of plain decoding",
    look=_look,
    reads_greedy=True,
)
