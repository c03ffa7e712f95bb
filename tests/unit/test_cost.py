"""What steps and drafts take: models, what is timed at a start, and how it is kept."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate.machine import LineCost
from foretoken.control.adaptive.allocation_inputs import AllocationInputs, DrafterView, OutputTokens
from foretoken.control.cost import PlainCost, RooflineCost, StepShape
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.calibration import calibrate, draft_lengths, promised, step_shapes
from foretoken.control.learned.cost_file import (
    CostFile,
    CostKeeper,
    CostKey,
    SavedCosts,
    cache_folder,
)
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.target_step_time import TargetStepTimeModel


def test_plain_steps_of_other_sizes_stand_in_against_speculation() -> None:
    cost = PlainCost()
    cost.observe(StepShape(4, sequences=4), 2.0)
    assert cost.seconds(StepShape(1, sequences=1)) == 0.5
    assert cost.seconds(StepShape(9, sequences=9)) == 2.0


def test_a_line_counts_rows_after_the_first() -> None:
    assert LineCost(1.0, 0.1).seconds(StepShape(rows=6)) == 1.5


def roofline(**fields: Any) -> RooflineCost:
    """A device that reads 100 bytes and multiplies 1000 times a second."""
    given = {"weight_bytes": 50.0, "bandwidth": 100.0, "flops_per_s": 1000.0, **fields}
    return RooflineCost(kv_bytes=lambda _: 2.0, flops=lambda context: 10.0 + context, **given)


def test_a_roofline_is_the_larger_of_reading_and_multiplying() -> None:
    assert roofline().seconds(StepShape(1)) == 0.5
    assert roofline().seconds(StepShape(100)) == 1.0
    assert roofline(side_by_side=False).seconds(StepShape(75)) == 1.25
    with_context = StepShape(2, sequences=2, context=25.0)
    assert roofline().seconds(with_context) == (50 + 2 * 25 * 2) / 100
    assert roofline(floor_s=3.0).seconds(StepShape(1)) == 3.0
    ranks = roofline(exchange_s=1.0, exchange_row_s=0.5)
    assert ranks.seconds(StepShape(4)) == 0.5 + 1.0 + 2.0


def test_more_rows_read_more_experts() -> None:
    cost = roofline(expert_bytes=50.0, expert_share=0.5)
    assert cost.seconds(StepShape(1)) == 0.75
    assert cost.seconds(StepShape(2)) == 0.875
    told = roofline(expert_bytes=50.0, expert_share=0.5, experts=8.0)
    assert told.seconds(StepShape(2)) == 0.875
    assert told.seconds(StepShape(2, experts=4.0)) == 0.75


KEY = CostKey(
    model="m", precision="bfloat16", drafters="d", device="cpu", threads=2, kernels="k",
    page_size=16,
)  # fmt: skip
SHAPES = step_shapes(most_sequences=64, most_rows=2048, most_context=2048)


def seconds_of(shape: StepShape) -> float:
    return 1e-3 + 1e-4 * shape.rows + 1e-6 * shape.sequences * shape.context / 8


class FakeMachine:
    """Takes time that only its own clock shows."""

    def __init__(self, times: float = 1.0) -> None:
        self.now, self.times = 0.0, times
        self.runs: list[StepShape] = []

    def clock(self) -> float:
        return self.now

    def measure(self, shape: StepShape) -> float:
        self.runs.append(shape)
        self.now += self.times * seconds_of(shape)
        return self.times * seconds_of(shape)


def saved(timed: list[tuple[StepShape, float]]) -> SavedCosts:
    target = TargetStepTimeModel(timed, sd=0.1).to_dict()
    return SavedCosts(target=target, drafters={"a": {"one_pass": True}}, timed=tuple(timed))


def test_shapes_stay_within_the_engine() -> None:
    assert 24 <= len(SHAPES) <= 40
    assert len(set(SHAPES)) == len(SHAPES)
    small = step_shapes(most_sequences=4, most_rows=64, most_context=512)
    assert small
    assert all(shape.sequences <= 4 and shape.rows <= 64 for shape in small)
    assert all(shape.context <= 512 for shape in small)
    alone = step_shapes(most_sequences=1, most_rows=1, most_context=33)
    assert set(alone) == {StepShape(1, 1, 32), StepShape(1, 1, 16)}


def test_every_shape_is_timed_three_times_in_changing_order() -> None:
    machine = FakeMachine()
    found = calibrate(machine.measure, SHAPES, clock=machine.clock)
    assert [shape for shape, _ in found] == SHAPES
    assert len(machine.runs) == 3 * len(SHAPES)
    assert machine.runs[len(SHAPES) : 2 * len(SHAPES)] != SHAPES
    assert all(seconds == pytest.approx(seconds_of(shape)) for shape, seconds in found)


@pytest.mark.parametrize("times", [1.0, 30.0, 1e4])
def test_a_slow_machine_times_less(times: float) -> None:
    machine = FakeMachine(times)
    found = calibrate(machine.measure, SHAPES, clock=machine.clock)
    dearest = times * max(seconds_of(shape) for shape in machine.runs)
    assert found
    assert machine.now <= 3.0 + dearest


def test_the_first_run_warms_up() -> None:
    cold = set(SHAPES)

    def measure(shape: StepShape) -> float:
        slow = 10.0 if shape in cold else 1.0
        cold.discard(shape)
        return slow * seconds_of(shape)

    found = calibrate(measure, SHAPES)
    assert all(seconds == pytest.approx(seconds_of(shape)) for shape, seconds in found)


def test_a_roofline_stands_in() -> None:
    roof = RooflineCost(
        weight_bytes=1e9, kv_bytes=lambda _: 1e5, flops=lambda _: 1e9, bandwidth=1e10,
        flops_per_s=1e11,
    )  # fmt: skip
    cost = TargetStepTimeModel(promised(roof, SHAPES), sd=0.4)
    for shape in SHAPES:
        want = roof.seconds(shape)
        assert cost.seconds(shape) == pytest.approx(want, rel=0.35)


def test_lengths_of_drafts() -> None:
    assert draft_lengths(1) == (1,)
    assert draft_lengths(5) == (1, 5)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = CostFile(KEY, tmp_path / "new")
    assert file.read() is None
    given = saved([(shape, seconds_of(shape)) for shape in SHAPES])
    assert file.write(given)
    assert file.read() == given
    assert [path.suffix for path in file.path.parent.iterdir()] == [".json"]
    file.drop()
    assert file.read() is None
    file.drop()


@pytest.mark.parametrize(
    "change", [{"model": "n"}, {"threads": 1}, {"precision": "int8"}, {"kernels": "z"}]
)
def test_another_engine_has_another_file(tmp_path: Path, change: dict[str, object]) -> None:
    CostFile(KEY, tmp_path).write(saved([(StepShape(1), 1.0)]))
    other = CostFile(replace(KEY, **change), tmp_path)  # type: ignore[arg-type]
    assert other.read() is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 99, "key": {}}']
)
def test_broken_files_are_no_files(tmp_path: Path, text: str) -> None:
    file = CostFile(KEY, tmp_path)
    file.path.write_text(text)
    assert file.read() is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, "x", None])
def test_impossible_times_are_no_file(tmp_path: Path, seconds: object) -> None:
    file = CostFile(KEY, tmp_path)
    file.write(saved([(StepShape(1), 1.0)]))
    document = json.loads(file.path.read_text())
    document["timed"][0][-1] = seconds
    file.path.write_text(json.dumps(document))
    assert file.read() is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = CostFile(KEY, tmp_path / "file" / "below")
    assert not file.write(saved([(StepShape(1), 1.0)]))
    assert file.read() is None
    file.drop()


def test_the_folder_is_that_of_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "foretoken" / "costs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder().is_absolute()


ROOT = Path(__file__).parents[2]
TIMED = [(StepShape(rows, rows, 32.0), 1e-3 + 1e-4 * rows) for rows in (1, 2, 4, 8, 16, 32)]


class Engine:
    """What one engine knows and keeps."""

    def __init__(self, folder: Path) -> None:
        self.file = CostFile(KEY, folder)
        self.target = TargetStepTimeModel(TIMED, sd=0.1, passes_only=True)
        self.keeper = CostKeeper(self.file, self.known)

    def known(self) -> SavedCosts:
        return SavedCosts(target=self.target.to_dict(), drafters={}, timed=tuple(TIMED))

    def serve(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.target.observe(StepShape(4, 4, 32.0), seconds)
            self.keeper.passed(seconds)
        for thread in threading.enumerate():
            if thread.name == "costs":
                thread.join()


def test_what_was_learnt_is_written_while_serving_and_at_the_end(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(59, 1.0)
    assert engine.file.read() is None
    engine.serve(2, 1.0)
    kept = engine.file.read()
    assert kept is not None and kept.target["passes_only"], "too few steps"
    engine.serve(300, 0.1)
    engine.keeper.close()
    kept = engine.file.read()
    assert kept is not None and not kept.target["passes_only"]
    again = TargetStepTimeModel.from_dict(kept.target)
    shape = StepShape(4, 4, 32.0)
    assert abs(again.seconds(shape) / engine.target.seconds(shape) - 1.0) < 0.25
    written = engine.file.path.stat().st_mtime_ns
    engine.keeper.close()
    assert engine.file.path.stat().st_mtime_ns == written, "nothing new"


def test_a_process_that_did_little_writes_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(9, 0.1)
    engine.keeper.close()
    assert engine.file.read() is None


def test_keeping_needs_no_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = Engine(tmp_path / "file" / "below")
    engine.serve(61, 1.0)
    engine.serve(5, 1.0)
    engine.keeper.close()


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    """It does nothing but write and is killed in the middle of that."""
    engine = Engine(tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.unit.test_cost import Engine\n"
        "engine = Engine(Path(sys.argv[1]))\n"
        "while True:\n    engine.file.write(engine.known())\n    print('.', flush=True)\n"
    )
    for written in (1, 2, 5, 12):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
        )  # fmt: skip
        with child:
            assert child.stdout is not None
            for _ in range(written):
                assert child.stdout.readline()
            child.kill()
        assert engine.file.read() == engine.known()


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """A half-written file has another name until it is whole."""
    engine = Engine(tmp_path)
    old, new, others = (
        tmp_path / name
        for name in (f"{KEY.digest}a.tmp", f"{KEY.digest}b.tmp", "somebody-else.tmp")
    )
    for left in (old, new, others):
        left.write_text('{"format": 2, "key"')
    for left in (old, others):
        os.utime(left, (time.time() - 3600,) * 2)
    assert engine.file.write(engine.known())
    assert {path.name for path in tmp_path.iterdir()} == {
        engine.file.path.name, new.name, others.name
    }  # fmt: skip
    assert engine.file.read() == engine.known()


DRAFTS = [DraftShape(n, p, n * p, 0.0) for n in (1, 2, 4, 8, 16) for p in (1, 2, 4)]


def planted(shape: DraftShape) -> float:
    """Seconds of drafting; a sequence takes some once, whatever its drafts."""
    return 0.2 + 0.15 * shape.sequences + 0.1 * shape.passes + 0.02 * shape.rows


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_every_length_is_priced_as_it_was_learnt(count: int, length: int) -> None:
    cost = DrafterCost([(shape, planted(shape)) for shape in DRAFTS], sd=0.05)
    none = np.zeros(count, dtype=np.int64)
    view = DrafterView(
        name="draft", cost=cost, max_drafts=4, max_drafts_N=np.full(count, 4), missing_N=none,
        windowed_N=none.astype(bool),
    )  # fmt: skip
    tokens_N = np.full(count, 100.0)
    acceptance = LearnedAcceptance({"draft": 0.6})
    ids = [str(place) for place in range(count)]
    for request_id in ids:
        acceptance.begin(request_id, "")
    inputs = AllocationInputs(
        ids=ids, classes=[""] * count, context=0.0, outputs=OutputTokens(tokens_N, tokens_N),
        left_s=np.zeros(count), plain_s=1.0, prompt_s=0.0,
        rows_s=np.full(4 * count + 1, 1.0), acceptance=acceptance,
    )  # fmt: skip
    [option] = inputs.options([view])
    priced = option.depth_s[length] + option.slot_s * count * length + option.start_s.sum()
    shape = DraftShape(count, length, count * length, 0.0)
    assert priced == pytest.approx(planted(shape), rel=0.02)
