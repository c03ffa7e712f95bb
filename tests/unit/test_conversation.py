"""Every shape of OpenAI's messages that holds text reaches a template right, or is named."""

from typing import Any

import pytest

from foretoken.errors import PromptError
from foretoken.text.chat_template import ChatTemplate
from foretoken.text.conversation import conversation_of

CALL: dict[str, Any] = {"name": "f", "arguments": '{"a": 1}'}
TOOL_CALL: dict[str, Any] = {"id": "1", "type": "function", "function": CALL}


def part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, kind: text}


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant", "tool", "ipython"])
def test_content_is_always_there(role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}, {"role": role, "content": ""}):
        assert conversation_of([message]) == [{"role": role, "content": ""}]
    named = {"role": role, "content": "x", "name": "n", "tool_call_id": "7", "refusal": None}
    assert conversation_of([named]) == [{k: v for k, v in named.items() if v is not None}]
    parts = [part("a"), part("b") | {"cache_control": {}}]
    [made] = conversation_of([{"role": role, "content": parts}])
    assert made == {"role": role, "content": [part("a"), part("b")]}


def test_calls_whose_content_is_null() -> None:
    calls = [TOOL_CALL, {"function": {"name": "g", "arguments": None}}, {"function": {"name": "h"}}]
    [made] = conversation_of([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert made["content"] == ""
    functions = [call["function"] for call in made["tool_calls"]]
    assert functions == [CALL, {"name": "g", "arguments": {}}, {"name": "h", "arguments": {}}]
    nothing: tuple[Any, ...] = (None, [])
    for none in nothing:
        [made] = conversation_of([{"role": "assistant", "content": "x", "tool_calls": none}])
        assert made == {"role": "assistant", "content": "x"}


def test_what_was_refused_is_text() -> None:
    said = {"role": "assistant", "content": None, "refusal": "no"}
    in_parts = {"role": "assistant", "content": [part("no", "refusal")]}
    assert [one["content"] for one in conversation_of([said, in_parts])] == ["no", [part("no")]]


def test_the_older_form_of_calls() -> None:
    asked = {"role": "assistant", "content": None, "function_call": CALL}
    found = {"role": "function", "name": "f", "content": "12"}
    first, second = conversation_of([asked, found])
    [call] = first["tool_calls"]
    assert call["function"] == CALL and "function_call" not in first
    assert second == {"role": "tool", "name": "f", "content": "12", "tool_call_id": call["id"]}
    both = {**asked, "tool_calls": [TOOL_CALL]}
    assert conversation_of([both])[0]["tool_calls"] == [TOOL_CALL]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": None}, "role"),
        ({"role": 5}, "role"),
        ({"content": 5}, "content"),
        ({"content": {"type": "text"}}, "content"),
        ({"content": ["x"]}, "content.0"),
        ({"content": [part("a"), {"type": "image_url"}]}, "content.1.type"),
        ({"content": [{"text": "x"}]}, "content.0.type"),
        ({"content": [{"type": []}]}, "content.0.type"),
        ({"content": [{"type": "text", "text": None}]}, "content.0.text"),
        ({"content": [{"type": "refusal", "refusal": 1}]}, "content.0.refusal"),
        ({"refusal": 3}, "content"),
        ({"tool_calls": "x"}, "tool_calls"),
        ({"tool_calls": ["x"]}, "tool_calls.0.function"),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, "tool_calls.0.function"),
        ({"tool_calls": [{"function": {}}]}, "tool_calls.0.function.name"),
        ({"tool_calls": [{"function": {**CALL, "arguments": 5}}]},
         "tool_calls.0.function.arguments"),
        ({"function_call": "auto"}, "tool_calls.0.function"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PromptError) as raised:
        conversation_of([{"role": "user"}, {"role": "assistant", **fields}])
    assert raised.value.field == f"messages.1.{named}"


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate({"default": source}, {}).render(
        conversation_of(messages), add_generation_prompt=False, tools=None, variables={}
    )


def test_what_templates_are_given_of_it() -> None:
    """In one text, so that one process does: parts, roles and arguments."""
    texts = [part("a"), part("b")]
    arguments: list[Any] = ['{"a": 1}', {"b": None}, "", " ", None, '{"cut', "[1]", "[" * 100_000]
    calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
    text = rendered(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% for call in messages[-1].tool_calls %}"
        "{{ call.function.arguments | tojson | truncate(12) }};{% endfor %}",
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": texts},
        {"role": "assistant", "content": None, "tool_calls": calls},
    )
    assert text == (
        'system:be kind;user:a\nb;assistant:;{"a": 1};{"b": null};{};{};{};"{\\"cut";"[1]";'
        '"[[[[[[[[...;'
    )


def test_a_template_that_knows_developers_and_parts() -> None:
    text = rendered(
        "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.role }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}",
        {"role": "developer", "content": [part("a"), part("b")]},
        {"role": "tool", "content": [part("a"), part("b")]},
    )
    assert text == "Ddeveloper<a><b>toola\nb"
