"""Structured output and tool calls through the official client; the grammar is forced, since the
packaged model has never seen a tool."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.settings import ServerConfig
from tests.e2e.added_tokens import IDS, MARKS, write_model_with_added_tokens
from tests.e2e.serving import Serving, post, serving

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": None}},
]


NOWHERE: dict[str, Any] = {"properties": {"a": {"$ref": "#/$defs/b"}}}
ANY_CALL = {"type": "function", "function": {"name": "lost"}}
ENDLESS = {"$ref": "#"}
HUGE: Any = {
    "type": "function",
    "function": {"name": "huge", "parameters": {"enum": ["x" * 2000 + str(i) for i in range(99)]}},
}
LOST: Any = {"type": "function", "function": {"name": "lost", "parameters": NOWHERE}}


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    title: str = pydantic.Field(max_length=10)
    is_long: bool


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=120, **options
    )


def test_json_schema_and_object(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=60, response_format=Answer
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": Answer.model_json_schema()},
    }
    streamed = ask(client, response_format=form, stream=True)
    text = "".join(choice.delta.content or "" for chunk in streamed for choice in chunk.choices)
    assert Answer.model_validate_json(text) == parsed.choices[0].message.parsed
    whole = ask(client, response_format={"type": "json_object"}, seed=1)
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content), dict)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_forced_call(client: openai.OpenAI, choice: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    options = {"tools": TOOLS, "tool_choice": named if choice == "named" else choice}
    whole = ask(client, **options, parallel_tool_calls=False).choices[0]
    assert whole.message.content is None
    [call] = whole.message.tool_calls
    assert call.function.name == "get_weather" or choice == "required"
    assert isinstance(json.loads(call.function.arguments), dict)
    assert whole.finish_reason == ("stop" if choice == "named" else "tool_calls")
    deltas = [c for chunk in ask(client, **options, parallel_tool_calls=False, stream=True)
              for c in chunk.choices]  # fmt: skip
    changes = [t for c in deltas for t in c.delta.tool_calls or ()]
    assert changes[0].id and changes[0].function.name == call.function.name
    assert "".join(t.function.arguments or "" for t in changes) == call.function.arguments
    assert not any(c.delta.content for c in deltas)
    assert deltas[-1].finish_reason == whole.finish_reason


def test_calls_are_found_where_the_model_chose_them(server: Serving) -> None:
    """tool_choice auto: the grammar stands in for a model that knows tools."""
    grammar = 'start: "Well. <tool_call>" call "</tool_call>"\ncall: %json {"type": "object", '
    grammar += '"properties": {"name": {"const": "stop"}, "arguments": {"const": {}}}, '
    grammar += '"required": ["name", "arguments"], "additionalProperties": false, '
    grammar += '"x-guidance": {"whitespace_flexible": false}}'
    body = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 80,
        "structured_outputs": {"grammar": grammar},
    }
    choice = post(server, "/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == "Well. "
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "stop"
    assert choice["finish_reason"] == "tool_calls"
    none = post(server, "/v1/chat/completions", {**body, "tool_choice": "none"}).json()
    assert none["choices"][0]["message"]["content"].startswith("Well. <tool_call>")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"tools": [LOST], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [*TOOLS, LOST], "tool_choice": "required"}, "tools[2].function.parameters"),
        ({"tools": [*TOOLS, LOST], "tool_choice": ANY_CALL}, "tools[2].function.parameters"),
        ({"tools": [LOST], "tool_choice": "required", "stream": True},
         "tools[0].function.parameters"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NOWHERE}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NOWHERE}},
          "tools": TOOLS}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": NOWHERE}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": ENDLESS}}},
         "response_format.json_schema.schema"),
        ({"tools": [HUGE], "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {"regex": "x"}, "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_wrong_wishes(server: Serving, changes: dict[str, Any], named: str) -> None:
    answer = post(server, "/v1/chat/completions", {"messages": MESSAGES, **changes})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == named
    assert error["message"].startswith(f"{named}: got ")
    assert "arguments_" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ],
)
def test_what_is_found_out_late_names_its_field(
    server: Serving, monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any], named: str, stream: bool
) -> None:
    grammars = server.state.engine.engine.parts.grammars
    monkeypatch.setattr(
        grammars, "take_failures", lambda: dict.fromkeys(grammars._matchers, "a simple grammar")
    )
    body = {"messages": MESSAGES, "max_tokens": 20, "stream": stream, **wish}
    text = post(server, "/v1/chat/completions", body).text
    [error] = [line for line in text.splitlines() if '"error"' in line]
    assert json.loads(error.removeprefix("data: "))["error"]["param"] == named


CHAT = "/v1/chat/completions"
PLACES = {"A": {"const": "</s>"}, "B": {"$ref": "#/$defs/A"}}
MARKED_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"place": {"$ref": "#/$defs/B"}, "text": {"const": "</tool_call>"}},
                "required": ["place", "text"],
                "additionalProperties": False,
                "$defs": PLACES,
            },
        },
    }
    for name in ("look", "listen")
]
ARGUMENTS = {"place": "</s>", "text": "</tool_call>"}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "temperature": 0,
    "max_tokens": 100,
}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def marked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("marked")
    write_model_with_added_tokens(folder, special_marks=request.param)
    config = EngineConfig.from_kwargs(
        model=str(folder), max_num_seqs=4, kv_cache_memory_bytes=16 << 20
    )
    with serving(build_engine(config), ServerConfig()) as running:
        yield running


def choice_of(server: Serving, **changes: Any) -> dict[str, Any]:
    answer = post(server, CHAT, {**BODY, **changes})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(server: Serving, **changes: Any) -> list[dict[str, Any]]:
    body = {**BODY, **changes, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("drafts", [True, False])
def test_required_writes_the_tokens_of_the_model(marked: Serving, drafts: bool) -> None:
    wish: dict[str, Any] = {
        "tools": MARKED_TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "return_token_ids": True,
        "speculation": {"enabled": drafts},
    }
    whole = choice_of(marked, **wish)
    [call] = whole["message"]["tool_calls"]
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    opening, *_, closing, _ = whole["token_ids"]
    assert (opening, closing) == tuple(IDS[mark] for mark in MARKS)
    assert sum(token in IDS.values() for token in whole["token_ids"][:-1]) == 2
    deltas = streamed(marked, **wish)
    calls = [one for c in deltas for one in c["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == call["function"]["name"]
    text = "".join(one["function"].get("arguments", "") for one in calls)
    assert text == call["function"]["arguments"]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert not any(c["delta"].get("content") for c in deltas)


def test_a_named_call(marked: Serving) -> None:
    named = {"type": "function", "function": {"name": "listen"}}
    choice = choice_of(marked, tools=MARKED_TOOLS, tool_choice=named)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "listen"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert choice["finish_reason"] == "stop"


def test_a_call_of_its_own_is_found(marked: Serving) -> None:
    """tool_choice auto: the grammar stands in for a model that knows tools."""
    call = json.dumps('{"name": "look", "arguments": {}}')
    grammar = {"grammar": f'start: "Well. " <tool_call> {call} </tool_call>'}
    choice = choice_of(marked, tools=MARKED_TOOLS, structured_outputs=grammar)
    assert choice["message"]["content"] == "Well. "
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["look"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("mark", ["</s>", "<|im_end|>", "<tool_call>", "[INST]"])
def test_response_format_and_choice(marked: Serving, mark: str) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": f"x{mark}y"}}}
    choice = choice_of(marked, response_format=form)
    assert json.loads(choice["message"]["content"]) == f"x{mark}y"
    assert choice["finish_reason"] == "stop"
    wish = {"structured_outputs": {"choice": [f"say {mark} now"]}}
    assert choice_of(marked, **wish)["message"]["content"] == f"say {mark} now"
    deltas = streamed(marked, **wish)
    assert "".join(c["delta"].get("content", "") for c in deltas) == f"say {mark} now"
    answer = post(marked, "/v1/completions", {"prompt": "x", "max_tokens": 99, **wish}).json()
    assert answer["choices"][0]["text"] == f"say {mark} now"
