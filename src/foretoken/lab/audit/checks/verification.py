"""Drafts that were accepted unverified: drawn tokens that plain decoding finds too likely or too
unlikely.

One draw cannot be compared with another, but its log-probability under plain decoding can: token by
token it is, on average, what plain decoding expects of its own draws. The server without
speculation scores the answers of both servers, and the scores are compared.
"""

import math
from collections.abc import Mapping, Sequence

from foretoken.lab.audit.asking import Asker, Case
from foretoken.lab.audit.check import NO_PLAIN, AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.replies import Reply

_TOKENS = 12
"""Tokens of an answer that are scored; each is a request of one token."""
_TOPS = 20
_BEYOND = 1.0
"""How much less likely than the last of the likeliest a token counts that is none of them."""


async def _look(sides: Sides, case: Case) -> Look:
    if sides.plain is None:
        return NO_PLAIN
    body = {
        "prompt": case.prompt,
        "max_tokens": min(_TOKENS, case.max_tokens),
        "temperature": 1.0,
        "logprobs": 1,
    }
    drawn = await sides.arm.ask(body)
    missing = unanswered(drawn)
    if missing is not None:
        return missing
    if drawn.tokens is None:
        return Look(sort="unasked", why="completions come without log-probabilities")
    told = []
    # The first token is the prompt's, which no draft stands for.
    for number in range(1, len(drawn.tokens)):
        reply = await _ask_next(sides.plain, case, drawn, number)
        missing = unanswered(reply)
        if missing is not None:
            return missing
        if not reply.tops:
            return Look(sort="unasked", why="the likeliest tokens are not told")
        told.append((surprise(drawn.tokens[number], reply.tops[0]), drawn.tokens[number]))
    return Look(sort="fine", score=sum(value for value, _ in told), why=_least_likely(told))


async def _ask_next(plain: Asker, case: Case, drawn: Reply, number: int) -> Reply:
    """What plain decoding expects as token `number` of the answer."""
    assert drawn.tokens is not None, "just seen"
    body = {"max_tokens": 1, "temperature": 1.0, "logprobs": _TOPS}
    if drawn.prompt_ids is not None and drawn.token_ids is not None:
        return await plain.ask({**body, "prompt": [*drawn.prompt_ids, *drawn.token_ids[:number]]})
    return await plain.ask({**body, "prompt": case.prompt + "".join(drawn.tokens[:number])})


def _least_likely(told: Sequence[tuple[float, str]]) -> str:
    if not told:
        return ""
    value, token = min(told)
    return f"{token!r} has a log-probability {-value:.1f} below that of a usual draw"


def surprise(token: str, top: Mapping[str, float]) -> float:
    """Log-probability of a token less what is expected of a draw from the likeliest ones."""
    chances = {name: math.exp(value) for name, value in top.items()}
    expected = sum(chances[name] * top[name] for name in top) / sum(chances.values())
    return top.get(token, min(top.values()) - _BEYOND) - expected


VERIFICATION = AuditCheck(
    name="verification",
    sentence="drawn tokens are as likely as plain decoding's own, so every draft was verified",
    look=_look,
    answers=_TOKENS,
    each=0.1,
)
