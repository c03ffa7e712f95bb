"""Several A/Bs judged together: what differs has its name, and a sentence says what to do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.analysis.crossover import find_crossing
from foretoken.lab.analysis.dimensions import find_dimensions
from foretoken.lab.decide.overall import Overall, judge_runs
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.decide.verdict import DO_NOT_SHIP, INVALID, NOT_YET, SHIP, decide
from foretoken.lab.records.results import AbSummary
from foretoken.lab.records.run_files import ab_folders, write_json
from foretoken.lab.stats.intervals import student_quantile
from tests.unit.lab.summaries import ab, gain, with_candidate

BARE = "vllm serve m --port {port}"


def measured(
    speedup: float, *, temperature: float = 0.0, in_flight: int = 1, more: str = "", **config: Any
) -> AbSummary:
    """An A/B with settings, as `lab ab` writes it."""
    settings: dict[str, Any] = {
        "baseline": {"name": "off", "command": BARE},
        "candidate": {"name": "on", "command": f"{BARE} {more}".strip()},
        "workload": {"file": "gone.jsonl", "temperatures": [temperature], "max_tokens": 64},
        "load": {"kind": "closed", "concurrency": in_flight},
    }
    workload = {**settings["workload"], **config}
    return replace(ab(speedup), config={**settings, "workload": workload})


def together(*runs: AbSummary) -> Overall:
    """The verdict over the runs by the default policy."""
    policy = load_policy(None)
    judged = [decide(run, policy, run=str(n)) for n, run in enumerate(runs)]
    return judge_runs(list(zip(runs, judged, strict=True)), policy)


def test_temperatures_are_called_temperatures() -> None:
    """They were once taken for loads: `it would ship at 24 requests/s`."""
    found = together(measured(1.8), measured(1.6, temperature=0.4), measured(1.1, temperature=0.8))
    assert [d.name for d in found.dimensions] == ["temperature"]
    assert found.verdict == DO_NOT_SHIP
    assert "It would ship at temperature 0 and 0.4, not at temperature 0.8" in found.sentence
    assert "serve hotter requests than 0.4 without speculation" in found.sentence
    assert "requests/s" not in found.sentence
    assert "falls below 1.30x at temperature 0.6" in found.sentence


def test_a_load_gets_its_crossover_with_an_interval() -> None:
    runs = [measured(s, in_flight=n) for n, s in ((1, 2.0), (8, 1.5), (32, 0.8))]
    found = together(*runs)
    assert "It would ship at 1 and 8 requests in flight" in found.sentence
    assert "let k fall to 0 above 8" in found.sentence
    limits = {named.crossing.limit: named.crossing for named in found.crossings}
    assert set(limits) == {1.3, 1.0}
    assert 8 < limits[1.3].at.low < limits[1.3].at.estimate < limits[1.3].at.high
    assert limits[1.3].at.high < limits[1.0].at.estimate < 32


def test_classes_and_contexts_are_named() -> None:
    classes = together(measured(1.8, category="code"), measured(0.8, category="prose"))
    assert "It would ship at class code, not at class prose: split the traffic" in classes.sentence
    long = [replace(own, prompt_tokens=32_000.0) for own in measured(0.9).arms]
    short = [replace(own, prompt_tokens=500.0) for own in measured(1.8).arms]
    contexts = together(
        replace(measured(1.8), arms=tuple(short)),
        replace(measured(0.9, file="long.jsonl"), arms=tuple(long)),
    )
    assert "serve prompts longer than 500 tokens without speculation" in contexts.sentence


def test_configurations_compete_by_name() -> None:
    runs = [
        measured(s, more=f"--speculative-config '{{\"num_speculative_tokens\": {k}}}'")
        for k, s in ((1, 1.1), (3, 1.9), (5, 1.5))
    ]
    found = together(*runs)
    assert found.verdict == SHIP and found.best.run == "1"
    assert "Best of 3 configurations: num_speculative_tokens 3" in found.sentence
    assert "num_speculative_tokens 1: DO NOT SHIP, speed-up (tpot_p50) 1.10x" in found.sentence
    versions = [
        with_candidate(measured(s), server=replace(ab().arm("on").server, version=v))
        for v, s in (("0.32.0", 1.1), ("0.33.0", 1.6))
    ]
    assert "engine version 0.33.0" in together(*versions).sentence


def test_a_configuration_counts_by_its_worst_traffic() -> None:
    runs = [
        measured(s, in_flight=n, more=f"--k {k}")
        for k, n, s in ((5, 1, 2.2), (5, 16, 1.0), (2, 1, 1.7), (2, 16, 1.5))
    ]
    found = together(*runs)
    assert found.verdict == SHIP and found.best.run == "3"
    assert "k 2" in found.sentence
    assert "It ships wherever it was measured (1 and 16 requests in flight)" in found.sentence
    assert "least at 16 requests in flight: speed-up (tpot_p50) 1.50x" in found.sentence
    assert "k 5 would ship at 1 request in flight only" in found.sentence


def test_an_unfair_comparison_is_called_one() -> None:
    found = together(measured(1.9, more="--k 5"), measured(1.2, more="--k 1", temperature=0.8))
    assert "Not a fair comparison" in found.sentence and "different temperature" in found.sentence


def test_runs_alike_are_not_given_a_dimension() -> None:
    assert find_dimensions([measured(1.6), measured(1.5)]) == ()
    assert find_dimensions([measured(1.6)]) == ()
    loads = [with_candidate(measured(1.6), requests_per_s=r) for r in (1.0, 9.0)]
    assert [d.name for d in find_dimensions(loads)] == ["requests/s"]
    bare = [with_candidate(ab(s), requests_per_s=r) for s, r in ((1.9, 0.5), (1.0, 20.0))]
    assert "let k fall to 0 above 0.5" in together(*bare).sentence


def test_open_runs_leave_the_whole_open() -> None:
    shaky = replace(ab(1.35, error=0.05), config=measured(1.0, temperature=0.8).config)
    found = together(measured(1.9), shaky)
    assert found.verdict == NOT_YET and "temperature 0.8" in found.sentence


def test_what_is_open_is_not_called_lost() -> None:
    """A load that is open, beside one that loses, once ended in `no, leave speculation off`."""
    shaky = replace(ab(1.35, error=0.05), config=measured(1.0).config)
    found = together(shaky, measured(0.9, in_flight=16))
    assert found.verdict == DO_NOT_SHIP and found.answer == "Not for all of the traffic"
    assert found.says[0] == "It does not ship at 16 requests in flight"
    assert found.says[1].startswith("Open at 1 request in flight")
    busy = replace(ab(1.32, error=0.05), config=measured(1.0, in_flight=8).config)
    assert together(shaky, busy).says[0].startswith("Open at 1 and 8 requests in flight")


def test_what_cannot_be_judged_is_not_called_lost() -> None:
    """A temperature that was measured on a busy machine was told as one that does not ship."""
    fast = measured(2.2, temperature=0.0)
    busy = replace(fast, environment={**fast.environment, "host_busy": 0.4})
    found = together(busy, measured(1.1, temperature=0.8))
    assert found.verdict == DO_NOT_SHIP and found.answer == "Not for all of the traffic"
    assert found.says[0] == "It ships at no temperature that could be judged"
    assert "cannot be judged at temperature 0, measure anew: before its blocks" in found.sentence
    found = together(busy, measured(1.9, temperature=0.8))
    assert found.verdict == INVALID and found.says[0] == "It would ship at temperature 0.8"
    assert "40% busy" in found.says[1]
    slow = replace(busy, config=measured(1.0, temperature=0.8).config)
    assert together(busy, slow).says[0].startswith("It cannot be judged at temperature 0 and 0.8")


@pytest.mark.slow
def test_a_crossing_s_interval_covers_the_truth() -> None:
    """400 experiments at 4 loads, 8 blocks each: nominal 95 %."""
    rng = np.random.default_rng(7)
    loads, truth = np.array([1.0, 4.0, 16.0, 64.0]), 20.0
    hits = 0
    for seed in range(400):
        points = []
        for load in loads:
            log = 0.25 * np.log(truth / load)
            blocks = log + rng.normal(0, 0.08, 8)
            error = float(blocks.std(ddof=1)) / np.sqrt(8)
            made = gain("tpot_p50", float(np.exp(blocks.mean())), error=error, blocks=8)
            points.append((float(load), made))
        found = find_crossing(points, 1.0, seed=seed)
        hits += found is not None and found.at.low <= truth <= found.at.high
    assert 0.93 <= hits / 400 <= 0.985, hits
    assert student_quantile(0.975, 7) > 2.3


def test_ends_outside_of_what_was_measured_are_said() -> None:
    points = [(0.0, gain("tpot_p50", 1.5)), (1.0, gain("tpot_p50", 1.29, error=0.05))]
    found = find_crossing(points, 1.3)
    assert found is not None and found.falls and found.at.high == np.inf
    assert find_crossing(points, 1.0) is None
    rising = find_crossing([(0.0, gain("x", 0.5)), (2.0, gain("x", 2.0))], 1.0)
    assert rising is not None and not rising.falls
    assert rising.at.estimate == pytest.approx(1.0)


def a_grid(folder: Path) -> Path:
    """What `lab ab --grid` leaves behind."""
    cells = []
    for temperature, speedup in ((0.0, 1.8), (0.8, 0.9)):
        name = f"temperature-{temperature}"
        write_json(folder / name / "summary.json", measured(speedup, temperature=temperature))
        cells.append({"values": {"temperature": temperature}, "folder": name})
    write_json(folder / "grid.json", {"kind": "grid", "forced": False, "cells": cells})
    return folder


@pytest.mark.slow
def test_a_grid_s_own_folder_is_judged(tmp_path: Path) -> None:
    runner, out = CliRunner(), a_grid(tmp_path / "grid")
    found = runner.invoke(app, ["lab", "decide", str(out), "--json"])
    assert found.exit_code == 1, found.output
    document = json.loads(found.stdout)
    assert document["differs"][0]["name"] == "temperature"
    assert len(document["decisions"]) == 2
    shown = runner.invoke(app, ["lab", "decide", str(out)], env={"COLUMNS": "120"})
    assert "It would ship at temperature 0, not at temperature 0.8" in " ".join(
        shown.stdout.replace("\u2502", " ").split()
    )
    report = runner.invoke(app, ["lab", "report", str(out)])
    assert report.exit_code == 0, report.output
    assert "temperature" in (out / "report" / "report.html").read_text("utf-8")


def test_forced_acceptance_is_refused_with_the_reason(tmp_path: Path) -> None:
    cells = [{"values": {"forced_acceptance": 0.5}, "folder": "x"}]
    write_json(tmp_path / "grid.json", {"kind": "grid", "forced": True, "cells": cells})
    with pytest.raises(ConfigError, match="not those of a draft"):
        ab_folders([tmp_path])
