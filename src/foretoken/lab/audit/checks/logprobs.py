"""Log-probabilities of greedy answers with and without speculation.

They are the target's and no draft's: up to where the texts part they are those of plain decoding,
none is above 0, and no token comes without, whole or streamed. Tokens that a server verified as
drafts and did not score are told by the likeliest tokens, of which such a row has none.
"""

import math

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import FINE, NO_PLAIN, AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.parting import common
from foretoken.lab.audit.replies import Reply

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
    streamed = await sides.arm.greedy(case, stream=True)
    untold = unscored(given, streamed)
    if untold is not None:
        return untold
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


def unscored(whole: Reply, streamed: Reply) -> Look | None:
    """What is said of tokens without log-probabilities; None: all have theirs.

    Where no row has likeliest tokens, the server does not tell them to anybody.
    """
    rows = len(whole.tokens or ())
    empty = [at for at, top in enumerate(whole.tops) if not top]
    if empty and len(empty) < rows:
        why = (
            f"{len(empty)} of {rows} tokens come without the likeliest tokens: "
            f"{whole.logprobs[empty[0]]:.3f} stands at token {empty[0] + 1}"
        )
        return Look(sort="wrong", why=why)
    if not streamed.ok or not whole.tells_all or whole.text != streamed.text:
        return None
    came = len(streamed.tokens or ())
    if came < rows and streamed.tokens is not None and not streamed.tells_all:
        why = f"a stream has log-probabilities for {came} of {rows} tokens"
        return Look(sort="wrong", why=why)
    return None


LOGPROBS = AuditCheck(
    name="logprobs",
    sentence="log-probabilities are those of plain decoding, not a draft's",
    look=_look,
    answers=0,
    reads_greedy=True,
)
