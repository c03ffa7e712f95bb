"""Messages as OpenAI's API has them, made into messages as chat templates read them.

Every shape of the API that holds text is taken, null where it is allowed and older forms included;
what holds something else is an error that names the field. Knows no template: what depends on it is
in `sandbox.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.errors import PromptError

_TEXT_OF = {"text": "text", "refusal": "refusal"}
"""Kinds of parts, and where each has its text."""


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a role and content each: a text, or parts of type `text`.

    Args:
        messages: plain JSON values.

    Raises:
        PromptError: a field is not what it should be, or is no text.
    """
    made: list[dict[str, Any]] = []
    called = ""
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        fields = {name: value for name, value in message.items() if value is not None}
        role = fields.get("role")
        if not isinstance(role, str):
            raise PromptError(f"{place}.role", role, "a text such as 'user'")
        fields["content"] = _content(f"{place}.content", fields)
        older = fields.pop("function_call", None)
        if older is not None and "tool_calls" not in fields:
            called = f"call{number:05}"  # nine letters and digits: some templates insist
            fields["tool_calls"] = [{"id": called, "type": "function", "function": older}]
        if role == "function":
            fields |= {"role": "tool", "tool_call_id": called}
        calls = fields.pop("tool_calls", None)
        if calls:  # templates take an empty list for a call
            fields["tool_calls"] = _calls(f"{place}.tool_calls", calls)
        made.append(fields)
    return made


def _content(place: str, fields: Mapping[str, Any]) -> Any:
    content = fields.get("content", fields.get("refusal", ""))
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise PromptError(place, content, "a text, a list of parts, or null")
    return [_part(f"{place}.{number}", part) for number, part in enumerate(content)]


def _part(place: str, part: object) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise PromptError(place, part, "an object with a type")
    kind = part.get("type")
    named = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    if named is None:
        raise PromptError(f"{place}.type", str(kind)[:50], "text, refusal")
    text = part.get(named)
    if not isinstance(text, str):
        raise PromptError(f"{place}.{named}", text, "a text")
    return {"type": "text", "text": text}


def _calls(place: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise PromptError(place, calls, "a list of calls, or null")
    return [_call(f"{place}.{number}", call) for number, call in enumerate(calls)]


def _call(place: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise PromptError(f"{place}.function", function, "an object with name and arguments")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise PromptError(f"{place}.function.name", name, "a text")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        allowed = "an object, or the JSON of one"
        raise PromptError(f"{place}.function.arguments", arguments, allowed)
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
