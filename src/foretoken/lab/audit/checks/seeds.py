"""Seeded answers, asked for twice.

Whatever a server makes of a seed, it makes the same of it again. Where seeded answers are promised
to be those of plain decoding, they are compared with those too.
"""

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import FINE, AuditCheck, Look, Sides, unanswered

_TOKENS = 10
"""Few, since rounding turns one draw or another in long texts."""


async def _look(sides: Sides, case: Case) -> Look:
    body = {
        "prompt": case.prompt,
        "max_tokens": min(_TOKENS, case.max_tokens),
        "temperature": 0.8,
        "seed": 1000 + case.number,
    }
    first = await sides.arm.ask(body)
    second = await sides.arm.ask(body)
    missing = unanswered(first, second)
    if missing is not None:
        return missing
    if first.text != second.text:
        return Look(sort="differs", why=f"seed {body['seed']} gave two texts")
    if not sides.same_seeds or sides.plain is None:
        return FINE
    expected = await sides.plain.ask(body)
    missing = unanswered(expected)
    if missing is not None or expected.text == first.text:
        return missing or FINE
    return Look(sort="differs", why=f"seed {body['seed']} gives another text without speculation")


SEEDS = AuditCheck(
    name="seeds",
    sentence="the same seed gives the same text again",
    look=_look,
    answers=2,
    each=0.25,
)
