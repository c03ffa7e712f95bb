"""The column of a mixture's experts: rows of one draft are told from rows of many sequences.

The guarded bugs: all rows priced alike, shares learnt from where nothing can be told, and a model
without experts that is priced by anything but what it was priced by before.
"""

import random

import pytest

from foretoken.control.cost import RooflineCost, StepShape
from foretoken.control.learned.calibration import step_shapes
from foretoken.control.learned.experts_read import ExpertsRead
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.shape.mixtures.experts import share_read

COUNT, USED = 128, 8
SHAPES = step_shapes(most_sequences=64, most_rows=1024, most_context=2048)
STEPS = [StepShape(num * (1 + k), num, 60.0) for num in (1, 2, 4, 8, 16) for k in (0, 1, 3)]


def planted(shape: StepShape) -> float:
    """What every step reads, its rows and its experts."""
    return 6e-3 + 1e-4 * shape.rows + 2.5e-4 * shape.experts


def started(read: ExpertsRead | None = None) -> TargetStepTimeModel:
    """Timed as an engine does at its start: sequences choose apart, a draft repeats one token."""
    start = ExpertsRead(COUNT, USED, (1.0, 0.0, 1.0))
    timed = [shape._replace(experts=start.expected(shape)) for shape in SHAPES]
    return TargetStepTimeModel(
        [(shape, planted(shape)) for shape in timed],
        sd=0.1,
        experts=read or ExpertsRead(COUNT, USED),
    )


def served(cost: TargetStepTimeModel, truth: ExpertsRead, steps: int = 1500) -> None:
    draw = random.Random(1)
    for _ in range(steps):
        shape = draw.choice(STEPS)
        shape = shape._replace(experts=truth.expected(shape) * draw.lognormvariate(0.0, 0.02))
        cost.observe(shape, planted(shape) * draw.lognormvariate(0.0, 0.05))


def test_rows_that_choose_apart_read_what_the_formula_says() -> None:
    read = ExpertsRead(COUNT, USED)
    assert read.expected(StepShape(1)) == USED
    for shape in (StepShape(6, 1), StepShape(6, 6), StepShape(6, 2), StepShape(6, 1, 3.0, 6)):
        assert read.expected(shape) == pytest.approx(COUNT * share_read(USED / COUNT, 6.0))
    alike = ExpertsRead(COUNT, USED, (1.0, 0.0, 0.0))
    assert alike.expected(StepShape(6, 1)) == alike.expected(StepShape(9, 1, 4.0, 9)) == USED


@pytest.mark.parametrize("shape", [StepShape(1), StepShape(4, 4), StepShape(39, 5, 9.0, 36)])
def test_a_curve_is_its_steps(shape: StepShape) -> None:
    read = ExpertsRead(COUNT, USED, (0.9, 0.3, 0.6))
    steps = [read.expected(shape._replace(rows=shape.rows + more)) for more in range(9)]
    assert read.curve(shape, 8) == pytest.approx(steps)
    cost = started(read)
    times = [cost.seconds(shape._replace(rows=shape.rows + more)) for more in range(9)]
    assert cost.curve(shape, 8) == pytest.approx(times)


@pytest.mark.parametrize("draft", [0.15, 0.5, 1.0])
def test_what_rows_of_a_draft_add_is_learnt(draft: float) -> None:
    truth, read = ExpertsRead(COUNT, USED, (0.8, draft, 1.0)), ExpertsRead(COUNT, USED)
    served(started(read), truth)
    for shape in STEPS:
        assert read.expected(shape) == pytest.approx(truth.expected(shape), rel=0.06), shape


def test_rows_of_one_draft_are_told_from_rows_of_many_sequences() -> None:
    truth, cost = ExpertsRead(COUNT, USED, (1.0, 0.15, 1.0)), started()
    one, many = StepShape(8, 1, 60.0), StepShape(8, 8, 60.0)
    assert cost.seconds(one) > 0.9 * cost.seconds(many), "before a step it is not known"
    served(cost, truth)
    for shape in (one, many):
        wanted = planted(shape._replace(experts=truth.expected(shape)))
        assert cost.seconds(shape) == pytest.approx(wanted, rel=0.1), shape
    assert cost.seconds(one) < 0.7 * cost.seconds(many)
    assert cost.describe()["expert_s"] == pytest.approx(2.5e-4, rel=0.3)


def test_where_all_are_read_nothing_breaks() -> None:
    """As many as there are, more by pieces of a prompt, and rows that have all."""
    full, every = ExpertsRead(COUNT, USED), ExpertsRead(4, 4)
    for _ in range(100):
        full.observe(StepShape(512, 1, 256.0, 512, experts=2.0 * COUNT), 1)
        every.observe(StepShape(8, 2, experts=4.0), 1)
    assert full.expected(StepShape(512, 1, 256.0, 512)) == pytest.approx(COUNT, rel=0.02)
    assert every.expected(StepShape(8, 2)) == every.expected(StepShape(1)) == 4.0


def test_a_later_process_begins_with_it() -> None:
    cost = started()
    served(cost, ExpertsRead(COUNT, USED, (0.8, 0.2, 1.0)))
    again = TargetStepTimeModel.from_dict(cost.to_dict())
    for shape in STEPS:
        assert again.seconds(shape) == pytest.approx(cost.seconds(shape), rel=0.1), shape
    assert again.describe()["experts"] == cost.describe()["experts"]
    assert again.describe()["expert_s"] == pytest.approx(cost.describe()["expert_s"], rel=0.4)


def test_a_model_without_experts_has_no_such_column() -> None:
    """What it is told of experts changes nothing, to the last bit."""
    plain, told = (
        TargetStepTimeModel([(shape, planted(shape)) for shape in SHAPES], sd=0.1) for _ in range(2)
    )
    draw = random.Random(2)
    for _ in range(300):
        shape, noise = draw.choice(STEPS), draw.lognormvariate(0.0, 0.1)
        plain.observe(shape, noise * planted(shape))
        told.observe(shape._replace(experts=draw.random() * COUNT), noise * planted(shape))
    assert "expert_s" not in plain.describe() and plain.to_dict()["experts"] is None
    assert told.describe() == plain.describe()
    assert (told.curve(StepShape(4, 4, 60.0), 20) == plain.curve(StepShape(4, 4, 60.0), 20)).all()


def test_a_start_without_timing_knows_what_an_expert_takes() -> None:
    """A roofline says so of the same steps if their rows chose alike; not all are taken as read."""
    roofline = RooflineCost(
        weight_bytes=6e6, expert_bytes=32e6, expert_share=USED / COUNT, experts=COUNT,
        kv_bytes=lambda _: 0.0, flops=lambda _: 0.0, bandwidth=1e9, flops_per_s=1e9,
    )  # fmt: skip
    read = ExpertsRead(COUNT, USED)
    shapes = [*SHAPES, *read.alike(SHAPES)]
    cost = TargetStepTimeModel(
        [(shape, roofline.seconds(shape)) for shape in shapes], sd=0.4, experts=read
    )
    assert cost.seconds(StepShape(1)) == pytest.approx(8e-3, rel=0.1)
    assert cost.seconds(StepShape(64, 64)) == pytest.approx(37.5e-3, rel=0.1)
    assert cost.describe()["expert_s"] == pytest.approx(2.5e-4, rel=0.2)
