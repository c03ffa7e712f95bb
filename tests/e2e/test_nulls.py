"""A null is as good as no field, in every object of a request; in what clients bring of their own,
such as schemas, it is theirs."""

import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import chat, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params

from foretoken.server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    CorpusBody,
    DetokenizeBody,
    SpeculationBody,
    TokenizeBody,
)
from tests.e2e.serving import Serving

USER: dict[str, Any] = {"role": "user", "content": "x"}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
SCHEMA: dict[str, Any] = {"name": "n", "schema": {"type": "object"}}
CHAT: dict[str, Any] = {
    "messages": [USER], "max_tokens": 1, "max_completion_tokens": 1, "temperature": 0
}  # fmt: skip
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "temperature": 0}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": SCHEMA}

Place = tuple[str | int, ...]
INSIDE: list[tuple[dict[str, Any], Place, type]] = [
    ({**CHAT, "stream": True, "stream_options": {}}, ("stream_options",),
     chat.ChatCompletionStreamOptionsParam),
    ({**CHAT, "tools": [TOOL]}, ("tools", 0), chat.ChatCompletionFunctionToolParam),
    ({**CHAT, "tools": [TOOL]}, ("tools", 0, "function"), shared_params.FunctionDefinition),
    ({**CHAT, "response_format": FORMAT}, ("response_format", "json_schema"),
     shared_params.response_format_json_schema.JSONSchema),
    (CHAT, ("messages", 0), chat.ChatCompletionUserMessageParam),
    ({**CHAT, "messages": [{"role": "system", "content": "x"}, USER]}, ("messages", 0),
     chat.ChatCompletionSystemMessageParam),
    ({**CHAT, "messages": [USER, {"role": "assistant", "content": "x"}, USER]}, ("messages", 1),
     chat.ChatCompletionAssistantMessageParam),
    ({**CHAT, "prediction": {"type": "content", "content": "x"}}, ("prediction",),
     chat.ChatCompletionPredictionContentParam),
]  # fmt: skip


def optional(kind: type) -> Iterator[str]:
    """The fields of one of the client's own dictionaries that may be left out, here too."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(hint) is not typing.Required and name != "schema":
            yield name


def with_null(body: Any, place: Place, name: str) -> Any:
    if not place:
        return {**body, name: None}
    changed: Any = dict(body) if isinstance(body, dict) else list(body)
    changed[place[0]] = with_null(body[place[0]], place[1:], name)
    return changed


@pytest.fixture(scope="module")
def line(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def assert_taken(line: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = line.post(path, json=body)
    assert answer.status_code == 200, (body, answer.text)


@pytest.mark.parametrize(
    ("path", "body", "kinds"),
    [
        ("/v1/completions", TEXT, (
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming, CompletionBody)),
        ("/v1/chat/completions", CHAT, (
            chat_create_params.CompletionCreateParamsNonStreaming,
            chat_create_params.CompletionCreateParamsStreaming, ChatBody)),
        ("/tokenize", {"prompt": "x"}, (TokenizeBody,)),
        ("/detokenize", {"tokens": [5]}, (DetokenizeBody,)),
    ],
)  # fmt: skip
def test_every_field_may_be_null(
    line: httpx.Client, path: str, body: dict[str, Any], kinds: tuple[type, ...]
) -> None:
    """OpenAI's, also those of new versions, and our own; what is asked for is given."""
    fields = {name for kind in kinds for name in typing.get_type_hints(kind)}
    names = fields - {"prompt", "messages", "tokens", "model_config"}
    assert len(names) > (30 if "chat" in path else 1)
    for name in sorted(names):
        assert_taken(line, path, {**body, name: None})
    assert_taken(line, path, {**dict.fromkeys(names), **body})
    for name in body:
        if name in ("prompt", "messages", "tokens"):
            error = line.post(path, json={**body, name: None}).json()["error"]
            assert error["param"] in (name, "prompt"), error


@pytest.mark.parametrize(
    ("body", "place", "kind"), INSIDE, ids=[kind.__name__ for _, _, kind in INSIDE]
)
def test_fields_inside_may_be_null(
    line: httpx.Client, body: dict[str, Any], place: Place, kind: type
) -> None:
    for name in optional(kind):
        assert_taken(line, "/v1/chat/completions", with_null(body, place, name))


@pytest.mark.parametrize(
    "given",
    [
        {"speculation": {"enabled": None, "drafter": None, "num_speculative_tokens": 1}},
        {"structured_outputs": {"regex": "a", "json": None, "disable_any_whitespace": None}},
        {"structured_outputs": {"choice": ["a"], "whitespace_pattern": None}},
    ],
)
def test_our_own_dictionaries_may_have_nulls(line: httpx.Client, given: dict[str, Any]) -> None:
    assert_taken(line, "/v1/completions", {**TEXT, **given})


@pytest.mark.parametrize(
    "given",
    [
        {"stop": [None]},
        {"stop": ["x", None]},
        {"logit_bias": {"5": None}},
        {"metadata": {"a": None}},
        {"stop_token_ids": [None]},
        {"prompt": [None]},
        {"prompt": [5, None]},
    ],
)
def test_a_null_among_values_is_none_of_them(line: httpx.Client, given: dict[str, Any]) -> None:
    answer = line.post("/v1/completions", json={**TEXT, **given})
    assert answer.status_code == 400, answer.text


def test_nulls_in_what_clients_bring_are_kept() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1, None], "default": None}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": None}}
    body = ChatBody.model_validate({
        "messages": [USER],
        "tools": [tool],
        "response_format": {"type": "json_object", "schema": {"const": None}},
        "chat_template_kwargs": {"enable_thinking": None},
    }, strict=False)  # fmt: skip
    assert body.tools is not None and body.response_format is not None
    given = body.tools[0].model_dump(exclude_unset=True)
    assert given == {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert body.response_format.schema_ == {"const": None}
    assert body.template_variables == {"enable_thinking": None}


@pytest.mark.parametrize(("kind", "needed"), [(SpeculationBody, {}), (CorpusBody, {"text": "x"})])
def test_the_operators_bodies_take_them_too(kind: type[Body], needed: dict[str, Any]) -> None:
    nulls = dict.fromkeys(kind.model_fields)
    assert kind(**{**nulls, "new": None, **needed}) == kind(**needed)
