"""What is wrong with a body is said as it was typed: the field, what was given, what may be."""

import json
from typing import Any

import pytest

from foretoken.server.problems import Problem
from foretoken.server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    CorpusBody,
    DetokenizeBody,
    SpeculationBody,
    TokenizeBody,
)
from foretoken.server.transport.reading import as_body

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}

SAID: list[tuple[type[Body], dict[str, Any], str, str]] = [
    (ChatBody, {"stop": ["x"] * 65}, "stop", "got a list of 65; allowed: at most 64"),
    (CompletionBody, {"bad_words": ["x"] * 1025}, "bad_words", "a list of 1025; allowed: at most"),
    (ChatBody, {"tools": [TOOL] * 129}, "tools", "got a list of 129; allowed: at most 128"),
    (ChatBody, {"stop": 5}, "stop", "got 5; allowed: a text or a list"),
    (ChatBody, {"stop": ["x", 5]}, "stop.1", "got 5; allowed: a text"),
    (ChatBody, {"stop": ["x", None]}, "stop.1", "got None; allowed: a text"),
    (ChatBody, {"messages": []}, "messages", "got a list of 0; allowed: at least 1"),
    (ChatBody, {"messages": None}, "messages", "missing, and required"),
    (ChatBody, {"messages": [5]}, "messages.0", "got 5; allowed: an object"),
    (ChatBody, {"messages": [{"content": "x"}]}, "messages.0.role", "missing, and required"),
    (ChatBody, {"n": "2"}, "n", "got '2'; allowed: an integer"),
    (ChatBody, {"n": 1.5}, "n", "got 1.5; allowed: an integer"),
    (ChatBody, {"n": True}, "n", "got True; allowed: an integer"),
    (ChatBody, {"stream": "yes"}, "stream", "got 'yes'; allowed: true or false"),
    (ChatBody, {"temperature": "hot"}, "temperature", "got 'hot'; allowed: a number"),
    (ChatBody, {"echo": True}, "echo", "got True; allowed: false"),
    (CompletionBody, {"best_of": 2}, "best_of", "got 2; allowed: 1"),
    (CompletionBody, {"suffix": "x"}, "suffix", "got 'x'; allowed: null"),
    (CompletionBody, {"prompt": {"a": 1}}, "prompt", "got an object; allowed: a text, texts,"),
    (CompletionBody, {"prompt": [[1], "x"]}, "prompt", "got a list of 2; allowed: a text, texts,"),
    (CompletionBody, {"prompt": None}, "prompt", "missing, and required"),
    (ChatBody, {"logit_bias": {"5": "a"}}, "logit_bias.5", "got 'a'; allowed: a number"),
    (ChatBody, {"logit_bias": {"5": None}}, "logit_bias.5", "got None; allowed: a number"),
    (ChatBody, {"metadata": [1]}, "metadata", "got a list of 1; allowed: an object"),
    (ChatBody, {"stop_token_ids": [1, "2"]}, "stop_token_ids.1", "got '2'; allowed: an integer"),
    (ChatBody, {"modalities": ["audio"]}, "modalities.0", "got 'audio'; allowed: 'text'"),
    (ChatBody, {"tool_choice": "x"}, "tool_choice", "'none', 'auto' or 'required'"),
    (ChatBody, {"tool_choice": {"type": "function", "function": {}}},
     "tool_choice.function.name", "missing, and required"),
    (ChatBody, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools.0.function.name", "got 'a b'; allowed: pattern '^["),
    (ChatBody, {"tools": [{"type": "function", "function": {"name": "f", "foo": 1}}]},
     "tools.0.function.foo", "not a field of tools.0.function; allowed: name, description"),
    (ChatBody, {"tools": [{"type": "custom", "function": {"name": "f"}}]},
     "tools.0.type", "got 'custom'; allowed: 'function'"),
    (ChatBody, {"stream_options": {"include_use": True}},
     "stream_options.include_use", "did you mean 'include_usage'?"),
    (ChatBody, {"response_format": {"type": "xml"}},
     "response_format.type", "got 'xml'; allowed: 'text', 'json_object' or 'json_schema'"),
    (ChatBody, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "missing, and required"),
    (ChatBody,
     {"response_format": {"type": "json_schema", "json_schema": {"nam": "x", "schema": {}}}},
     "response_format.json_schema.nam", "did you mean 'name'?"),
    (ChatBody, {"prediction": {"type": "content", "content": 5}},
     "prediction.content", "got 5; allowed: a text or a list"),
    (ChatBody, {"prediction": {"type": "content", "content": [{"type": "text"}]}},
     "prediction.content.0.text", "missing, and required"),
    (ChatBody, {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (ChatBody, {"functions": [1]}, "functions", "not a field of this request; allowed: "),
    (TokenizeBody, {"prompt": ["x"]}, "prompt", "got a list of 1; allowed: a text"),
    (DetokenizeBody, {"tokens": "x"}, "tokens", "got 'x'; allowed: a list"),
    (SpeculationBody, {"guard": "x"}, "guard", "got 'x'; allowed: a number"),
    (CorpusBody, {"text": ""}, "text", "got ''; allowed: at least 1 character"),
]  # fmt: skip
NEEDED: dict[type[Body], dict[str, Any]] = {ChatBody: CHAT, CompletionBody: TEXT}


def problem(kind: type[Body], body: dict[str, Any]) -> Problem:
    with pytest.raises(Problem) as caught:
        as_body(json.dumps({**NEEDED.get(kind, {}), **body}).encode(), kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("kind", "body", "param", "said"), SAID)
def test_a_mistake_names_field_given_and_allowed(
    kind: type[Body], body: dict[str, Any], param: str, said: str
) -> None:
    found = problem(kind, body)
    assert found.param == param
    assert found.message.startswith(f"{param}: ") and said in found.message, found.message
    assert "more)" not in found.message  # one mistake, however many forms the value could have had


def test_several_mistakes_are_counted_once_each() -> None:
    assert problem(ChatBody, {"stop": 5, "n": "x", "stream": 1}).message.endswith("(and 2 more)")


def test_what_was_given_is_shortened() -> None:
    for value in ("x" * 10**6, 10**4000, [0] * 10**5, {"x" * 10**5: 1}):
        assert len(problem(ChatBody, {"temperature": value, "n": value}).message) <= 1020
    assert problem(ChatBody, {"y" * 10**5: 1}).message.startswith("y" * 200 + ": not a field")


def test_names_of_forms_that_a_client_types_are_fields() -> None:
    """A key that is called like one of pydantic's forms stays in the path."""
    assert problem(ChatBody, {"logit_bias": {"str": "x"}}).param == "logit_bias.str"
    assert problem(ChatBody, {"metadata": {"list[str]": 5}}).param == "metadata.list[str]"
