"""Grids, and the break-even that forced acceptance finds."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine
from foretoken.lab.measure.experiment import AbConfig, ArmConfig, Sizes
from foretoken.lab.measure.grid import (
    FORCED,
    apply,
    cells_of,
    find_break_even,
    folder_of,
    run_grid,
    turned,
)
from foretoken.lab.measure.workload import WorkloadConfig
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import AbSummary
from foretoken.lab.records.run_files import read_summary
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.stats.ratios import ratio_of_blocks
from tests.unit.lab.summaries import ab, bucket, gain, with_candidate, with_gain

MOCK = f"{sys.executable} -m tests.mock_server --port {{port}} --step-ms 4 --restart-sd 0"
DRAFTS = MOCK + " --k {k} --draft-ms 0.1 --alpha 0.7 --alpha-spread 0"
CONFIG = AbConfig(
    baseline=ArmConfig(name="off", command=MOCK),
    candidate=ArmConfig(name="on", command=DRAFTS),
    workload=WorkloadConfig(file="x"),
)


def test_a_grid_is_every_combination() -> None:
    cells = cells_of({"k": [1, 3], "temperature": [0.0, 0.8]})
    assert len(cells) == 4 and cells[1] == {"k": 1, "temperature": 0.8}
    assert len({folder_of(cell) for cell in cells}) == 4


def test_values_go_to_settings_and_placeholders() -> None:
    config = apply(CONFIG, {"k": 3, "temperature": 0.4, "load.concurrency": 8})
    assert "--k 3" in str(config.candidate)
    assert config.workload.temperatures == (0.4,)
    assert config.load.concurrency == 8
    for wrong in ({"q": 1}, {"lod.rate": 1}, {"load.concurency": 1}):
        with pytest.raises(ConfigError):
            apply(CONFIG, wrong)


@pytest.mark.slow
def test_every_cell_of_a_grid_is_measured(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")
    config = AbConfig(
        baseline=CONFIG.baseline,
        candidate=CONFIG.candidate,
        workload=WorkloadConfig(file=str(prompts), max_tokens=80),
        sizes=Sizes(blocks=1, requests_per_block=3, warm_up=1),
    )
    cells = run_grid(config, {"k": [0, 4]}, tmp_path / "out")
    # Of three requests the median: a machine that stalls for a moment slows one of them.
    plain, drafted = (cell.row() for cell in cells)
    assert drafted["gains"]["tpot_p50"]["estimate"] > plain["gains"]["tpot_p50"]["estimate"]
    # (0.7 + 0.7^2 + 0.7^3 + 0.7^4) / 4 = 0.44; its standard error over some 87 steps is 0.04.
    assert 0.24 < drafted["acceptance"][0]["rate"]["estimate"] < 0.64
    assert plain["acceptance"] == [] and plain["num_steps"] == 0 < drafted["num_steps"]
    assert not drafted["enough_steps"], "three answers are too few to mean much"
    again = run_grid(config, {"k": [0, 4]}, tmp_path / "out", resume=True)
    # As plain values: a number that is none equals nothing, itself included.
    assert to_plain(again[1].summary) == to_plain(read_summary(tmp_path / "out" / "k-4"))


def test_a_dry_run_says_what_each_cell_takes() -> None:
    arms = ["--baseline", "serve --port {port}", "--candidate", "serve --k {k} --port {port}"]
    options = [*arms, "--workload", "x", "--dry-run", "--blocks", "3", "--requests", "20"]
    grid = ["--grid", "k=1,2", "--grid", "concurrency=1,8"]
    found = CliRunner().invoke(app, ["lab", "ab", *options, *grid])
    lines = found.stderr.splitlines()
    assert len(lines) == 4, found.output
    said = "3 blocks of 20 requests for each server, about 2 minutes for every second that a "
    assert lines[0].startswith(f"k=1, concurrency=1: {said}")
    assert lines[0].endswith("and 6 starts of a server")
    assert lines[3].startswith("k=2, concurrency=8: 3 blocks") and "about 21 s" in lines[3]


def test_forcing_sets_rates_and_fixes_lengths() -> None:
    arm = ArmConfig(name="on", command="serve --rates {rates:3} --length {length:3} --p {rate}")
    assert turned(arm, 0.5).command == ("serve --rates [0.5, 0.25, 0.125] --length 1.875 --p 0.5")
    with pytest.raises(ConfigError, match="rates"):
        turned(ArmConfig(name="on", command="serve"), 0.5)
    forced = apply(replace(CONFIG, candidate=arm), {FORCED: 0.5})
    assert forced.workload.parameters == {"ignore_eos": True}


@pytest.mark.slow
def test_servers_take_what_is_forced() -> None:
    """The commands of docs/deciding.md: Foretoken's settings and the linter let them pass."""
    text = (Path(__file__).parents[3] / "docs" / "deciding.md").read_text("utf-8")
    chapter = text.split("## Forcing acceptance")[1].split("\n### ")[0].split("\n## ")[0]
    commands = [
        line for line in chapter.splitlines() if "{rates:5}" in line or "{length:5}" in line
    ]
    assert len(commands) == 3
    for line in commands:
        command = line.strip(" |`").replace("{port}", "1")
        for rate in (0.0, 0.3, 0.9):
            told = turned(ArmConfig(name="on", command=command), rate).command
            assert told is not None and "{" not in told.replace('{"', "")
            found = lint(read_source(told, "auto"), Machine()).findings
            assert not [f for f in found if f.level == "error"], (told, found)


@pytest.mark.slow
def test_forced_acceptance_measures_every_level(tmp_path: Path) -> None:
    """The command line, from a dry run to a break-even that a resumed run reads."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("one\ntwo\nthree\n")
    options = ["lab", "ab", "--out", str(out), "--workload", str(prompts), "--json"]
    options += ["--baseline", MOCK, "--candidate", f"{MOCK} --k 4 --draft-ms 1 --alpha {{rate}}"]
    options += ["--force-acceptance", "0.02,0.95", "--blocks", "1", "--requests", "3"]
    options += ["--max-tokens", "60"]
    dry = json.loads(CliRunner().invoke(app, [*options, "--dry-run"]).stdout)
    assert [cell[FORCED] for cell in dry["cells"]] == [0.02, 0.95]
    assert dry["candidates"][1].endswith("--alpha 0.95")
    assert not out.exists()
    found = [CliRunner().invoke(app, [*options, *more]) for more in ([], ["--resume"])]
    assert found[0].stdout == found[1].stdout, found[1].output
    assert found[0].exit_code == 0, "there is no verdict on garbage"
    [row] = json.loads(found[0].stdout)["break_even"]
    assert 0.0 < row["rate"]["estimate"] < 0.95
    assert row["points"][0][1]["estimate"] < 1.0 < row["points"][1][1]["estimate"]
    judged = CliRunner().invoke(app, ["lab", "decide", str(out)])
    assert judged.exit_code == 2 and "without --force-acceptance" in judged.stderr


def a_level(chance: float, gains: np.ndarray) -> tuple[float, AbSummary]:
    """An A/B whose drafts of five are accepted one by one with a chance, with gains by block."""
    rate = sum(chance**i for i in range(1, 6)) / 5
    found = with_candidate(ab(), acceptance=(bucket(rate=max(rate, 1e-9)),))
    return chance, with_gain(
        found, replace(gain("tpot_mean", 1.0), ratio=ratio_of_blocks(gains), num_blocks=len(gains))
    )


def a_dial(cost: float, rng: np.random.Generator) -> Interval:
    """The break-even found where a verification costs so many plain steps."""
    levels = []
    for chance in (0.0, 0.3, 0.6, 0.9):
        yields = sum(chance**i for i in range(6))
        levels.append(a_level(chance, yields / cost * np.exp(rng.normal(0, 0.05, 5))))
    return find_break_even(levels).rate


@pytest.mark.parametrize("truth", [0.2, 0.4])
def test_the_break_even_is_where_the_gain_is_one(truth: float) -> None:
    """A straight line over the rate put 0.20 at 0.275 and 0.40 at 0.479: gains are concave."""
    found = [a_dial(1 + 5 * truth, np.random.default_rng(seed)) for seed in range(100)]
    assert np.median([own.estimate for own in found]) == pytest.approx(truth, abs=0.005)
    assert 89 <= sum(own.low <= truth <= own.high for own in found) <= 100
    assert all(own.high - own.low < 0.2 for own in found)


def test_a_break_even_outside_is_none_or_never() -> None:
    rng = np.random.default_rng(0)
    assert a_dial(0.8, rng).estimate == 0.0
    assert a_dial(7.0, rng).estimate == math.inf
    assert not find_break_even([a_level(0.5, np.ones(5))]).rate.known
