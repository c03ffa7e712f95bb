"""What clients send: mistakes are a 400 that says why, offline an exception or an error of that
request, never a 500; nulls are no fields; what new clients add is taken; foreign hosts are not."""

import gzip
import json
import logging
import socket
import typing
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai.types import chat, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params

from foretoken import LLM, SamplingParams
from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import ParameterError, PromptError, RequestError
from foretoken.server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    CorpusBody,
    DetokenizeBody,
    SpeculationBody,
    TokenizeBody,
)
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import Serving, post, serving

PROPERTIES = {"json": {"properties": {f"p{i}": {} for i in range(3000)}, "minProperties": 1}}
"""More ways to go on than a step may weigh, found only after the first brace."""
FORCED: dict[str, Any] = {"grammar": 'root ::= "a" root'}
"""A text that never ends and leaves no choice."""
WRONG: list[dict[str, Any]] = [
    {"structured_outputs": {"grammar": "start: start"}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": FORCED},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"choice": 5}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"json": True}},
    {"structured_outputs": {"guided": "x"}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
    {"response_format": {"type": "json_schema"}},
    {"logit_bias": {"\u00b2": 1}},
    {"logit_bias": {"\u0663": 1}},
    {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": [5]},
    {"stop": 5},
    {"max_tokens": "5"},
    {"n": "2"},
]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: json.dumps(wrong)[:40])
def test_the_server_says_why(server: Serving, wrong: dict[str, Any]) -> None:
    for path, asked in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = post(server, path, {"max_tokens": 8, **asked, **wrong})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"], error
    server.wait_idle()


TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 8}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
LONG = "x = 1\n" * 3000
NAMED: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {**CHAT, "stop": ["x"] * 65}, "stop", "a list of 65; allowed: at most 64"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21;"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "got 2;"),
    ("chat/completions", {"messages": CHAT["messages"], "max_completion_tokens": 0},
     "max_completion_tokens", "got 0;"),
    ("chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens", "got 0;"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 5}, "max_tokens", "got 8;"),
    ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages", "tokens"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice", "got 'required';"),
    ("chat/completions", {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice", "'name': 'f'"),
    ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required",
                          "structured_outputs": {"regex": "a"}}, "tool_choice", "got 'required';"),
    ("completions", {**TEXT, "logprobs": 21}, "logprobs", "got 21;"),
    ("completions", {**TEXT, "logprobs": 21, "echo": True}, "logprobs", "got 21;"),
    ("completions", {**TEXT, "prompt_logprobs": 21}, "prompt_logprobs", "got 21;"),
    ("completions", {**TEXT, "prompt": [8000]}, "prompt", "got 8000; allowed: 0 to"),
    ("completions", {**TEXT, "prompt": [[1], [-1]]}, "prompt", "got -1; allowed: 0 to"),
    ("completions", {**TEXT, "prompt": LONG}, "prompt", "tokens"),
    ("completions", {**TEXT, "prompt": []}, "prompt", "0 prompts"),
    ("completions", {**TEXT, "min_tokens": 9}, "min_tokens", "got 9;"),
    ("completions", {**TEXT, "n": 129}, "n", "got 129; allowed: at most 128"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "said"), NAMED)
def test_the_field_is_named_as_it_was_typed(
    server: Serving, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    answer = post(server, "/v1/" + path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: got ") and said in error["message"], error


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/tokenize", {}, "prompt", "got 'neither'"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt", "got 'prompt and messages'"),
        ("/detokenize", {"tokens": [5, 10**6]}, "tokens", "got 1000000; allowed: 0 to"),
    ],
)
def test_other_endpoints_name_it_too(
    server: Serving, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    error = post(server, path, body).json()["error"]
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        ({"drafter": "oracle"}, "drafter"),
        ({"num_speculative_tokens": 99}, "num_speculative_tokens"),
        ({"guard": -1}, "guard"),
        ({"on": True}, "on"),
    ],
)
def test_a_policy_is_named_as_it_was_typed(
    server: Serving, policy: dict[str, Any], param: str
) -> None:
    headers = {"authorization": "Bearer boss"}
    answer = httpx.put(server.url + "/admin/speculation", json=policy, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(f"{param}: ")


def test_tools_whose_schema_cannot_be(server: Serving) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    choices = ("required", {"type": "function", "function": {"name": "f"}})
    for choice in choices:
        answer = post(server, "/v1/chat/completions", {**body, "tool_choice": choice})
        assert answer.status_code == 400, answer.text


def test_a_stream_says_it_too(server: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 8, "stream": True, "structured_outputs": FORCED}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    error = json.loads(lines[-2])["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == 400, error


@pytest.mark.slow
def test_three_thousand_properties(server: Serving) -> None:
    answer = post(server, "/v1/completions", {"prompt": "x", "structured_outputs": PROPERTIES})
    assert answer.status_code == 400, answer.text
    server.wait_idle()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_cache_memory_bytes=64 << 20, max_num_seqs=4)


@pytest.mark.parametrize("wrong", [{"grammar": "start: start"}, {"json": {"$ref": "#"}}], ids=str)
def test_offline_they_are_refused(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        llm.generate("x", SamplingParams(structured_outputs=wrong), use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("\ud800", {}, "prompt"),
        ({"prompt": "x\udfff"}, {}, "prompt"),
        ("x", {"bad_words": ["a", "\ud800"]}, "bad_words"),
        ("x", {"prediction": "\ud800"}, "prediction"),
    ],
)
def test_half_a_character_is_named_where_it_was_typed(
    llm: LLM, prompt: Any, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        llm.generate(prompt, SamplingParams(max_tokens=1, **params), use_tqdm=False)
    assert caught.value.field == field and not llm._engine.has_unfinished


@pytest.mark.parametrize("content", ["\ud800", LONG])
def test_a_chat_offline_names_its_messages(llm: LLM, content: str) -> None:
    with pytest.raises(PromptError) as caught:
        llm.chat([{"role": "user", "content": content}], use_tqdm=False)
    assert caught.value.field == "messages"


def test_text_is_that_of_the_tokens_when_a_grammar_fails(llm: LLM) -> None:
    """Its failure is found in a step whose tokens nothing masked; they are not given out."""
    good = SamplingParams(max_tokens=8, temperature=0)
    bad = SamplingParams(max_tokens=8, temperature=0, structured_outputs=FORCED)
    failed, fine = llm.generate(["x", "x"], [bad, good], use_tqdm=False)
    [output] = failed.outputs
    assert output.finish_reason == "error" and failed.error and "Too many items" in failed.error
    assert output.text == llm.get_tokenizer().decode(output.token_ids)
    assert set(output.text) <= {"a"}
    assert len(fine.outputs[0].token_ids) == 8 and fine.error is None


USER: dict[str, Any] = {"role": "user", "content": "x"}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
NULLS_TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
SCHEMA: dict[str, Any] = {"name": "n", "schema": {"type": "object"}}
NULLS_CHAT: dict[str, Any] = {
    "messages": [USER], "max_tokens": 1, "max_completion_tokens": 1, "temperature": 0
}  # fmt: skip
NULLS_TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "temperature": 0}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": SCHEMA}

Place = tuple[str | int, ...]
INSIDE: list[tuple[dict[str, Any], Place, type]] = [
    ({**NULLS_CHAT, "stream": True, "stream_options": {}}, ("stream_options",),
     chat.ChatCompletionStreamOptionsParam),
    ({**NULLS_CHAT, "tools": [NULLS_TOOL]}, ("tools", 0), chat.ChatCompletionFunctionToolParam),
    ({**NULLS_CHAT, "tools": [NULLS_TOOL]}, ("tools", 0, "function"),
     shared_params.FunctionDefinition),
    ({**NULLS_CHAT, "response_format": FORMAT}, ("response_format", "json_schema"),
     shared_params.response_format_json_schema.JSONSchema),
    (NULLS_CHAT, ("messages", 0), chat.ChatCompletionUserMessageParam),
    ({**NULLS_CHAT, "messages": [{"role": "system", "content": "x"}, USER]}, ("messages", 0),
     chat.ChatCompletionSystemMessageParam),
    ({**NULLS_CHAT, "messages": [USER, {"role": "assistant", "content": "x"}, USER]},
     ("messages", 1),     chat.ChatCompletionAssistantMessageParam),
    ({**NULLS_CHAT, "prediction": {"type": "content", "content": "x"}}, ("prediction",),
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
        ("/v1/completions", NULLS_TEXT, (
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming, CompletionBody)),
        ("/v1/chat/completions", NULLS_CHAT, (
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
    assert_taken(line, "/v1/completions", {**NULLS_TEXT, **given})


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
    answer = line.post("/v1/completions", json={**NULLS_TEXT, **given})
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


NEW_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 6, "temperature": 0
}  # fmt: skip
NEW: dict[str, Any] = {
    "reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "safety_identifier": "s", "service_tier": "flex",
    "store": False, "metadata": {"a": "b"}, "user": "u",
}  # fmt: skip


@pytest.fixture(scope="module")
def keyed() -> Iterator[Serving]:
    config = EngineConfig.from_kwargs(
        model="demo", max_num_seqs=2, max_model_len=64, kv_cache_memory_bytes=16 << 20
    )
    with serving(build_engine(config), ServerConfig(api_keys=("ann",))) as running:
        yield running


def raw(server: Serving, lines: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    where = urlsplit(server.url)
    assert where.hostname and where.port
    with socket.create_connection((where.hostname, where.port), 30) as line:
        head = f"{lines}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        line.sendall(head.encode("latin-1") + body)
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    head_given, _, content = answer.partition(b"\r\n\r\n")
    found: dict[str, Any] = json.loads(content) if content.startswith(b"{") else {}
    return int(head_given.split()[1]), found


def test_fields_without_effect_are_taken_and_named_in_the_log(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    expected = post(server, "/v1/chat/completions", NEW_CHAT).json()["choices"][0]["message"]
    with caplog.at_level(logging.INFO, "foretoken"):
        answer = post(server, "/v1/chat/completions", {**NEW_CHAT, **NEW})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"] == expected
    [facts] = [r.facts for r in caplog.records if r.getMessage() == "accepted"]  # type: ignore[attr-defined]
    assert set(facts["without_effect"].split(",")) == set(NEW)
    plain = {"prompt": "x", "max_tokens": 2, **NEW}
    assert post(server, "/v1/completions", plain).status_code == 200


def test_the_official_client_sends_them(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Say hi"}],
        max_tokens=4,
        reasoning_effort="minimal",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].message.content is not None


def test_variables_reach_the_chat_template(server: Serving) -> None:
    body = {"messages": NEW_CHAT["messages"]}
    usual = post(server, "/tokenize", body).json()
    changed = {"chat_template_kwargs": {"bos_token": "</s>"}}
    assert post(server, "/tokenize", body | changed).json()["tokens"][0] != usual["tokens"][0]
    chat = post(server, "/v1/chat/completions", {**NEW_CHAT, **changed, "return_token_ids": True})
    ids = chat.json()["choices"][0]["prompt_token_ids"]
    assert ids == post(server, "/tokenize", body | changed).json()["tokens"]
    wrong: dict[str, Any] = {"chat_template_kwargs": {"messages": []}}
    answer = post(server, "/v1/chat/completions", {**NEW_CHAT, **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_a_schema_beside_json_object(server: Serving) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"response_format": {"type": "json_object", "schema": schema}}
    answer = post(server, "/v1/chat/completions", {**NEW_CHAT, **form, "max_tokens": 20})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"n": 3}
    wrong = {"response_format": {"type": "text", "schema": schema}}
    assert post(server, "/v1/chat/completions", {**NEW_CHAT, **wrong}).status_code == 400


def test_overflow_has_its_code(server: Serving, client: openai.OpenAI) -> None:
    for path, asked in (
        ("/v1/completions", {"prompt": [5] * 5000}),
        ("/v1/completions", {"prompt": "word " * 5000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 5000}]}),
    ):
        answer = post(server, path, asked)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="word " * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_what_is_not_built_says_so(server: Serving, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not built"):
        client.embeddings.create(model="demo", input="x")
    with pytest.raises(openai.NotFoundError, match="not built"):
        client.responses.create(model="demo", input="x")
    for path in ("/v1/embeddings", "/v1/responses"):
        error = post(server, path, {"input": "x"}).json()["error"]
        assert error["code"] == "not_built" and error["type"] == "not_found_error"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_bearer_in_any_case(keyed: Serving, scheme: str) -> None:
    for key, status in (("ann", 200), ("bob", 401), ("Ann", 401)):
        headers = {"authorization": f"{scheme} {key}"}
        assert httpx.get(keyed.url + "/v1/models", headers=headers).status_code == status


def test_a_body_that_is_no_object_is_named(server: Serving) -> None:
    for body in ([{"prompt": "x"}], "x", 5, None, True):
        content, media = json.dumps(body), {"content-type": "application/json"}
        answer = httpx.post(server.url + "/v1/completions", content=content, headers=media)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the body: a JSON object is wanted")


@pytest.mark.parametrize("host", ["evil.example:8000", "[::1].evil.example", "evil%2eexample"])
def test_foreign_hosts_are_refused_without_a_key(
    server: Serving, keyed: Serving, host: str
) -> None:
    for path in ("/v1/models", "/", "/openapi.json"):
        status, answer = raw(server, f"GET {path} HTTP/1.1\r\nhost: {host}\r\n")
        assert status == 403 and "host" in answer["error"]["message"], (path, answer)
    assert raw(server, f"GET /health HTTP/1.1\r\nhost: {host}\r\n")[0] == 200
    key = "authorization: Bearer ann\r\n"
    assert raw(keyed, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n{key}")[0] == 200


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "[::1]:8000", ""])
def test_own_hosts_are_answered(server: Serving, host: str) -> None:
    assert raw(server, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n")[0] == 200


@pytest.mark.slow
def test_a_compressed_body_is_refused_by_name(server: Serving) -> None:
    body = gzip.compress(json.dumps({"prompt": "x", "max_tokens": 1}).encode())
    for coding in ("gzip", "GZIP", "br", "x-unknown", "identity, gzip"):
        headers = {"content-type": "application/json", "content-encoding": coding}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = httpx.post(server.url + path, content=body, headers=headers)
            assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
            message = answer.json()["error"]["message"]
            assert message.startswith("content-encoding: got") and "allowed: identity" in message
    for plain in ("identity", "Identity"):
        asked = {"prompt": "x", "max_tokens": 1}
        answer = post(server, "/v1/completions", asked, **{"content-encoding": plain})
        assert answer.status_code == 200


def test_a_post_must_say_that_it_is_json_without_a_key(server: Serving, keyed: Serving) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    start = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    status, answer = raw(server, start, body)
    assert status == 415 and "content-type" in answer["error"]["message"]
    assert raw(server, start + "content-type: text/plain\r\n", body)[0] == 415
    assert raw(server, start + "content-type: application/json\r\n", body)[0] == 200
    assert raw(keyed, start + "authorization: Bearer ann\r\n", body)[0] == 200


@pytest.mark.slow
def test_priorities_are_bounded(server: Serving, keyed: Serving) -> None:
    def status(where: Serving, priority: int) -> int:
        body = {"prompt": "x", "max_tokens": 1, "priority": priority}
        return post(where, "/v1/completions", body, authorization="Bearer ann").status_code

    assert [status(server, p) for p in (-101, -100, 100, 101, 10**30)] == [400, 200, 200, 400, 400]
    assert [status(keyed, p) for p in (-1, 0, 100, 101)] == [400, 200, 200, 400]
