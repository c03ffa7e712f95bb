"""A server whose model came with a bad chat template, and histories of all shapes. The guarded
bugs: a render that outlives its client or holds up other chats, a 500, a changed history."""

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.checkpoint import packaged_model
from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import PromptError
from foretoken.text import renderers as rendering
from tests.e2e.serving import Serving, post, serving

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% set said = messages[0].content %}{% if said == 'endless' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% elif said == 'large' %}"
    "{{ 'a' * 30000000000 }}{% elif said == 'no' %}{{ raise_exception('not that') }}"
    "{% else %}{{ messages | tojson }}{% endif %}"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    source = packaged_model("demo")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {"model": "demo", "tokenizer": str(folder), "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def bad(settings: dict[str, Any]) -> Iterator[Serving]:
    with serving(build_engine(EngineConfig.from_kwargs(**settings))) as running:
        yield running


def asking(said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}], "max_tokens": 1}


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_the_reason_is_told(bad: Serving, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "most_seconds", lambda _: 0.1)
    reasons = {"endless": "of a processor", "large": "MiB of memory", "no": "not that"}
    for said, reason in reasons.items():
        answer = post(bad, path, {"messages": asking(said)["messages"]})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "messages" and reason in error["message"]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released by each render that begins; none ends because of its time."""
    begun = threading.Semaphore(0)
    ask = rendering._Process.ask

    def asked(*given: Any) -> Any:
        begun.release()
        return ask(*given)

    monkeypatch.setattr(rendering._Process, "ask", asked)
    monkeypatch.setattr(rendering, "most_seconds", lambda _: 1e6)
    monkeypatch.setattr(rendering, "_MOST_WAITED_S", 1e6)
    monkeypatch.setattr(rendering, "_PATIENCE_S", 0.001)
    return begun


def left_asking(url: str, said: str) -> socket.socket:
    """A client that has asked and does not read."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(asking(said))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client = socket.create_connection((host, int(port)))
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return client


@pytest.mark.slow
def test_seven_of_them_hang_nothing_and_end_with_their_clients(
    bad: Serving, begun: threading.Semaphore
) -> None:
    clients = [left_asking(bad.url, "endless") for _ in range(7)]
    for _ in clients:
        begun.acquire()
    assert post(bad, CHAT, asking("hello")).status_code == 200
    chat = bad.state.tokenizer._chat  # type: ignore[union-attr]
    assert chat is not None
    renderers = chat.renderers
    with renderers._changed:
        assert renderers._num_busy == 7
        for client in clients:
            client.close()
        assert renderers._changed.wait_for(lambda: renderers._num_busy == 0, timeout=60)


def test_a_render_does_not_keep_the_server(
    settings: dict[str, Any], begun: threading.Semaphore
) -> None:
    with serving(build_engine(EngineConfig.from_kwargs(**settings))) as running:
        client = left_asking(running.url, "endless")
        begun.acquire()
    with client, client.makefile("rb") as answer:  # `serving` checks that the server has ended
        assert answer.readline().startswith(b"HTTP/1.1 503")


HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "be"},
                                      {"type": "text", "text": "kind"}]},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": None, "refusal": None, "function_call": None, "audio": None,
     "tool_calls": [{"id": "1", "type": "function",
                     "function": {"name": "f", "arguments": "{\"a\": {\"b\": null}}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12"}]},
]  # fmt: skip
READ: list[dict[str, Any]] = [
    {"role": "system", "content": "be\nkind"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": {"b": None}}}}
    ]},
    {"role": "tool", "tool_call_id": "1", "content": "12"},
]  # fmt: skip


def test_a_history_arrives_as_it_is_meant(bad: Serving) -> None:
    answer = post(bad, "/tokenize", {"messages": HISTORY})
    assert answer.status_code == 200, answer.text
    assert bad.state.tokenizer is not None
    assert json.loads(bad.state.tokenizer.decode(answer.json()["tokens"])) == READ
    answer = post(bad, CHAT, {"messages": HISTORY, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_offline_chats_are_read_and_bounded_alike(settings: dict[str, Any]) -> None:
    with LLM(**settings) as llm:
        [output] = llm.chat(HISTORY, SamplingParams(max_tokens=1), use_tqdm=False)
        ids = output.prompt_token_ids
        assert json.loads(llm.get_tokenizer().decode(ids)) == READ
        with pytest.raises(PromptError, match="MiB of memory"):
            llm.chat(asking("large")["messages"])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "messages.0.content.0.type"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]},
         "messages.0.tool_calls.0.function"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named(bad: Serving, message: dict[str, Any], named: str) -> None:
    answer = httpx.post(bad.url + CHAT, json={"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == named
