"""The operator's endpoints: a key of their own, effects from the next step on."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import Serving, post

BODY = {"prompt": "import os\n", "max_tokens": 30, "temperature": 0}


def put(server: Serving, body: dict[str, Any], key: str = "boss") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.put(server.url + "/admin/speculation", json=body, headers=headers)


def longest_draft(server: Serving) -> tuple[str, int]:
    answer = post(server, "/v1/completions", BODY).json()
    drafted = answer["metrics"]["speculative_decoding"]["per_step_drafted"]
    return answer["choices"][0]["text"], max(drafted, default=0)


@pytest.mark.slow
def test_speculation_is_changed_live(server: Serving) -> None:
    text, most = longest_draft(server)
    assert most == 5
    try:
        for policy, expected in (
            ({"num_speculative_tokens": 2}, 2),
            ({"enabled": False}, 0),
            ({"drafter": "draft_model"}, 5),
        ):
            answer = put(server, policy)
            assert answer.status_code == 200, answer.text
            assert longest_draft(server) == (text, expected)
    finally:
        reset = put(server, {}).json()
    assert reset["drafters"] == {"draft_model": 5}
    assert reset["last_minute"]["acceptance_length"] > 1
    assert longest_draft(server) == (text, 5)


@pytest.mark.slow
def test_what_control_does_is_said(server: Serving) -> None:
    metrics = post(server, "/v1/completions", BODY).json()["metrics"]
    assert re.match(r"draft_model served \d+ of \d+ steps with [\d.]+ drafts each", metrics["why"])
    headers = {"authorization": "Bearer boss"}
    found = httpx.get(server.url + "/admin/speculation", headers=headers).json()["control"]
    assert found["mode"] == "fixed" and found["step"]["measured_s"] > 0
    drafter = found["drafters"]["draft_model"]
    assert drafter["why"] == "drafts up to 5 in every step, as configured"
    assert drafter["draft_tokens"] > drafter["accepted_tokens"] > 0
    shown = httpx.get(server.url + "/control").json()
    assert shown["drafters"].keys() == found["drafters"].keys()
    for policy, because in (
        ({"speculation": {"enabled": False}}, "no step drafted: the request asked for none"),
        ({}, "no step drafted: the operator turned drafts off"),
    ):
        try:
            assert put(server, {} if policy else {"enabled": False}).status_code == 200
            answer = post(server, "/v1/completions", {**BODY, **policy}).json()
        finally:
            put(server, {})
        assert answer["metrics"]["why"] == because


def test_what_is_wrong_changes_nothing(server: Serving) -> None:
    for body in ({"drafter": "oracle"}, {"num_speculative_tokens": 99}, {"on": True}):
        assert put(server, body).status_code == 400, body
    headers = {"authorization": "Bearer boss"}
    now = httpx.get(server.url + "/admin/speculation", headers=headers).json()
    assert (now["enabled"], now["drafter"], now["num_speculative_tokens"]) == (True, None, None)


def test_it_has_a_key_of_its_own(server: Serving) -> None:
    assert put(server, {}, "wrong").status_code == 401
    assert httpx.get(server.url + "/admin/speculation").status_code == 401


GAUGES = {
    "TotalQueuedRequests": "vllm:num_requests_waiting",
    "TotalRunningRequests": "vllm:num_requests_running",
    "KVCacheUtilization": "vllm:kv_cache_usage_perc",
}
"""What the protocol calls a gauge, and its name here, which is vLLM's."""
PAGES = ("vllm:cache_config_info", {"BlockSize": "block_size", "NumGPUBlocks": "num_gpu_blocks"})
"""The gauge whose labels say how KV pages are cut, and what the protocol calls them."""


def scraped(server: Serving) -> dict[str, Metric]:
    answer = httpx.get(server.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {one.name: one for one in text_string_to_metric_families(answer.text)}


@pytest.fixture
def page(server: Serving) -> Iterator[dict[str, Metric]]:
    post(server, "/v1/completions", {"prompt": "x", "max_tokens": 4, "temperature": 0})
    server.wait_idle()
    yield scraped(server)


@pytest.mark.parametrize("asked", GAUGES)
def test_what_a_picker_scores_by_is_one_gauge(page: dict[str, Metric], asked: str) -> None:
    found = page[GAUGES[asked]]
    assert found.type == "gauge"
    [sample] = found.samples
    assert sample.labels.keys() >= {"model_name"}
    assert sample.value == 0.0, "the server is idle"


def test_labels_say_how_prompts_are_cut_into_pages(
    page: dict[str, Metric], server: Serving
) -> None:
    name, labels = PAGES
    [sample] = page[name].samples
    config = server.state.engine.engine.parts.config
    assert int(sample.labels[labels["BlockSize"]]) == config.page_size
    assert int(sample.labels[labels["NumGPUBlocks"]]) == config.num_pages


def test_a_busy_server_says_so_between_zero_and_one(server: Serving) -> None:
    body: dict[str, object] = {"prompt": "x = ", "max_tokens": 1500, "n": 8, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # which closes the stream when nobody has it any more
        assert next(lines).startswith("data: {"), answer.status_code
        busy = scraped(server)
    [running] = busy[GAUGES["TotalRunningRequests"]].samples
    [used] = busy[GAUGES["KVCacheUtilization"]].samples
    assert 1 <= running.value <= 8 and 0.0 < used.value <= 1.0
    server.wait_idle()


def test_probes_and_metrics_are_answered_under_any_name(server: Serving) -> None:
    paths = ("/health", "/health/ready", "/health/live", "/metrics")
    for path in paths:
        foreign = httpx.get(server.url + path, headers={"host": "10.4.3.2.nip.example"})
        assert foreign.status_code == 200, path


def test_the_document_has_the_same_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    text = page.split("### Behind a gateway")[1].split("\n### ")[0]
    rows = dict(re.findall(r"^\| (\w+) \| `([\w:]+)`", text, re.MULTILINE))
    assert rows == {**GAUGES, **dict.fromkeys(PAGES[1], PAGES[0])}
