"""`--audit-share`: finished requests are decoded again when idle, and wrong drafts end drafting."""

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import ConfigError
from foretoken.server import auditor as auditing
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import Serving, post, serving

PAIR = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 5}
ADMIN = {"authorization": "Bearer boss"}
BODY: dict[str, Any] = {"prompt": "import os\n", "max_tokens": 30, "temperature": 0}


def config(**speculative: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(
        model="demo", max_num_seqs=4, kv_cache_memory_bytes=64 << 20, adaptive_speculation=False,
        batch_invariant=True, speculative_config={**PAIR, **speculative},
    )  # fmt: skip


SETTINGS = ServerConfig(admin_key="boss", audit_share=1.0)


@pytest.fixture(scope="module")
def audited() -> Iterator[Serving]:
    with serving(build_engine(config()), SETTINGS) as running:
        yield running


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """A server that keeps drafts whatever they are, and has not been told."""
    monkeypatch.setattr(auditing, "NOT_LOSSLESS", ())
    wrong = config(rejection_sample_method="synthetic", synthetic_acceptance_length=3.0)
    with serving(build_engine(wrong), SETTINGS) as running:
        yield running


def found(server: Serving) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(server.url + "/admin/speculation", headers=ADMIN).json()
    audit: dict[str, Any] = answer["audit"]
    return audit


def wait(server: Serving, outcome: str, count: int) -> dict[str, Any]:
    until = time.monotonic() + 60
    while (said := found(server))["compared"].get(outcome, 0) < count:
        assert time.monotonic() < until, said
        time.sleep(0.05)
    return said


@pytest.mark.slow
def test_right_answers_are_found_right(audited: Serving) -> None:
    before = found(audited)["compared"]
    for body in (
        BODY,
        {**BODY, "temperature": 1, "seed": 7},
        {**BODY, "stop": ["\n\n"], "logprobs": 3},
        {**BODY, "temperature": 1, "seed": 3, "n": 2, "frequency_penalty": 0.5},
    ):
        assert post(audited, "/v1/completions", body).status_code == 200
    said = wait(audited, "same", before.get("same", 0) + 5)
    assert said["alarms"] == 0 and said["waiting"] == 0
    assert set(said["compared"]) <= {"same", "drawn", "interrupted"}
    page = httpx.get(audited.url + "/metrics").text
    counted = re.search(r'foretoken:audit_requests_total\{.*outcome="same"\} (\d+)', page)
    assert counted is not None and int(counted[1]) >= 5
    assert "foretoken:audit_alarms_total" in page
    audited.wait_idle()


@pytest.mark.slow
def test_drawn_tokens_are_compared_with_plain_draws(audited: Serving) -> None:
    before = found(audited)
    for _ in range(2):
        post(audited, "/v1/completions", {**BODY, "temperature": 1})
    said = wait(audited, "drawn", before["compared"].get("drawn", 0) + 2)
    assert said["drawn_tokens"] > before["drawn_tokens"]
    assert said["alarms"] == 0 and said["evidence"] < 100
    looks_back = {"presence_penalty": 0.5, "min_tokens": 9, "bad_words": ["self"]}
    post(audited, "/v1/completions", {**BODY, "temperature": 1, **looks_back})
    said = wait(audited, "drawn", before["compared"].get("drawn", 0) + 3)
    assert said["alarms"] == 0 and "failed" not in said["compared"]


@pytest.mark.slow
def test_a_request_ends_the_audit_that_runs(audited: Serving) -> None:
    interrupted = found(audited)["compared"].get("interrupted", 0)
    same = found(audited)["compared"].get("same", 0)
    post(audited, "/v1/completions", {**BODY, "max_tokens": 900, "ignore_eos": True})
    auditor = audited.state.auditor
    assert auditor is not None
    until = time.monotonic() + 30
    while auditor._stream is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert post(audited, "/v1/completions", {**BODY, "max_tokens": 2}).status_code == 200
    said = wait(audited, "same", same + 1)
    assert said["compared"]["interrupted"] == interrupted + 1
    assert said["alarms"] == 0
    audited.wait_idle()


def speculates(server: Serving) -> bool:
    enabled: bool = httpx.get(server.url + "/admin/speculation", headers=ADMIN).json()["enabled"]
    return enabled


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_wrong_drafts_end_drafting(
    broken: Serving, temperature: int, caplog: pytest.LogCaptureFixture
) -> None:
    until = time.monotonic() + 120
    while found(broken)["alarms"] == 0:
        assert time.monotonic() < until, found(broken)
        post(broken, "/v1/completions", {**BODY, "temperature": temperature, "max_tokens": 100})
        broken.wait_idle()
        while found(broken)["waiting"] and found(broken)["alarms"] == 0:
            assert time.monotonic() < until, found(broken)
            time.sleep(0.1)  # another request would end the audit that runs
    assert not speculates(broken)
    assert "speculation is turned off" in caplog.text
    assert found(broken)["last_alarm"]
    httpx.put(broken.url + "/admin/speculation", json={}, headers=ADMIN)
    assert speculates(broken), "an operator may turn it on again"


def test_a_lossy_rule_is_refused() -> None:
    engine = build_engine(config(rejection_sample_method="typical"))
    with pytest.raises(ConfigError, match="audit-share.*which changes the output"):
        with serving(engine, SETTINGS):
            pass
