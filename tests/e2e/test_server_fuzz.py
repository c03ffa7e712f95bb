"""Whatever a client sends, no answer is a 500: bodies made from the OpenAPI schema, and hostile
ones made by hand."""

import functools
import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from foretoken.server.endpoints.status import openapi_document
from tests.e2e.serving import Serving
from tests.marks import slow

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
MOST_TOKENS = 8


@functools.cache
def schema() -> Any:
    return schemathesis.openapi.from_dict(openapi_document())


def check(server: Serving, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + path, content=content, headers=headers, timeout=60)
    assert answer.status_code < 500, (path, content[:2000], answer.text[:500])
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["request_id"], answer.text
    elif "event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"internal_server_error"' not in answer.text, (path, content[:2000])
    else:
        answer.json()


def bounded(body: Any) -> Any:
    """Bodies that would be right may ask for thousands of tokens; a few will do here."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens"):
            value = body.get(name)
            if isinstance(value, int) and value > MOST_TOKENS:
                body[name] = MOST_TOKENS
        if body.get("max_tokens", 0) is None or "messages" in body:
            body["max_tokens"] = body["max_completion_tokens"] = MOST_TOKENS
    return body


def fuzz(server: Serving, path: str, count: int) -> None:
    operation = schema()[path]["POST"]
    cases = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases)
    def run(case: Any) -> None:
        content = json.dumps(bounded(case.body), default=str).encode()
        check(server, path, content)

    run()


@pytest.mark.parametrize("count", [5, slow(400)])
@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_the_schema(server: Serving, path: str, count: int) -> None:
    fuzz(server, path, count)
    server.wait_idle()


HUGE = "1" + "0" * 4000
NUMBERS = (HUGE, "-" + HUGE, "1e999", "-1e999", "NaN", "Infinity", "1e-999", str(2**63), "0.1e400")
FIELDS = ("temperature", "n", "seed", "top_k", "logprobs", "priority", "min_p",
          "prompt_logprobs", "repetition_penalty", "stop_token_ids", "logit_bias")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_numbers_beyond_measure(server: Serving, field: str) -> None:
    shape = {"stop_token_ids": "[%s]", "logit_bias": '{"3": %s}'}.get(field, "%s")
    for number in NUMBERS:
        body = f'{{"prompt": "x", "max_tokens": 2, "{field}": {shape % number}}}'
        check(server, "/v1/completions", body.encode())


HOSTILE = (
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"pro\xc3mpt": "x"}',
    b"\xef\xbb\xbf{}",
    b"{\x00}",
    b'{"prompt": "\\u0000\\ud800\\udfff", "max_tokens": 1, "stop": ["\\udc00"]}',
    b'{"prompt": "x", "max_tokens": 1, "bad_words": ["\\ud800"]}',
    b'{"prompt": "x", "max_tokens": 1, "user": "\\ud800", "cache_salt": "\\udc00"}',
    b'{"prompt": "x", "max_tokens": 1, "prediction": {"type": "content", "content": "\\ud800"}}',
    b'{"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "\\ud800"}}',
    b'{"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": ["\\ud800"]}}',
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": "x", "user": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    b'{"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": '
    + b'{"anyOf":[' * 90 + b"{}" + b"]}" * 90 + b"}}",
    b'{"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "' + b"(" * 5000
    + b")" * 5000 + b'"}}',
    b'{"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "((a{9}){9}){9}{999}"}}',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: repr(content[:40]))
def test_hostile_bodies(server: Serving, content: bytes) -> None:
    check(server, "/v1/completions", content)
    check(server, "/v1/chat/completions", content.replace(b'"prompt": "x"', CHAT))


CHAT = b'"messages": [{"role": "user", "content": "\\ud800"}]'
