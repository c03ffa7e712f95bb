"""What is timed at a start, in which order, and how it is kept on disk."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.control.cost import RooflineCost, StepShape
from foretoken.control.learned.calibration import calibrate, draft_lengths, promised, step_shapes
from foretoken.control.learned.cost import LearnedCost
from foretoken.control.learned.cost_file import CostFile, CostKey, SavedCosts, cache_folder

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
    target = LearnedCost(timed, sd=0.1).to_dict()
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
    cost = LearnedCost(promised(roof, SHAPES), sd=0.4)
    for shape in SHAPES:
        want = roof.seconds(shape).seconds
        assert cost.seconds(shape).seconds == pytest.approx(want, rel=0.35)


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
