"""Spans on their way to a collector. The guarded bugs: a request that failed looks like one that
did not, spans that wait are lost when the server ends."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from foretoken.server.observing.tracing import RequestSpans, exported_to
from foretoken.types import FinishReason, Output, Request, SamplingParams

REQUEST = Request(
    request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(), seed=0, max_tokens=9
)
END = Output(request_id="r", new_token_ids=(5,), finish_reason=FinishReason.STOP)


class Collector(HTTPServer):
    received: list[tuple[str, bytes]]


class _Keep(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector(("127.0.0.1", 0), _Keep) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_spans_reach_the_collector_at_the_latest_when_the_server_ends(collector: Collector) -> None:
    spans = exported_to(f"http://127.0.0.1:{collector.server_port}/v1/traces", "tiny")
    spans.opened([REQUEST], "asked-as")
    spans.observe([END])
    spans.close()
    [(path, body)] = collector.received
    assert path == "/v1/traces"
    assert all(word in body for word in (b"llm_request", b"foretoken", b"tiny", b"asked-as"))


def test_failures_are_marked_and_strangers_are_none_of_its_business() -> None:
    exported, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    spans = RequestSpans(provider, "tiny")
    spans.observe([END])
    for reason in (FinishReason.ERROR, FinishReason.STOP):
        spans.opened([REQUEST], "asked-as")
        spans.observe([Output(request_id="r", new_token_ids=(5, 6))])
        spans.observe([Output(request_id="r", finish_reason=reason)])
    spans.observe([END])
    failed, fine = exported.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert fine.status.status_code is StatusCode.UNSET
    assert (fine.attributes or {})["gen_ai.usage.completion_tokens"] == 2
