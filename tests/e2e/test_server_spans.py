"""OpenTelemetry spans: in the caller's trace, with the times of the stages."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.observing.tracing import RequestSpans
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import Serving, post, serving

TRACE = "0af7651916cd43dd8448eb211c80319c"
BODY = {"prompt": [5, 6, 7, 5, 6, 7, 5, 6], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(model: Path, exported: InMemorySpanExporter) -> Iterator[Serving]:
    config = EngineConfig.from_kwargs(
        model=str(model),
        kv_cache_memory_bytes=4 << 20,
        speculative_config={"method": "ngram"},
        adaptive_speculation=False,
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    spans = RequestSpans(provider, "tiny")
    settings = ServerConfig(served_model_names=("tiny",))
    with serving(build_engine(config), settings, spans) as running:
        yield running


def spans_of(
    server: Serving, exported: InMemorySpanExporter, body: object, **headers: str
) -> tuple[ReadableSpan, ...]:
    exported.clear()
    assert post(server, "/v1/completions", body, **headers).status_code == 200
    server.wait_idle()
    return exported.get_finished_spans()


def test_a_span_tells_where_the_time_went(server: Serving, exported: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
    [span] = spans_of(server, exported, BODY, **headers)
    facts = dict(span.attributes or {})
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert facts["foretoken.request_id"] == "mine"
    assert facts["gen_ai.usage.prompt_tokens"] == 8
    assert facts["gen_ai.usage.completion_tokens"] == 12
    assert facts["gen_ai.response.finish_reason"] == "length"
    stages = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    times = [facts[f"gen_ai.latency.{name}"] for name in stages]
    assert all(isinstance(time, float) and time >= 0 for time in times)
    assert sum(map(float, times)) == pytest.approx(float(facts["gen_ai.latency.e2e"]))  # type: ignore[arg-type]
    assert span.start_time is not None and span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 >= times[-1]  # type: ignore[operator]
    assert facts["foretoken.num_draft_tokens"] >= facts["foretoken.num_accepted_draft_tokens"]  # type: ignore[operator]


def test_every_choice_has_one_and_a_client_that_left_too(
    server: Serving, exported: InMemorySpanExporter
) -> None:
    assert len(spans_of(server, exported, {**BODY, "n": 3})) == 3
    assert spans_of(server, exported, BODY, traceparent="nonsense")[0].parent is None
    exported.clear()
    body = {**BODY, "max_tokens": 100, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        assert next(answer.iter_lines()).startswith("data: {")
    server.wait_idle()
    [span] = exported.get_finished_spans()
    assert (span.attributes or {})["gen_ai.response.finish_reason"] in ("abort", "length")
