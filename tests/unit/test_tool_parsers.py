"""Tool calls out of text: what they are must not depend on how the text was cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.server.tools.messages import ChoiceMessage
from foretoken.server.tools.parsers import PARSERS, ArgumentsParser

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
