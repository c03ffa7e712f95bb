"""What the Gateway API Inference Extension asks of a model server, on a running one.

Its endpoint picker scrapes these names where nothing else is configured (proposal 003, model server
protocol; the optional ones as llm-d's picker reads them), and sends no request to a server that is
not ready. docs/serving.md has the same table.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import Serving, post

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
