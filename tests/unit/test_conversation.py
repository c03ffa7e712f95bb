"""Messages and calls: every shape reaches a template right, and calls are found in text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.errors import PromptError
from foretoken.server.tools.messages import ChoiceMessage
from foretoken.server.tools.parsers import PARSERS, ArgumentsParser
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


HERMES = {
    "one": ('<tool_call>\n{"name": "f", "arguments": {"a": "}<{"}}\n</tool_call>', "", 1),
    "text before": ('Sure. <tool_call>{"name": "f", "arguments": {}}</tool_call>', "Sure. ", 1),
    "two": (
        '<tool_call>{"name": "f", "arguments": {"x": [1, {"y": 2}]}}</tool_call>\n'
        '<tool_call>{"arguments": {"b": "\\"}"}, "name": "g"}</tool_call>\n',
        "",
        2,
    ),
    "none": ("a < b <tool", "a < b <tool", 0),
    "not JSON": ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", 0),
    "no name": ('<tool_call>{"a": 1}</tool_call>.', '<tool_call>{"a": 1}</tool_call>.', 0),
    "cut off": ('<tool_call>\n{"name": "f", "arguments": {"a": 1', "", 1),
    "cut off early": ('x<tool_call>\n{"na', 'x<tool_call>\n{"na', 0),
    "text after": ('<tool_call>{"name": "f", "arguments": {}}</tool_call> ok', " ok", 1),
}
LLAMA = {
    "one": ('{"name": "f", "parameters": {"a": "}{"}}', "", 1),
    "tag": ('<|python_tag|>{"name": "f", "parameters": {}}', "", 1),
    "two": ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', "", 2),
    "text": ("Hello {world}", "Hello {world}", 0),
    "other JSON": ('{"a": {"b": 1}} and', '{"a": {"b": 1}} and', 0),
    "blank": ("  ", "  ", 0),
}
CASES = [("hermes", *case) for case in HERMES.values()] + [
    ("llama3_json", *case) for case in LLAMA.values()
]


def read(parser: str, pieces: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    message = ChoiceMessage(PARSERS[parser]())
    deltas = [d for piece in pieces for d in message.read(piece, ends=False)]
    deltas += message.read("", ends=True)
    return message.whole(), deltas


def shape(message: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    calls = [c["function"] for c in message.get("tool_calls", ())]
    return message["content"] or "", [(c["name"], c["arguments"]) for c in calls]


def put_together(deltas: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """What a client makes of the deltas."""
    content, calls = "", dict[int, list[str]]()
    for delta in deltas:
        content += delta.get("content", "")
        for change in delta.get("tool_calls", ()):
            function = change["function"]
            if "name" in function:
                assert change["index"] == len(calls) and change["id"] and change["type"]
                calls[change["index"]] = [function["name"], ""]
            calls[change["index"]][1] += function["arguments"]
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize(("parser", "text", "content", "num_calls"), CASES)
def test_whole_text(parser: str, text: str, content: str, num_calls: int) -> None:
    message, deltas = read(parser, [text])
    assert (message["content"] or "") == content
    assert len(message.get("tool_calls", ())) == num_calls
    if num_calls and "cut" not in text and text.count("{") == text.count("}"):
        for call in message["tool_calls"]:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert put_together(deltas) == shape(message)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=12))
def test_cuts_do_not_matter(case: tuple[str, str, str, int], cuts: list[int]) -> None:
    parser, text, *_ = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    message, deltas = read(parser, pieces)
    assert shape(message) == shape(read(parser, [text])[0])
    assert put_together(deltas) == shape(message)


@given(
    st.sampled_from(sorted(PARSERS)), st.text('<>/tool_call{}":, nameargutsfx1\\\n', max_size=80)
)
def test_no_text_is_lost_or_invented(parser: str, text: str) -> None:
    message, deltas = read(parser, list(text))
    assert put_together(deltas) == shape(message)
    if not message.get("tool_calls"):
        assert message["content"] == text


def test_a_named_call_is_all_arguments() -> None:
    message = ChoiceMessage(ArgumentsParser("f"))
    deltas = [d for piece in ('{"a"', "", ": 1}") for d in message.read(piece, ends=False)]
    assert put_together(deltas) == ("", [("f", '{"a": 1}')])
