"""A function call that must be made, whole and streamed.

The arguments are JSON of the function's parameters, and a stream brings the same call.
"""

import json
from typing import Any

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import FINE, AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.checks.grammars import misfit
from foretoken.lab.audit.replies import Reply

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit", "kelvin"]},
        "city": {"type": "string", "enum": ["Berlin", "Lagos", "Lima", "Osaka", "Pune"]},
        "forecast": {"type": "boolean"},
    },
    "required": ["unit", "city", "forecast"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}


async def _look(sides: Sides, case: Case) -> Look:
    name = str(_FUNCTION["name"])
    body = {
        "messages": [{"role": "user", "content": f"How warm is it? {case.prompt}"}],
        "max_tokens": 120,
        "temperature": 0.0,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": name}},
    }
    replies = []
    for stream in (False, True):
        reply = await sides.arm.ask(body, chat=True, stream=stream)
        found = unanswered(reply) or judge(reply, name)
        if found is not None:
            return found
        replies.append(reply)
    whole, streamed = replies
    if whole.calls != streamed.calls:
        return Look(sort="differs", why="another call in the stream than in the whole answer")
    return FINE


def judge(reply: Reply, name: str) -> Look | None:
    """What is wrong with the call; None: nothing."""
    if len(reply.calls) != 1 or reply.calls[0].name != name:
        names = ", ".join(call.name for call in reply.calls) or "no function"
        return Look(sort="wrong", why=f"{names} called instead of {name}")
    text = reply.calls[0].arguments
    try:
        wrong = misfit(json.loads(text), PARAMETERS, "the arguments")
    except ValueError:
        if reply.finish_reason == "length":
            return Look(sort="fine", why="cut short")
        wrong = f"no JSON: {text[-40:]!r} at the end"
    return None if wrong is None else Look(sort="wrong", why=f"arguments: {wrong}")


TOOLS = AuditCheck(
    name="tools",
    sentence="a function call has whole arguments, streamed or not",
    look=_look,
    answers=2,
    each=0.6,
)
