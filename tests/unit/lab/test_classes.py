"""Classes of requests: timed apart inside the mix, and named where they lose."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.control.acceptance import TEMPERATURE_EDGES
from foretoken.lab.analysis.summary import ArmData, gains_by_class, summarize_acceptance
from foretoken.lab.decide.decision import decide
from foretoken.lab.decide.rules import RuleResult
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.records.results import AbSummary, RequestAcceptance, RequestRecord, ServerInfo
from foretoken.lab.verdict import USE_IT
from tests.unit.lab.summaries import ab, class_gains, gain, with_gain

JSON, PROSE = class_gains("json", 1.8), class_gains("prose", 0.7)


def both_arms(blocks: int) -> tuple[ArmData, ArmData]:
    """Blocks of a second."""
    server, seconds = ServerInfo(url=""), dict.fromkeys(range(blocks), 1.0)
    off = ArmData(arm="off", server=server, counters={}, gauges={}, seconds_of_block=seconds)
    return off, replace(off, arm="on")


def rule(summary: AbSummary, name: str) -> RuleResult:
    """One rule's answer under the default policy."""
    decision = decide(summary, load_policy(None))
    return next(j.result for j in decision.rules if j.rule == name)


def a_request(arm: str, block: int, index: int, category: str, tpot_s: float) -> RequestRecord:
    """A whole answer of 101 tokens."""
    return RequestRecord(
        index=index, arm=arm, block=block, category=category, temperature=0.0, scheduled_s=0.0,
        sent_s=0.0, first_s=0.1, last_s=0.1 + 100 * tpot_s, output_tokens=101, prompt_tokens=50,
    )  # fmt: skip


def test_a_class_is_timed_by_its_own_requests() -> None:
    """JSON halves its time per token, prose takes a quarter longer: true gains of 2 and 0.8."""
    rng = np.random.default_rng(3)
    records = []
    for block in range(8):
        for index in range(30):
            category = ("json", "prose")[index % 2]
            slower = {"off": 1.0, "on": (0.5, 1.25)[index % 2]}
            for arm, factor in slower.items():
                tpot = 0.02 * factor * float(rng.lognormal(0, 0.1))
                records.append(a_request(arm, block, 30 * block + index, category, tpot))
    found = gains_by_class(records, both_arms(8))
    assert [(own.by, own.value, own.num_pairs) for own in found] == [
        ("category", "json", 120), ("category", "prose", 120)
    ]  # fmt: skip
    for own, truth in zip(found, (2.0, 0.8), strict=True):
        middle, tail = own.gain("tpot_p50"), own.gain("tpot_p99")
        assert middle is not None and middle.enough
        assert middle.ratio.low < truth < middle.ratio.high
        assert tail is not None and not tail.enough, "120 requests are no P99"
    assert gains_by_class(records[::2][:3], both_arms(8)) == ()


def test_what_tells_the_same_requests_apart_counts_once() -> None:
    """A temperature for each category would give every row twice."""
    records = [
        replace(a_request(arm, block, index, ("json", "prose")[index % 2], 0.02),
                temperature=(0.0, 1.0)[index % 2])
        for arm in ("off", "on") for block in range(3) for index in range(20)
    ]  # fmt: skip
    assert {own.by for own in gains_by_class(records, both_arms(3))} == {"category"}


def test_contexts_are_classes_too() -> None:
    records = [
        replace(a_request(arm, block, index, "", 0.02), prompt_tokens=(100, 9000)[index % 2])
        for arm in ("off", "on")
        for block in range(3)
        for index in range(20)
    ]
    found = gains_by_class(records, both_arms(3))
    assert [own.value for own in found] == ["1-256 tokens", "8193-16384 tokens"]


def test_a_class_that_loses_is_named_by_both_rules() -> None:
    """One row said `not a mix problem`, another `split the traffic by class`."""
    summary = with_gain(ab(1.4), gain("tpot_p99", 0.8))
    summary = replace(summary, classes=(JSON, PROSE))
    mixed, alike = rule(summary, "mixed_workload"), rule(summary, "homogeneous")
    assert mixed.outcome == alike.outcome == "fail"
    assert "in this mix prose loses" in mixed.says
    assert "split the traffic by class: prose without speculation" in mixed.advice
    assert "loses beside the others: prose" in alike.says and "wins: json" in alike.says


def test_if_every_class_loses_speculation_is_left_off() -> None:
    both = (class_gains("json", 0.9), class_gains("prose", 0.7))
    found = rule(replace(ab(0.8), classes=both), "homogeneous")
    assert found.outcome == "fail" and found.advice == "leave speculation off"


@pytest.mark.parametrize("ratio", [0.5, 0.99])
def test_a_tail_of_too_few_requests_is_no_finding(ratio: float) -> None:
    """A P99 that one rule calls too few requests was another rule's failure."""
    few = replace(gain("tpot_p99", ratio), enough=False, num_pairs=96)
    fewer = replace(gain("tpot_p95", ratio), enough=False, num_pairs=96)
    found = rule(with_gain(with_gain(ab(1.6), few), fewer), "mixed_workload")
    assert found.outcome == "inconclusive"
    assert "there are 96" in found.says and found.needed_blocks


@pytest.mark.slow
def test_many_classes_do_not_make_a_loss_of_chance() -> None:
    """Twenty classes without a gain, each with its 95 % interval: one in twenty would be `lost`."""
    rng = np.random.default_rng(11)
    alarms = 0
    for _ in range(200):
        errors = rng.normal(0, 0.02, 20)
        classes = tuple(class_gains(str(i), float(np.exp(e)), tail=1.5, pairs=60)
                        for i, e in enumerate(errors))  # fmt: skip
        own = tuple(
            replace(c, gains=tuple(replace(g, ratio=gain(g.metric, g.ratio.estimate,
                                                         error=0.02).ratio)
                                   for g in c.gains)) for c in classes
        )  # fmt: skip
        alarms += rule(replace(ab(1.6), classes=own), "homogeneous").outcome == "fail"
    assert alarms <= 10
    assert decide(ab(1.6), load_policy(None)).verdict == USE_IT


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


def test_a_share_of_accepted_drafts_ends_at_one() -> None:
    """Few requests that are far apart: the interval of the logarithm goes on beyond."""
    accepted = [20, 20, 20, 19, 2, 20]
    records = [
        replace(one, acceptance=replace(one.acceptance, num_accepted=count))
        for one, count in zip((record(i, 0.0) for i in range(6)), accepted, strict=True)
        if one.acceptance is not None
    ]
    found = next(one for one in summarize_acceptance(records) if one.by == "all")
    assert found.rate.high == found.p90.high == 1.0, found
    assert 0.0 <= found.p10.low < found.rate.estimate == pytest.approx(sum(accepted) / 120)
