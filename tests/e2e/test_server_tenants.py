"""What one tenant wrote never reaches another: prefixes, suffix drafts, corpora."""

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import Serving, post, serving

PROMPT = (
    "class Walrus:\n    def dive(self, depth, *, breath=None):\n        return self.sea[depth]\n"
)
BODY: dict[str, Any] = {"prompt": PROMPT * 3, "max_tokens": 60, "temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module")
def suffix_server() -> Iterator[Serving]:
    config = EngineConfig.from_kwargs(
        model="demo",
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        adaptive_speculation=False,
        speculative_config={
            "method": "suffix",
            "num_speculative_tokens": 8,
            "suffix_decoding_max_cached_requests": 100,
        },
    )
    settings = ServerConfig(
        api_keys=("ann", "bob"), admin_key="boss", per_request_metrics="summary"
    )
    with serving(build_engine(config), settings) as running:
        yield running


class Work(NamedTuple):
    """What a request took, which is what a clock could tell of it."""

    accepted: int
    cached: int
    steps: float
    drafted: float


def counted(server: Serving) -> tuple[float, float]:
    """Steps and draft tokens of the engine so far."""
    server.wait_idle()
    names = ("foretoken:engine_steps_total", "vllm:spec_decode_num_draft_tokens_total")
    page = httpx.get(server.url + "/metrics").text
    steps, drafted = (float(re.findall(name + r"\{.*\} (\S+)", page)[0]) for name in names)
    return steps, drafted


def plain_ask(server: Serving, key: str, salt: str | None = None) -> Work:
    """The work of always the same request, hot and seeded, which has next to nothing to draft from
    in its own text."""
    body = {**BODY, "cache_salt": salt}
    steps, drafted = counted(server)
    answer = post(server, "/v1/completions", body, authorization=f"Bearer {key}")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    accepted = found["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    now = counted(server)
    return Work(accepted, cached, now[0] - steps, now[1] - drafted)


@pytest.mark.slow
def test_suffix_drafts_and_prefixes_stay_with_their_key(suffix_server: Serving) -> None:
    first, again = plain_ask(suffix_server, "ann"), plain_ask(suffix_server, "ann")
    assert first.cached == 0 < again.cached
    assert again.accepted > first.accepted + 20  # drafted from the first output from its start on
    assert again.steps < first.steps - 10
    # To the others it is as if it had never been: not a step and not a draft less.
    assert plain_ask(suffix_server, "bob") == first
    assert plain_ask(suffix_server, "ann", "other") == first


def put(server: Serving, name: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": "Bearer boss"}
    return httpx.put(f"{server.url}/admin/corpora/{name}", json=body, headers=headers)


@pytest.mark.slow
def test_corpora_come_and_go(suffix_server: Serving) -> None:
    headers = {"authorization": "Bearer boss"}
    url = suffix_server.url + "/admin/corpora"
    before = plain_ask(suffix_server, "bob", "fresh")
    written = post(suffix_server, "/v1/completions", BODY, authorization="Bearer ann").json()
    text = (PROMPT + written["choices"][0]["text"]) * 80
    assert put(suffix_server, "zoo", {"text": text}).status_code == 400  # for whom?
    made = put(suffix_server, "zoo", {"text": text, "api_key": "bob", "cache_salt": "new"})
    assert made.status_code == 200 and made.json()["tokens"] > 4096
    assert httpx.get(url, headers=headers).json() == {"corpora": {"zoo": made.json()["tokens"]}}
    assert plain_ask(suffix_server, "bob", "new").accepted > before.accepted + 20
    assert plain_ask(suffix_server, "ann", "new") == before
    assert httpx.delete(url + "/zoo", headers=headers).status_code == 200
    assert httpx.delete(url + "/zoo", headers=headers).status_code == 404
    assert httpx.get(url, headers=headers).json() == {"corpora": {}}


@contextmanager
def indexing_paused(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first text that is indexed waits after its first part: an event that says that it does,
    and one that lets it go on."""
    engine = server.state.engine
    call, calls = engine.call, 0
    waiting, go_on = threading.Event(), threading.Event()

    async def paused(function: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            waiting.set()
            assert await asyncio.to_thread(go_on.wait, 60)
        return await call(function)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "call", paused)
        try:
            yield waiting, go_on
        finally:
            go_on.set()


LATE = "    def surface(self, height):\n        return self.sky[height]\n"


@pytest.mark.parametrize("meanwhile", ["replaced", "removed", "removed and put again"])
def test_a_text_that_is_replaced_while_it_is_indexed_ends(
    suffix_server: Serving, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """One key's text never continues in another's of the same name."""
    headers = {"authorization": "Bearer boss"}
    url = suffix_server.url + "/admin/corpora"
    long = PROMPT * 200 + LATE * 200
    with (
        indexing_paused(suffix_server, monkeypatch) as (waiting, go_on),
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(put, suffix_server, "zoo", {"text": long, "api_key": "ann"})
        assert waiting.wait(60)
        if meanwhile != "replaced":
            assert httpx.delete(url + "/zoo", headers=headers).status_code == 200
        expected = {}
        if meanwhile != "removed":
            made = put(suffix_server, "zoo", {"text": PROMPT, "api_key": "bob"})
            assert made.status_code == 200, made.text
            expected = {"zoo": made.json()["tokens"]}
        go_on.set()
        ended = first.result(60)
    assert ended.status_code == 409, ended.text
    assert "'zoo' was replaced or removed" in ended.json()["error"]["message"]
    assert httpx.get(url, headers=headers).json() == {"corpora": expected}
    httpx.delete(url + "/zoo", headers=headers)
