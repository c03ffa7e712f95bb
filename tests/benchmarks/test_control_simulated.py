"""The simulation behind the table of "Costs that are never tried", on runs of a few steps."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.simulate.drafting import SimulatedDrafting
from foretoken.control.cost import StepShape
from tests.outside import module_outside

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The benchmark, as a module."""
    yield from module_outside("benchmarks", "control_simulated")


def told(bench: ModuleType, spread: float, seed: int, rows: int) -> float:
    """Seconds that control expects of such a step before the first one."""
    arm = bench.MistimedControl(spread=spread, seed=seed)
    control = arm.build(bench.MACHINE, SimulatedDrafting(bench.MACHINE).missing)
    [found] = [one for one in control.step_by_rows() if one["rows"] == rows]
    return float(found["seconds"])


def test_starts_are_wrong_by_the_spread(bench: ModuleType) -> None:
    true = bench.PASSES.seconds(StepShape(64)).seconds
    right = [told(bench, 0.0, seed, 64) / true for seed in range(6)]
    wrong = [told(bench, 0.8, seed, 64) / true for seed in range(6)]
    assert max(right) / min(right) < 1.3
    assert max(wrong) / min(wrong) > 2.0


def test_a_start_is_the_same_each_time_and_control_is_one_of_its_arms(bench: ModuleType) -> None:
    case = bench.Case(in_flight=2, steps=80)
    start = bench.play(case, 3)
    assert start == bench.play(case, 3) != bench.play(case, 4)
    assert start.best >= 1.0 and 0.5 < start.of_best < 1.5
    assert start.of_best == pytest.approx(start.control / start.best)


def test_the_documents_rows_are_the_benchmarks(bench: ModuleType) -> None:
    written = (BENCHMARKS / "LOG.md").read_text("utf-8")
    lost = [case for case in bench.CASES if bench.named(case) not in written]
    assert not lost, "put the table of benchmarks/control_simulated.py in benchmarks/LOG.md"


def test_the_command_ends_with_one_line_of_json() -> None:
    call = [sys.executable, "control_simulated.py", "--quick", "--in-flight", "2", "4"]
    done = subprocess.run(call, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert document["benchmark"] == "control_simulated" and document["quick"]
    cases = document["results"]["cases"]
    assert [one["case"]["in_flight"] for one in cases] == [2, 4]
    assert all(one["starts"][0]["best"] >= 1.0 for one in cases)
    assert "busy" not in done.stdout  # nothing is timed
