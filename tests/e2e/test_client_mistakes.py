"""What a client got wrong is a 400 that says why, at the server; offline an exception or an error
of that request. Never a 500, a raw exception, or an end of the process."""

import json
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ParameterError
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
