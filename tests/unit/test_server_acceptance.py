"""Acceptance by drafter and temperature, as Prometheus sees it."""

from prometheus_client import CollectorRegistry

from foretoken.server.observing.request_acceptance import AcceptanceMetrics
from foretoken.types import RequestMetrics


def ended(accepted: tuple[int, ...], drafters: tuple[str, ...]) -> RequestMetrics:
    return RequestMetrics(
        queued_s=0.0,
        first_token_s=0.1,
        finished_s=1.0,
        num_preemptions=0,
        num_cached_tokens=0,
        drafted_per_step=(4,) * len(accepted),
        accepted_per_step=accepted,
        drafter_per_step=drafters,
    )


def test_by_drafter_and_temperature() -> None:
    registry = CollectorRegistry()
    metrics = AcceptanceMetrics(registry, ("m", "0"))
    metrics.observe(0.0, ended((4, 0, 2), ("ngram", "draft_model", "ngram")))
    metrics.observe(0.0, ended((), ()))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})

    ngram = {"drafter": "ngram", "temperature": "0"}
    assert value("foretoken:drafter_draft_tokens_total", **ngram) == 8
    assert value("foretoken:drafter_accepted_tokens_total", **ngram) == 6
    assert value("foretoken:request_acceptance_length_sum", **ngram) == 4.0
    other = {"drafter": "draft_model", "temperature": "0"}
    assert value("foretoken:request_acceptance_length_sum", **other) == 1.0
    assert value("foretoken:acceptance_length_requests", temperature="0") == 1
    assert value("foretoken:acceptance_length_quantile", temperature="0", quantile="0.5") == 3.0
    assert value("foretoken:acceptance_length_requests", temperature="inf") == 0
    assert value("foretoken:acceptance_length_quantile", temperature="1", quantile="0.5") is None


def test_quantiles() -> None:
    registry = CollectorRegistry()
    metrics = AcceptanceMetrics(registry, ("m", "0"))
    for accepted in range(11):
        metrics.observe(0.9, ended((accepted,), ("ngram",)))
    labels = {"model_name": "m", "engine": "0", "temperature": "1"}
    found = [
        registry.get_sample_value(
            "foretoken:acceptance_length_quantile", {**labels, "quantile": quantile}
        )
        for quantile in ("0.1", "0.5", "0.9")
    ]
    assert found == [2.0, 6.0, 10.0]
