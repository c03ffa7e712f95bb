"""What new clients send, and what must not be answered: fields without effect, names of foreign
hosts, bodies that a page of another site could post, endpoints that are not built."""

import gzip
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.access import is_own
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import Serving, post, serving

CHAT: dict[str, Any] = {
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
    expected = post(server, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]
    with caplog.at_level(logging.INFO, "foretoken"):
        answer = post(server, "/v1/chat/completions", {**CHAT, **NEW})
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
    body = {"messages": CHAT["messages"]}
    usual = post(server, "/tokenize", body).json()
    changed = {"chat_template_kwargs": {"bos_token": "</s>"}}
    assert post(server, "/tokenize", body | changed).json()["tokens"][0] != usual["tokens"][0]
    chat = post(server, "/v1/chat/completions", {**CHAT, **changed, "return_token_ids": True})
    ids = chat.json()["choices"][0]["prompt_token_ids"]
    assert ids == post(server, "/tokenize", body | changed).json()["tokens"]
    wrong: dict[str, Any] = {"chat_template_kwargs": {"messages": []}}
    answer = post(server, "/v1/chat/completions", {**CHAT, **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_a_schema_beside_json_object(server: Serving) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"response_format": {"type": "json_object", "schema": schema}}
    answer = post(server, "/v1/chat/completions", {**CHAT, **form, "max_tokens": 20})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"n": 3}
    wrong = {"response_format": {"type": "text", "schema": schema}}
    assert post(server, "/v1/chat/completions", {**CHAT, **wrong}).status_code == 400


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


FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io",
           "foretoken.local", "LOCALHOST.EVIL.example.", "[::1].evil.example",
           "localhost@evil.example", "evil%2eexample")  # fmt: skip
OWN = ("localhost", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.7",
       "app.localhost:80", "foretoken:8000", "localhost.", "")  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_hosts_are_refused_without_a_key(
    server: Serving, keyed: Serving, host: str
) -> None:
    for path in ("/v1/models", "/", "/openapi.json"):
        status, answer = raw(server, f"GET {path} HTTP/1.1\r\nhost: {host}\r\n")
        assert status == 403 and "host" in answer["error"]["message"], (path, answer)
    assert raw(server, f"GET /health HTTP/1.1\r\nhost: {host}\r\n")[0] == 200
    key = "authorization: Bearer ann\r\n"
    assert raw(keyed, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n{key}")[0] == 200


@pytest.mark.parametrize("host", OWN)
def test_own_hosts_are_answered(server: Serving, host: str) -> None:
    assert raw(server, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n")[0] == 200


def test_allowed_hosts() -> None:
    assert is_own("llm.example:443", ["LLM.example"])
    assert is_own("a.b.example", ["*.example"]) and not is_own("example.org", ["*.example"])
    assert not is_own("xllm.example", ["llm.example"]) and is_own("any.where", ["*"])


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
