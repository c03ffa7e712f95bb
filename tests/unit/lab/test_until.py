"""Measuring until there is a verdict, and the options that all measuring commands have."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.cli.lab import ab_run
from foretoken.errors import ConfigError
from foretoken.lab.decide import until
from foretoken.lab.decide.decision import Decision, decide
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.decide.until import MOST_LOOKS, UntilLimits, run_until_decided
from foretoken.lab.measure.estimate import Pace, fit_into, seconds_of
from foretoken.lab.measure.experiment import AbConfig, ArmConfig, Sizes, load_settings
from foretoken.lab.measure.workload import WorkloadConfig
from foretoken.lab.records.results import AbSummary
from foretoken.lab.records.run_files import SUMMARY, write_json
from foretoken.lab.verdict import MEASURE_MORE, USE_IT
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running
from tests.unit.lab.summaries import ab as ab_summary

POLICY = """
rules:
  speedup: {weight: must, least: 1.3}
  restarts: {weight: must, least_blocks: 4}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Four blocks and a gain."""
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """A dozen prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"a prompt {i}\n" for i in range(12)))
    return path


def run_command(workload: Path, *options: str) -> Result:
    """`lab ab` of two servers."""
    arms = ["--baseline", "http://a", "--candidate", "http://b", "--workload", str(workload)]
    return CliRunner().invoke(app, ["lab", "ab", *arms, *options])


def an_ab(workload: Path) -> AbConfig:
    """Three blocks of eight."""
    return AbConfig(
        baseline=ArmConfig(name="off", url="http://a"),
        candidate=ArmConfig(name="on", url="http://b"),
        workload=WorkloadConfig(file=str(workload), max_tokens=12),
        sizes=Sizes(blocks=3, requests_per_block=8, warm_up=1),
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Stands in for measuring: a gain of 2 in as many blocks as were wanted, one look each."""
    calls: list[tuple[int, bool]] = []

    def run_ab(config: AbConfig, out: Path, *, resume: bool, watch: object) -> AbSummary:
        calls.append((config.sizes.blocks, resume))
        found = ab_summary(2.0, blocks=config.sizes.blocks, look=len(calls))
        write_json(out / SUMMARY, found)
        return found

    monkeypatch.setattr(until, "run_ab", run_ab)
    paces = {"off": Pace(60.0, 10.0), "on": Pace(60.0, 5.0)}
    monkeypatch.setattr(ab_run, "probe", lambda *_: paces)
    return calls


def test_the_blocks_that_are_missing_are_added(
    tmp_path: Path, policy: Path, workload: Path, measured: list[tuple[int, bool]]
) -> None:
    told: list[tuple[int, Decision | None]] = []
    patience = UntilLimits(tell=lambda blocks, decision: told.append((blocks, decision)))
    rules = load_policy(str(policy))
    summary = run_until_decided(an_ab(workload), tmp_path, rules, patience)
    assert measured == [(3, False), (4, True)]
    assert summary.look == 2 and decide(summary, rules).verdict == USE_IT
    assert told[0] == (3, None)
    assert [decision.verdict for _, decision in told[1:] if decision] == [MEASURE_MORE, USE_IT]
    assert told[1][0] == 4


def test_patience_ends_with_what_was_measured(
    tmp_path: Path, policy: Path, workload: Path, measured: list[tuple[int, bool]]
) -> None:
    rules = load_policy(str(policy))
    config = an_ab(workload)
    summary = run_until_decided(config, tmp_path, rules, UntilLimits(most_s=0.0))
    assert measured == [(3, False)] and decide(summary, rules).verdict == MEASURE_MORE


def test_looks_end(
    tmp_path: Path, policy: Path, workload: Path, measured: list[tuple[int, bool]]
) -> None:
    rules = load_policy(str(policy), ("speedup.least=2.0",))
    run_until_decided(an_ab(workload), tmp_path, rules)
    assert len(measured) == MOST_LOOKS, "the truth is the limit: more will not tell"


def test_the_command_measures_until_it_knows(
    tmp_path: Path, policy: Path, workload: Path, measured: list[tuple[int, bool]]
) -> None:
    options = ["--set", "sizes.blocks=3", "--out", str(tmp_path / "ab"), "--no-page"]
    result = run_command(workload, *options, "--policy", str(policy))
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "MEASURE MORE after 3 blocks" in said and said.split("texts: ")[1].count("USE IT: ") == 1
    judged = CliRunner().invoke(
        app, ["lab", "decide", str(tmp_path / "ab"), "--policy", str(policy)]
    )
    assert judged.exit_code == 0, judged.output


@pytest.mark.parametrize(
    ("gain", "verdict", "code"),
    [(2.0, "USE IT", 0), (0.5, "LEAVE IT OFF", 1), (1.3, "MEASURE MORE", 4)],
)
def test_the_verdict_is_the_last_line_and_the_exit_code(
    gain: float, verdict: str, code: int, tmp_path: Path, policy: Path, workload: Path,
    measured: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run_ab(config: AbConfig, out: Path, *, resume: bool, watch: object) -> AbSummary:
        found = ab_summary(gain, blocks=config.sizes.blocks)
        write_json(out / SUMMARY, found)
        return found

    monkeypatch.setattr(until, "run_ab", run_ab)
    options = ["--blocks", "5", "--out", str(tmp_path / "ab"), "--no-page", "--json"]
    result = run_command(workload, *options, "--policy", str(policy))
    assert result.exit_code == code, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{verdict}: "), result.stderr
    document = json.loads(result.stdout)
    assert (document["verdict"], document["exit_code"]) == (verdict, code)
    assert document["decision"]["reason"] in last


def test_the_time_is_told_before_the_start_and_rules_are_set_as_in_decide(
    tmp_path: Path, workload: Path, measured: list[tuple[int, bool]]
) -> None:
    options = ["--out", str(tmp_path / "ab"), "--set", "restarts.least_blocks=3", "--no-page"]
    result = run_command(workload, *options)
    assert result.exit_code == 0, result.output
    told = "9 blocks of 120 requests for each server take about 4.8 hours (off answers in 10 s"
    assert told in result.stderr, result.stderr
    assert result.stderr.index(told) < result.stderr.index("gain (above 1")


def test_ten_minutes_are_as_much_as_fits(tmp_path: Path, workload: Path) -> None:
    config = an_ab(workload)
    fast = {"off": Pace(0.0, 0.2), "on": Pace(0.0, 0.1)}
    sizes = fit_into(config, fast, 600).sizes
    assert (sizes.blocks, sizes.requests_per_block) == (9, 120)
    slow = {"off": Pace(20.0, 5.0), "on": Pace(20.0, 4.0)}
    fitted = fit_into(config, slow, 900)
    assert fitted.sizes.blocks == 5 and fitted.sizes.requests_per_block == 14
    assert seconds_of(fitted, slow) <= 900
    with pytest.raises(ConfigError, match="at least"):
        fit_into(config, slow, 60)


@pytest.mark.slow
def test_a_dry_run_has_an_estimate(tmp_path: Path, workload: Path) -> None:
    options = ["--workload", str(workload), "--out", str(tmp_path / "ab"), "--dry-run"]
    arms = ["--baseline", "serve {port}", "--candidate", "serve {port} --fast"]
    result = CliRunner().invoke(app, ["lab", "ab", *options, *arms])
    assert (
        "about 36 minutes for every second that a request takes, and 18 starts of a server"
        in result.stderr
    )
    with mock_running(MockServer(MockLaw(step_s=0.001, prefill_s=0.001))) as url:
        arms = ["--baseline", url, "--candidate", url]
        result = CliRunner().invoke(app, ["lab", "ab", *options, *arms])
    assert "9 blocks of 120 requests for each server take about" in result.stderr
    assert not (tmp_path / "ab" / "requests.jsonl").exists()


def test_an_ab_is_long_enough_for_a_p99_unless_told_otherwise(
    tmp_path: Path, workload: Path
) -> None:
    def planned(*options: str) -> list[dict[str, Any]]:
        result = run_command(workload, "--dry-run", "--json", *options)
        segments: list[dict[str, Any]] = json.loads(result.stdout)["segments"]
        return segments

    assert sum(s["requests"] for s in planned() if s["arm"] == "on") >= 1000
    assert sum(s["requests"] for s in planned("--requests", "5") if s["arm"] == "on") == 45
    file = tmp_path / "settings.yaml"
    file.write_text("sizes: {blocks: 3, requests_per_block: 2}\n")
    assert sum(s["requests"] for s in planned(str(file)) if s["arm"] == "on") == 6


def test_defaults_of_a_command_are_below_everything(tmp_path: Path) -> None:
    file = tmp_path / "sizes.yaml"
    file.write_text("blocks: 2\n")
    defaults = {"blocks": 9, "warm_up": 1, "requests_per_block": 7}
    found = load_settings(Sizes, file, ["warm_up=3"], defaults)
    assert (found.blocks, found.warm_up, found.requests_per_block) == (2, 3, 7)
    with pytest.raises(ConfigError, match="nothing"):
        load_settings(Sizes, None, [], {"nothing": 1})
