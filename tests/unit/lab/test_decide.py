"""Verdicts on summaries with chosen numbers: every rule, both ways."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.decide.decision import decide
from foretoken.lab.decide.rules import RULES
from foretoken.lab.decide.ship_policy import default_text, load_policy
from foretoken.lab.lint.checks import OWN_CHECKS
from foretoken.lab.plan.checks import CHECKS
from foretoken.lab.records.results import AbSummary, Equality
from foretoken.lab.records.run_files import write_json
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.stats.ratios import log_interval
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT
from tests.unit.lab.summaries import (
    ab,
    around,
    bucket,
    class_gains,
    gain,
    with_candidate,
    with_gain,
)


def outcome(summary: AbSummary, rule: str, *changes: str) -> str:
    """A rule's answer under the default policy with `changes`."""
    decision = decide(summary, load_policy(None, changes))
    return next(j.result.outcome for j in decision.rules if j.rule == rule)


def test_the_default_policy_uses_every_rule() -> None:
    assert {rule.name for rule in load_policy(None).rules} == set(RULES)


def test_an_open_gain_asks_for_blocks_and_minutes() -> None:
    decision = decide(ab(1.4, error=0.06, blocks=12), load_policy(None))
    assert decision.needed_blocks is not None and decision.needed_blocks > 12
    assert decision.more_seconds == pytest.approx(100.0 * (decision.needed_blocks - 12))


def test_an_impossible_result_is_invalid_in_words() -> None:
    """3.06x at an acceptance length of 2.70, once an argument for shipping."""
    summary = with_candidate(ab(3.06), acceptance=(bucket(rate=0.34),))
    decision = decide(summary, load_policy(None))
    assert decision.verdict == MEASURE_MORE and not decision.valid
    assert "cannot be above what it yields" in decision.conclusion.sentence
    assert decision.break_even_rate == 0.0, "not below nothing"
    pays = next(j.result.says for j in decision.rules if j.rule == "acceptance_pays")
    assert "pays at any acceptance" in pays
    hopeless = decide(with_candidate(ab(0.2), acceptance=(bucket(rate=0.1),)), load_policy(None))
    assert hopeless.verdict == LEAVE_IT_OFF
    pays = next(j.result.says for j in hopeless.rules if j.rule == "acceptance_pays")
    assert "no acceptance would pay" in pays and "%" not in pays.split("no acceptance")[1]


def test_one_start_is_said_and_more_blocks_are_not_asked_for() -> None:
    """Arms by URL: nine blocks are one start, and a hundred would be."""
    found = gain("tpot_p50", 1.4)
    wide = replace(found, ratio=log_interval(math.log(1.4), 0.01, 12, unseen_sd=0.07))
    decision = decide(with_gain(ab(1.4), wide), load_policy(None))
    results = {j.rule: j.result for j in decision.rules}
    assert "one start of off and on" in results["restarts"].says
    assert results["speedup"].outcome == "inconclusive"
    assert results["speedup"].needed_blocks is None and "{port}" in results["speedup"].advice


T = Callable[[AbSummary], AbSummary]
CASES: list[tuple[str, T, str]] = [
    ("p99_tpot", lambda s: with_gain(s, gain("tpot_p99", 0.8)), "fail"),
    ("p99_tpot", lambda s: with_gain(s, gain("tpot_p99", 0.97, error=0.05)), "inconclusive"),
    ("tail_tpot", lambda s: with_gain(s, gain("tpot_p95", 0.8)), "fail"),
    ("ttft", lambda s: with_gain(s, gain("ttft_p95", 0.7)), "fail"),
    ("ttft", lambda s: with_gain(s, gain("ttft_p95", 0.9)), "pass"),
    ("goodput", lambda s: with_gain(s, gain("goodput", 1.2)), "pass"),
    ("goodput", lambda s: s, "inconclusive"),
    ("steady", lambda s: with_candidate(s, steady=False), "fail"),
    ("client_lag", lambda s: with_candidate(s, client_lag_p99_s=0.05), "invalid"),
    ("plausible", lambda s: with_candidate(s, acceptance=(bucket(length=around(1.3)),)), "invalid"),
    ("plausible", lambda s: replace(
        with_candidate(s, acceptance=(bucket(length=around(1.3)),)),
        config={"load": {"kind": "poisson", "rate": 3.0}}), "pass"),
    ("busy_host", lambda s: replace(s, environment={"host_busy": 0.4}), "invalid"),
    ("busy_host", lambda s: replace(s, environment={}), "inconclusive"),
    ("errors", lambda s: with_candidate(s, num_errors=40, errors={"server": 40}), "fail"),
    ("errors", lambda s: with_candidate(s, num_errors=1, errors={"server": 1}), "inconclusive"),
    ("outputs", lambda s: replace(s, equality=None), "inconclusive"),
    ("outputs", lambda s: replace(s, equality=Equality(
        num_compared=200, num_equal=20, share=Interval(0.1, 0.07, 0.15))), "fail"),
    ("parameters_refused", lambda s: with_candidate(s, parameters_seen={"min_p": 3}), "fail"),
    ("parameters_refused", lambda s: with_candidate(s, parameters_seen={"top_p": 3}), "pass"),
    ("monitoring", lambda s: with_candidate(s, counters={}, acceptance=()), "fail"),
    ("kv_squeeze", lambda s: with_candidate(s, counters={"vllm:num_preemptions": 50.0}), "fail"),
    ("kv_squeeze", lambda s: with_candidate(s, counters={}), "inconclusive"),
    ("kv_squeeze", lambda s: with_candidate(s, gauges={"vllm:kv_cache_usage_perc": 0.99}),
     "inconclusive"),
    ("acceptance_pays", lambda s: with_candidate(s, acceptance=(bucket(rate=0.5),)), "pass"),
    ("acceptance_pays", lambda s: with_candidate(s, acceptance=(bucket(num_steps=None),)),
     "inconclusive"),
    ("p10_acceptance", lambda s: with_candidate(s, acceptance=(bucket(p10=around(0.05)),)), "fail"),
    ("p10_acceptance", lambda s: with_candidate(s, acceptance=(bucket(num_too_short=190),)),
     "inconclusive"),
    ("temperatures", lambda s: with_candidate(s, acceptance=(
        bucket(), bucket("temperature", "1.0", 0.05))), "fail"),
    ("mixed_workload", lambda s: with_gain(s, gain("tpot_p99", 0.8)), "fail"),
    ("homogeneous", lambda s: replace(s, classes=(class_gains("json", 1.7),
        class_gains("prose", 0.8))), "fail"),
    ("output_length", lambda s: with_candidate(s, output_tokens=200 * 12), "fail"),
    ("restarts", lambda s: ab(blocks=4), "inconclusive"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "change", "expected"), CASES)
def test_rules(rule: str, change: T, expected: str) -> None:
    assert outcome(change(ab(1.6)), rule) == expected


def test_every_rule_can_pass() -> None:
    summary = ab(1.6)
    decision = decide(summary, load_policy(None))
    passed = {j.rule for j in decision.rules if j.result.outcome == "pass"}
    without_data = {"goodput", "production_load"}
    assert passed == set(RULES) - without_data


def test_a_low_rate_that_pays_is_no_failure() -> None:
    """39 % at k = 5 with a measured 1.78x: below every fixed threshold, far above break-even."""
    summary = with_candidate(ab(1.78), acceptance=(bucket(rate=0.39),))
    decision = decide(summary, load_policy(None))
    assert decision.verdict == USE_IT
    assert decision.break_even_rate == pytest.approx((2.95 / 1.78 - 1) / 5, abs=0.01)


SURE = ab(1.42, error=0.035)
SLOW_FIRST = with_gain(ab(1.6), gain("ttft_p95", 0.9))
SHORT = with_candidate(ab(1.6), output_tokens=200 * 12)


@pytest.mark.parametrize(
    ("summary", "change", "word"),
    [
        (SURE, "slo=tpot", USE_IT),
        (replace(SURE, look=4), "slo=tpot", MEASURE_MORE),
        (SLOW_FIRST, "slo=tpot", USE_IT),
        (SLOW_FIRST, "slo=ttft", LEAVE_IT_OFF),
        (SHORT, "slo=tpot", USE_IT),
        (SHORT, "output_length.weight=veto", LEAVE_IT_OFF),
        (ab(), "production_load.requests_per_s=2.2", USE_IT),
        (ab(), "production_load.requests_per_s=8", LEAVE_IT_OFF),
    ],
)
def test_looks_promises_and_weights_decide(summary: AbSummary, change: str, word: str) -> None:
    assert decide(summary, load_policy(None, (change,))).verdict == word


def test_production_temperatures_must_have_been_measured() -> None:
    assert outcome(ab(), "temperatures", "temperatures.production=[0, 0.8]") == "pass"
    assert outcome(ab(), "temperatures", "temperatures.production=[1.0]") == "inconclusive"


@pytest.mark.parametrize(
    "change",
    ["speedup.leest=1.2", "speedup.least=fast", "speedup.weight=maybe", "nothing=1", "slo=joy",
     "speedup", "temperatures.production=hot"],
)  # fmt: skip
def test_wrong_changes_are_named(change: str) -> None:
    with pytest.raises(ConfigError):
        load_policy(None, (change,))


def test_a_policy_extends_and_drops(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(
        "extends: default\nname: ours\nrules:\n  speedup: {least: 1.15}\n  p99_tpot: null\n"
    )
    policy = load_policy(str(file))
    rules = {rule.name: rule for rule in policy.rules}
    assert policy.name == "ours"
    assert rules["speedup"].parameters["least"] == 1.15
    assert rules["speedup"].parameters["resolution"] == 1.1
    assert "p99_tpot" not in rules
    assert decide(ab(1.2), policy).verdict == USE_IT
    file.write_text("extends: another.yaml\nrules: {}\n")
    with pytest.raises(ConfigError, match="None or default"):
        load_policy(str(file))


def test_the_command_answers_with_its_exit_code(tmp_path: Path) -> None:
    runner = CliRunner()
    for name, summary in (("good", ab(1.6)), ("bad", ab(1.0)), ("open", ab(1.3, error=0.05))):
        server = replace(summary.arm("on").server, command=name)
        write_json(tmp_path / name / "summary.json", with_candidate(summary, server=server))
    codes = {
        name: runner.invoke(app, ["lab", "decide", str(tmp_path / name)]).exit_code
        for name in ("good", "bad", "open")
    }
    assert codes == {"good": 0, "bad": 1, "open": 4}
    several = runner.invoke(app, ["lab", "decide", *(str(tmp_path / n) for n in codes), "--json"])
    assert several.exit_code == 0, several.output
    document = json.loads(several.stdout)
    assert document["verdict"] == USE_IT
    assert document["best"].endswith("good")
    assert len(document["decisions"]) == 3
    shown = runner.invoke(app, ["lab", "decide", str(tmp_path / "open")], env={"COLUMNS": "140"})
    assert "MEASURE MORE" in shown.stdout and "more blocks" in shown.stdout
    assert runner.invoke(app, ["lab", "decide", str(tmp_path)]).exit_code == 2
    assert runner.invoke(app, ["lab", "decide", "--show-policy"]).stdout == default_text()


DOCUMENT = Path(__file__).parents[3] / "docs" / "deciding.md"


def test_the_document_lists_every_check_once() -> None:
    table = DOCUMENT.read_text("utf-8").split("## Every check by its name")[1]
    rows = re.findall(r"^\| ((?:plan|lint|policy): .+?) \|", table, re.MULTILINE)
    written = Counter(name for row in rows for name in row.split(", "))
    names = [f"plan: {check.__name__[1:]}" for check in CHECKS]
    names += [f"lint: {name}" for name in OWN_CHECKS]
    names += [f"policy: {name}" for name in RULES]
    assert written == Counter(names)
