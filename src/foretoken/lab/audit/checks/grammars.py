"""Answers whose form is given by a JSON schema.

Every draft is held to the grammar as every other token is, so what comes is JSON of the schema. The
schema has no free text: an answer cannot become long.
"""

import json
from collections.abc import Mapping
from typing import Any

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import FINE, AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.replies import Reply

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "language": {"type": "string", "enum": ["Python", "C", "Rust", "none of these"]},
        "tested": {"type": "boolean"},
        "priority": {"type": "string", "enum": ["low", "middle", "high"]},
        "colour": {"type": "string", "enum": ["red", "green", "blue", "violet"]},
        "done": {"type": "boolean"},
    },
    "required": ["language", "tested", "priority", "colour", "done"],
    "additionalProperties": False,
}
_TOKENS = 160


async def _look(sides: Sides, case: Case) -> Look:
    form = {"name": "facts", "schema": SCHEMA, "strict": True}
    body = {
        "max_tokens": _TOKENS,
        "temperature": 0.8,
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    asked = f"Answer in JSON: what is this?\n{case.prompt}"
    reply = await sides.arm.ask({**body, "messages": [_user(asked)]}, chat=True)
    if reply.refused is not None:  # no chat template, perhaps
        reply = await sides.arm.ask({**body, "prompt": case.prompt})
    return unanswered(reply) or judge(reply)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def judge(reply: Reply) -> Look:
    """Whether the text is JSON of SCHEMA; one that was cut short by its length cannot be told."""
    text = reply.text.strip()
    try:
        found = json.loads(text)
    except ValueError:
        if reply.finish_reason == "length":
            return Look(sort="fine", why="cut short")
        return Look(sort="wrong", why=f"no JSON: {text[:60]!r}")
    wrong = misfit(found, SCHEMA)
    return FINE if wrong is None else Look(sort="wrong", why=f"not of the schema: {wrong}")


_KINDS: dict[str, type[Any]] = {"object": dict, "boolean": bool, "string": str, "integer": int}


def misfit(value: Any, schema: Mapping[str, Any], where: str = "answer") -> str | None:
    """What about a value is not of a schema of objects, enums and simple types; None: nothing."""
    kind = schema["type"]
    if not isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
        return f"{where} is no {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} is {str(value)[:30]!r}"
    if not isinstance(value, dict):
        return None
    properties = schema["properties"]
    odd = set(value) ^ set(properties)
    if odd:
        return f"{where} has or lacks {', '.join(sorted(odd))[:60]}"
    parts = (misfit(value[name], part, name) for name, part in properties.items())
    return next((found for found in parts if found is not None), None)


GRAMMARS = AuditCheck(
    name="grammars",
    sentence="an answer with a JSON schema is JSON of that schema",
    look=_look,
)
