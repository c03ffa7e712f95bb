"""Acceptance by temperature: as measured where there are few, else in the server's buckets."""

import pytest

from foretoken.control.acceptance import TEMPERATURE_EDGES
from foretoken.lab.analysis.summary import summarize_acceptance
from foretoken.lab.records.results import RequestAcceptance, RequestRecord


def record(index: int, temperature: float | None) -> RequestRecord:
    drafts = RequestAcceptance(source="body", num_drafted=20, num_accepted=8, num_steps=5)
    return RequestRecord(index=index, temperature=temperature, output_tokens=13, acceptance=drafts)


def by_temperature(temperatures: list[float | None]) -> dict[str, int]:
    found = summarize_acceptance([record(i, t) for i, t in enumerate(temperatures)])
    return {b.value: b.num_requests for b in found if b.by == "temperature"}


def test_a_sweep_keeps_its_temperatures_apart() -> None:
    assert by_temperature([0.0, 0.8, 1.0, 0.8]) == {"0": 1, "0.8": 2, "1": 1}


def test_traffic_falls_into_the_servers_buckets() -> None:
    edges: list[float | None] = [*TEMPERATURE_EDGES]
    found = by_temperature([*edges, 0.1, 0.6, 1.3, None])
    assert found == {
        "default": 1, "<=0": 1, "<=0.2": 2, "<=0.5": 1, "<=0.7": 2, "<=1": 1, ">1": 1,
    }  # fmt: skip
    assert list(found)[-1] == ">1" and list(found)[:2] == ["default", "<=0"]
    assert sum(found.values()) == pytest.approx(9)
