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
from foretoken.lab.analysis.dimensions import find_crossing, find_dimensions
from foretoken.lab.decide.decision import decide
from foretoken.lab.decide.overall import JudgedRun, Overall, judge_runs
from foretoken.lab.decide.ship_policy import load_policy
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
    judged = [JudgedRun(run, decide(run, policy, run=str(n))) for n, run in enumerate(runs)]
    return judge_runs(judged, policy)


def test_runs_alike_are_not_given_a_dimension() -> None:
    assert find_dimensions([measured(1.6), measured(1.5)]) == ()
    assert find_dimensions([measured(1.6)]) == ()
    loads = [with_candidate(measured(1.6), requests_per_s=r) for r in (1.0, 9.0)]
    assert [d.name for d in find_dimensions(loads)] == ["requests/s"]
    bare = [with_candidate(ab(s), requests_per_s=r) for s, r in ((1.9, 0.5), (1.0, 20.0))]
    assert "let k fall to 0 above 0.5" in ". ".join(together(*bare).says)


@pytest.mark.slow
def test_a_crossing_s_interval_covers_the_truth() -> None:
    """400 experiments at 4 loads, 8 blocks each: nominal 95 %."""
    rng = np.random.default_rng(7)
    loads, truth = np.array([1.0, 4.0, 16.0, 64.0]), 20.0
    hits = 0
    for _ in range(400):
        points = []
        for load in loads:
            log = 0.25 * np.log(truth / load)
            blocks = log + rng.normal(0, 0.08, 8)
            error = float(blocks.std(ddof=1)) / np.sqrt(8)
            made = gain("tpot_p50", float(np.exp(blocks.mean())), error=error, blocks=8)
            points.append((float(load), made))
        found = find_crossing(points, 1.0)
        hits += found is not None and found[1].low <= truth <= found[1].high
    assert 0.93 <= hits / 400 <= 0.985, hits
    assert student_quantile(0.975, 7) > 2.3


def test_ends_outside_of_what_was_measured_are_said() -> None:
    points = [(0.0, gain("tpot_p50", 1.5)), (1.0, gain("tpot_p50", 1.29, error=0.05))]
    found = find_crossing(points, 1.3)
    assert found is not None and found[0] and found[1].high == np.inf
    assert find_crossing(points, 1.0) is None
    rising = find_crossing([(0.0, gain("x", 0.5)), (2.0, gain("x", 2.0))], 1.0)
    assert rising is not None and not rising[0]
    assert rising[1].estimate == pytest.approx(1.0)


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
    assert "It does not pay at temperature 0.8" in " ".join(
        shown.stdout.replace("\u2502", " ").split()
    )
    page = out / "page.html"
    found = runner.invoke(app, ["lab", "decide", str(out), "--html", str(page)])
    assert found.exit_code == 1 and "temperature" in page.read_text("utf-8")


def test_forced_acceptance_is_refused_with_the_reason(tmp_path: Path) -> None:
    cells = [{"values": {"forced_acceptance": 0.5}, "folder": "x"}]
    write_json(tmp_path / "grid.json", {"kind": "grid", "forced": True, "cells": cells})
    with pytest.raises(ConfigError, match="not those of a draft"):
        ab_folders([tmp_path])
