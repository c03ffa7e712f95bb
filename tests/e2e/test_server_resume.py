"""A stream goes on at another server exactly where it broke off, chunk by chunk.

What a router in between has seen is cut after every whole token; the rest of the stream then comes
from a server with other drafts. The guarded bugs are a role, an echo or a prompt that is sent
again, a tool call that starts anew, text offsets and usage that forget what was written.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import Serving, post, serving
from tests.marks import slow_but

KEY = {"x-foretoken-internal-key": "inside"}
DRAFT = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 5}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 4}, "far": {"type": "boolean"}},
            "required": ["at", "far"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Where is it?"}],
    "temperature": 0,
    "max_tokens": 100,
}
TEXT: dict[str, Any] = {"prompt": "def parse(text):\n    return ", "max_tokens": 14}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {**TEXT, "temperature": 0},
    "echo": {**TEXT, "temperature": 0, "echo": True, "logprobs": 2},
    "several": {**TEXT, "seed": 5, "temperature": 1.2, "n": 2, "logprobs": 0},
    "prompts": {**TEXT, "prompt": ["a = ", "import "], "seed": 6, "n": 2, "prompt_logprobs": 1},
    "stop": {**TEXT, "temperature": 0, "stop": ["never", "(t", "t)", "xt"], "max_tokens": 40},
}
CHATS: dict[str, dict[str, Any]] = {
    "content": {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 14},
    "several": {**CHAT, "seed": 2, "temperature": 1.3, "n": 2, "max_tokens": 14},
    "calls": {**CHAT, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {**CHAT, "tools": [TOOL], "tool_choice": NAMED},
}  # fmt: skip
ASKED = [
    *(("/v1/completions", body) for body in COMPLETIONS.values()),
    *(("/v1/chat/completions", body) for body in CHATS.values()),
]
NAMES = [*COMPLETIONS, *(f"chat {name}" for name in CHATS)]
Chunk = dict[str, Any]


def server_of(speculation: dict[str, Any] | None, settings: ServerConfig) -> Any:
    config = EngineConfig.from_kwargs(
        model="demo",
        max_num_seqs=8,
        kv_cache_memory_bytes=32 << 20,
        adaptive_speculation=False,
        speculative_config=speculation,
    )
    return serving(build_engine(config), settings)


@pytest.fixture(scope="module")
def first() -> Iterator[Serving]:
    with server_of(None, ServerConfig()) as running:
        yield running


@pytest.fixture(scope="module")
def second() -> Iterator[Serving]:
    with server_of(DRAFT, ServerConfig(internal_key="inside")) as running:
        yield running


def stream(server: Serving, path: str, body: dict[str, Any], **headers: str) -> list[Chunk]:
    options = {"include_usage": True, "continuous_usage_stats": body.get("n", 1) == 1}
    asked = {**body, "stream": True, "return_token_ids": True, "stream_options": options}
    answer = post(server, path, asked, **headers)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    for chunk in chunks:
        assert "error" not in chunk, chunk
        del chunk["id"], chunk["created"]
        if chunk.get("usage") is not None:
            del chunk["usage"]["prompt_tokens_details"]
        for choice in chunk["choices"]:
            for call in choice.get("delta", {}).get("tool_calls") or ():
                call.pop("id", None)
    return chunks


def places(chunks: list[Chunk], count: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Where a router can cut: after how many chunks, and what it then knows of each choice."""
    known: list[dict[str, Any]] = [{"output_ids": [], "ended": False} for _ in range(count)]
    yield 0, json.loads(json.dumps(known))
    for number, chunk in enumerate(chunks, start=1):
        for choice in chunk["choices"]:
            own = known[choice["index"]]
            own["output_ids"] += choice.get("token_ids") or []
            own["ended"] = own["ended"] or choice["finish_reason"] is not None
            whole = "token_ids" in choice
            if whole and not all(one["ended"] for one in known):
                yield number, json.loads(json.dumps(known))


def by_choice(chunks: list[Chunk]) -> list[list[Chunk]]:
    found: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        index = chunk["choices"][0]["index"] if chunk["choices"] else -1
        found.setdefault(index, []).append(chunk)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("name", slow_but(NAMES, NAMES[0], NAMES[-1]))
def test_every_token(name: str, first: Serving, second: Serving) -> None:
    path, body = ASKED[NAMES.index(name)]
    whole = stream(first, path, body)
    prompts = body.get("prompt")
    count = body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
    made = list(places(whole, count))

    def go_on(known: list[dict[str, Any]]) -> list[Chunk]:
        return stream(second, path, {**body, "resume": known}, **KEY)

    with ThreadPoolExecutor(8) as pool:
        rests = list(pool.map(go_on, [known for _, known in made]))
    assert len(rests) >= 10 or body.get("stop")
    for (number, known), rest in zip(made, rests, strict=True):
        assert by_choice(rest) == by_choice(whole[number:]), known
    second.wait_idle()


def test_calls_and_stops_were_cut(first: Serving) -> None:
    """What the cases above are for does happen in them."""
    [*_, end, _] = stream(first, "/v1/completions", COMPLETIONS["stop"])
    assert end["choices"][0]["stop_reason"] in COMPLETIONS["stop"]["stop"]
    chunks = stream(first, "/v1/chat/completions", CHATS["calls"])
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


RESUME: dict[str, Any] = {**TEXT, "stream": True, "resume": [{"output_ids": [5]}]}


def refused(server: Serving, body: dict[str, Any], **headers: str) -> tuple[int, str, str]:
    answer = post(server, "/v1/completions", body, **headers)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_only_who_has_the_key_may(first: Serving, second: Serving) -> None:
    status, param, message = refused(first, RESUME, **KEY)
    assert (status, param) == (400, "resume") and "--internal-key" in message
    for headers in ({}, {"x-foretoken-internal-key": "outside"}):
        status, param, message = refused(second, RESUME, **headers)
        assert (status, param) == (403, "resume") and "x-foretoken-internal-key" in message


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"stream": False}, "resume", "stream: true"),
        ({"n": 2}, "resume", "one entry per choice: 2"),
        ({"prompt": ["a", "b"]}, "resume", "one entry per choice: 2"),
        ({"resume": []}, "resume", "one entry per choice: 1"),
        ({"resume": [{"ids": [5]}]}, "resume.0.ids", "not a field of resume.0"),
        ({"resume": [{"output_ids": [5], "ended": True}]}, "resume.ended", "goes on"),
        ({"resume": [{"output_ids": [-1]}]}, "resume.output_ids", "-1"),
        ({"resume": [{"output_ids": [10**6]}]}, "resume.output_ids", "1000000"),
        ({"resume": [{"output_ids": [5] * 14}]}, "resume.output_ids", "number 14: length"),
        ({"stop_token_ids": [5]}, "resume.output_ids", "number 1: stop at 5"),
        ({"structured_outputs": {"regex": "[0-9]{9}"}}, "resume.output_ids", "as number 1"),
    ],
)
def test_what_cannot_go_on_is_refused(
    changes: dict[str, Any], param: str, said: str, second: Serving
) -> None:
    status, field, message = refused(second, {**RESUME, **changes}, **KEY)
    assert (status, field) == (400, param), message
    assert said in message
    second.wait_idle()


def test_what_is_resumed_is_counted(second: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, and as one prompt with one output, where the other had ended."""

    def prompts() -> float:
        page = httpx.get(second.url + "/metrics").text
        name = r"vllm:request_max_num_generation_tokens_count\{.*\} (\S+)"
        return float(re.findall(name, page)[0])

    second.wait_idle()
    before = prompts()
    resume = [{"output_ids": [5, 6], "ended": True}, {"output_ids": [5]}]
    with caplog.at_level("INFO", logger="foretoken"):
        answer = post(second, "/v1/completions", {**RESUME, "n": 2, "resume": resume}, **KEY)
        second.wait_idle()
    assert answer.status_code == 200
    [accepted] = [r for r in caplog.records if r.getMessage() == "accepted"]
    facts = accepted.__dict__["facts"]
    assert (facts["choices"], facts["resumed_tokens"]) == (1, 1)
    assert prompts() == before + 1
