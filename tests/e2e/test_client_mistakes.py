"""What a client got wrong is a 400 that says why, at the server; offline an exception or an error
of that request. Never a 500, a raw exception, or an end of the process."""

import json
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ParameterError, PromptError, RequestError
from tests.e2e.serving import Serving, post

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
    assert caught.value.field == field


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
