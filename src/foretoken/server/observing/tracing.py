"""OpenTelemetry spans: one per request of the engine, made when it ends, with vLLM's names.

Needs the extra `foretoken[otel]`, and is imported only where spans are wanted. Knows no endpoint.
Invariant: a request that was opened is remembered until its last output.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import foretoken
from foretoken.types import FinishReason, Output, Request, RequestMetrics

Attributes = dict[str, str | int | float]


@dataclass(slots=True)
class _Open:
    """A request that runs."""

    request: Request
    began_ns: int
    parent: Context
    asked_as: str
    num_tokens: int = 0


class RequestSpans:
    """Makes spans of what the engine's outputs tell."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("foretoken", foretoken.__version__)
        self._model_name = model_name
        self._open: dict[str, _Open] = {}

    def opened(
        self, requests: Sequence[Request], asked_as: str, traceparent: str | None = None
    ) -> None:
        """Requests that were accepted under the request id `asked_as`, in the caller's trace."""
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        parent = TraceContextTextMapPropagator().extract(carrier)
        now = time.time_ns()
        for request in requests:
            self._open[request.request_id] = _Open(request, now, parent, asked_as)

    def observe(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            found = self._open.get(output.request_id)
            if found is None:
                continue
            found.num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                del self._open[output.request_id]
                self._end(found, output)

    def close(self) -> None:
        self._provider.shutdown()

    def _end(self, ended: _Open, output: Output) -> None:
        params = ended.request.params
        attributes: Attributes = {
            "gen_ai.request.id": output.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": ended.request.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.prompt_tokens": len(ended.request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": ended.num_tokens,
            "gen_ai.response.finish_reason": str(output.finish_reason),
            "foretoken.request_id": ended.asked_as,
        }
        if output.metrics is not None:
            attributes |= _times(output.metrics)
        span = self._tracer.start_span(
            "llm_request", ended.parent, SpanKind.SERVER, attributes, start_time=ended.began_ns
        )
        if output.finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def _times(metrics: RequestMetrics) -> Attributes:
    """Seconds of each stage, and what speculation did."""
    found: Attributes = {
        "gen_ai.latency.time_in_queue": metrics.queued_s,
        "gen_ai.latency.time_to_first_token": metrics.first_token_s,
        "gen_ai.latency.time_in_model_prefill": metrics.first_token_s - metrics.queued_s,
        "gen_ai.latency.time_in_model_decode": metrics.finished_s - metrics.first_token_s,
        "gen_ai.latency.e2e": metrics.finished_s,
        "foretoken.num_cached_tokens": metrics.num_cached_tokens,
        "foretoken.num_preemptions": metrics.num_preemptions,
    }
    if metrics.accepted_per_step:
        found["foretoken.acceptance_length"] = metrics.acceptance_length
        found["foretoken.num_draft_tokens"] = sum(metrics.drafted_per_step)
        found["foretoken.num_accepted_draft_tokens"] = sum(metrics.accepted_per_step)
    return found


def exported_to(endpoint: str, model_name: str) -> RequestSpans:
    """Spans that go to an OTLP collector over HTTP, in batches, from a thread of their own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource.create({"service.name": "foretoken"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestSpans(provider, model_name)
