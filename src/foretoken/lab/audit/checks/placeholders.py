"""Tokens in every reply that stand for a draft which was never filled in.

Engines give drafts that are not there yet a number that no token has, or a token of their own.
"""

import re

from foretoken.lab.audit.check import FINE, AuditCheck, Look
from foretoken.lab.audit.replies import Reply

_MARKS = re.compile(r"<\|?(?:placeholder|draft|mask|pad|unk)[\w ]*\|?>", re.IGNORECASE)


def _read(reply: Reply) -> Look:
    odd = [number for number in reply.token_ids or () if number < 0]
    if odd:
        return Look(sort="wrong", why=f"token id {odd[0]} in an answer")
    found = _MARKS.search(reply.text)
    if found is not None and found[0] not in str(reply.body.get("prompt")):
        return Look(sort="wrong", why=f"{found[0]} in the text")
    return FINE


PLACEHOLDERS = AuditCheck(
    name="placeholders",
    sentence="no answer has a placeholder where a draft was to be",
    read=_read,
    answers=0,
)
