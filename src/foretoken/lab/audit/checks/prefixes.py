"""Prompts that go on where an earlier request ended.

Drafts that were refused must not cost the pages that were computed: with speculation as much of the
prompt is found in the cache as without.
"""

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import AuditCheck, Look, Sides, unanswered

_CHARACTERS = 1600
"""Of the shared beginning: many blocks of any server."""

_UNTOLD = (
    "usage has no prompt_tokens_details.cached_tokens; vLLM tells it with "
    "--enable-prompt-tokens-details"
)


async def _look(sides: Sides, case: Case) -> Look:
    # Of its own for each case and side: no other request may have it in the cache already. Both
    # numbers have as many digits, so that both sides ask for as much.
    head = f"# {2 * case.number + sides.control}\n"
    prompt = head + (case.prompt + "\n") * (1 + _CHARACTERS // (1 + len(case.prompt)))
    prompt = prompt[:_CHARACTERS]
    body = {"max_tokens": 16, "temperature": 0.0}
    first = await sides.arm.ask({**body, "prompt": prompt})
    missing = unanswered(first)
    if missing is not None:
        return missing
    second = await sides.arm.ask({**body, "prompt": prompt + first.text + "\n#"})
    missing = unanswered(second)
    if missing is not None:
        return missing
    asked = (second.usage or {}).get("prompt_tokens")
    if second.cached_tokens is None or not asked:
        return Look(sort="unasked", why=_UNTOLD)
    share = second.cached_tokens / asked
    found = f"{second.cached_tokens} of {asked} tokens of a prompt came from the cache"
    return Look(sort="fine" if share >= 0.5 else "differs", why=found, score=share)


PREFIXES = AuditCheck(
    name="prefixes",
    sentence="prompts that go on from an earlier one find it in the cache",
    look=_look,
    answers=2,
    each=1.1,
)
