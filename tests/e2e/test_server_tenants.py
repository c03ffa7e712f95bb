"""What one tenant wrote never reaches another: prefixes, suffix drafts, corpora."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretoken.assembly import build_engine
from foretoken.config import EngineConfig
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


def plain_ask(server: Serving, key: str, salt: str | None = None) -> tuple[int, int]:
    """Accepted drafts and cached prompt tokens of always the same request, hot and seeded, which
    has next to nothing to draft from in its own text."""
    body = {**BODY, "cache_salt": salt}
    answer = post(server, "/v1/completions", body, authorization=f"Bearer {key}")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"], cached


def test_suffix_drafts_and_prefixes_stay_with_their_key(suffix_server: Serving) -> None:
    first, cached = plain_ask(suffix_server, "ann")
    again, cached_again = plain_ask(suffix_server, "ann")
    assert cached == 0 < cached_again
    assert again > first + 20  # the second output is drafted from the first from its start on
    assert plain_ask(suffix_server, "bob") == (first, 0)
    assert plain_ask(suffix_server, "ann", "other") == (first, 0)


def put(server: Serving, name: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": "Bearer boss"}
    return httpx.put(f"{server.url}/admin/corpora/{name}", json=body, headers=headers)


def test_corpora_come_and_go(suffix_server: Serving) -> None:
    headers = {"authorization": "Bearer boss"}
    url = suffix_server.url + "/admin/corpora"
    before = plain_ask(suffix_server, "bob", "fresh")[0]
    written = post(suffix_server, "/v1/completions", BODY, authorization="Bearer ann").json()
    text = (PROMPT + written["choices"][0]["text"]) * 80
    assert put(suffix_server, "zoo", {"text": text}).status_code == 400  # for whom?
    made = put(suffix_server, "zoo", {"text": text, "api_key": "bob", "cache_salt": "new"})
    assert made.status_code == 200 and made.json()["tokens"] > 4096
    assert httpx.get(url, headers=headers).json() == {"corpora": {"zoo": made.json()["tokens"]}}
    assert plain_ask(suffix_server, "bob", "new")[0] > before + 20
    assert plain_ask(suffix_server, "ann", "new")[0] == before
    assert httpx.delete(url + "/zoo", headers=headers).status_code == 200
    assert httpx.delete(url + "/zoo", headers=headers).status_code == 404
    assert httpx.get(url, headers=headers).json() == {"corpora": {}}
