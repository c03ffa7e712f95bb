"""The counts of every reply that other checks got.

Drafts are not output: completion_tokens are the tokens that came, never more than max_tokens.
"""

from foretoken.lab.audit.check import FINE, AuditCheck, Look
from foretoken.lab.audit.replies import Reply


def _read(reply: Reply) -> Look:
    if reply.usage is None:
        return Look(sort="unasked", why="answers have no usage")
    counted = reply.usage.get("completion_tokens")
    asked = reply.body.get("max_tokens")
    if counted is None:
        return Look(sort="unasked", why="usage has no completion_tokens")
    if asked is not None and counted > asked:
        return Look(sort="wrong", why=f"{counted} completion_tokens with max_tokens {asked}")
    came = reply.num_tokens
    if came is None:
        return FINE
    # The token that ended the answer may be left out of either.
    allowed = 1 if reply.finish_reason == "stop" else 0
    if abs(counted - came) <= allowed:
        return FINE
    return Look(sort="wrong", why=f"{counted} completion_tokens, and {came} tokens came")


USAGE = AuditCheck(
    name="usage",
    sentence="usage counts the tokens that came, no draft, and no more than max_tokens",
    read=_read,
    answers=0,
)
