"""Tool calls and structured output of a model that has a token for what marks a call, a plain one
or a special one: as the model writes calls, and read as calls."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretoken.assembly import build_engine
from foretoken.config import EngineConfig
from foretoken.server.settings import ServerConfig
from tests.e2e.added_tokens import IDS, MARKS, write_model_with_added_tokens
from tests.e2e.serving import Serving, post, serving

CHAT = "/v1/chat/completions"
PLACES = {"A": {"const": "</s>"}, "B": {"$ref": "#/$defs/A"}}
TOOLS = [
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
        "tools": TOOLS,
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
    choice = choice_of(marked, tools=TOOLS, tool_choice=named)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "listen"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert choice["finish_reason"] == "stop"


def test_a_call_of_its_own_is_found(marked: Serving) -> None:
    """tool_choice auto: the grammar stands in for a model that knows tools."""
    call = json.dumps('{"name": "look", "arguments": {}}')
    grammar = {"grammar": f'start: "Well. " <tool_call> {call} </tool_call>'}
    choice = choice_of(marked, tools=TOOLS, structured_outputs=grammar)
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
