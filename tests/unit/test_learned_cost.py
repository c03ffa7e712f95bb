"""The learnt costs of steps and drafts: planted costs found, noise and neighbours survived."""

import json
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.control.cost import StepShape
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.regression import Floats, Learner
from foretoken.control.learned.target_step_time import TargetStepTimeModel

SHAPES = [
    StepShape(rows, sequences, context)
    for rows, sequences in [
        *((1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64)),
        *((16, 4), (40, 8), (64, 16), (128, 64), (256, 64)),
    ]
    for context in (32.0, 1024.0)
] + [StepShape(rows, 1, rows / 2, rows) for rows in (16, 64, 128, 256)]
DRAFTS = [
    *(
        DraftShape(n, passes, n * passes, context)
        for n in (1, 2, 8, 32, 64)
        for passes in (1, 4)
        for context in (32.0, 1024.0)
    ),
    *(DraftShape(1, 0, 0, rows / 2, rows) for rows in (16, 64, 256)),
]


def planted(shape: StepShape) -> float:
    """A step of a machine that has a knee at 32 rows."""
    rows, sequences, context, prompt_rows, _ = shape
    seconds = 5e-3 + 2e-4 * min(rows, 32) + 6e-4 * max(rows - 32, 0) + 5e-5 * sequences
    return (
        seconds + 4e-7 * sequences * context + 1e-7 * rows * context + 3e-5 * (rows - prompt_rows)
    )


def planted_draft(shape: DraftShape) -> float:
    sequences, passes, rows, context, fed_rows = shape
    seconds = 2e-7 * rows * context + 2e-5 * rows
    if passes:
        seconds += 1e-4 + 1e-5 * sequences + 8e-4 * passes
    if fed_rows:
        seconds += 5e-4 + fed_rows * (3e-5 + 1e-8 * context)
    return seconds


def exact(sd: float = 0.1) -> TargetStepTimeModel:
    return TargetStepTimeModel([(shape, planted(shape)) for shape in SHAPES], sd=sd)


def noisy(seconds: float, draw: random.Random, noise: float = 0.2) -> float:
    spike = 4.0 if draw.random() < 0.01 else 1.0
    return seconds * math.exp(draw.gauss(0, noise) - noise**2 / 2) * spike


@pytest.mark.parametrize("seed", range(3))
def test_planted_costs_are_found_under_noise(seed: int) -> None:
    """The prior is wrong by up to half; 20 % noise, 1 % of the steps take four times as long."""
    draw = random.Random(seed)
    wrong = [(shape, planted(shape) * draw.uniform(0.6, 1.5)) for shape in SHAPES]
    cost = TargetStepTimeModel(wrong, sd=0.4)
    for _ in range(3000):
        shape = draw.choice(SHAPES)
        cost.observe(shape, noisy(planted(shape), draw))
    off = [math.log(cost.seconds(shape) / planted(shape)) for shape in SHAPES]
    assert abs(np.mean(off)) < 0.05
    assert np.median(np.abs(off)) < 0.05, np.round(off, 3)
    assert cost.error[0] == pytest.approx(0.135, rel=0.4)


@pytest.mark.parametrize("seed", range(3))
def test_planted_drafting_is_found_under_noise(seed: int) -> None:
    draw = random.Random(seed)
    wrong = [(shape, planted_draft(shape) * draw.uniform(0.6, 1.5)) for shape in DRAFTS]
    cost = DrafterCost(wrong, sd=0.4)
    for _ in range(3000):
        shape = draw.choice(DRAFTS)
        cost.observe(shape, noisy(planted_draft(shape), draw))
    for num in (1, 8, 64):
        want = [planted_draft(DraftShape(num, k, num * k, 500.0)) for k in range(1, 6)]
        assert cost.drafting(num, 5, 500.0)[1:] == pytest.approx(want, rel=0.1)
    assert cost.feeding(100, 50.0) == pytest.approx(
        planted_draft(DraftShape(1, 0, 0, 50.0, 100)), rel=0.1
    )


@pytest.mark.parametrize("times", [10.0, 0.2])
@pytest.mark.parametrize("lead", range(0, 16, 5))
def test_another_speed_of_the_machine_is_a_level(times: float, lead: int) -> None:
    """Beside the same steps on a machine that stays as it is: no ratio of costs differs."""
    draw = random.Random(lead)
    cost, steady = exact(), exact()

    def steps(num: int, times: float) -> None:
        for _ in range(num):
            shape = draw.choice(SHAPES)
            seconds = planted(shape) * math.exp(draw.gauss(0, 0.05))
            cost.observe(shape, times * seconds)
            steady.observe(shape, seconds)

    steps(300 + lead, 1.0)
    steps(15, times)
    assert cost.level == pytest.approx(times, rel=0.1)
    for num in (0, 200, 200):
        steps(num, times)
        ratios = [cost.seconds(s) / steady.seconds(s) for s in SHAPES]
        assert ratios == pytest.approx([ratios[0]] * len(SHAPES), rel=0.03)
        assert ratios[0] == pytest.approx(times, rel=0.1)


def test_what_is_wrong_with_a_rare_shape_is_no_speed_of_the_machine() -> None:
    """Eight rows more were timed at nothing; a tenth of the steps, 30 at a time, have them not."""
    plain, checking = StepShape(8, 8, 70.0), StepShape(16, 8, 70.0)
    found = []
    for seed in range(8):
        draw = random.Random(seed)
        cost = TargetStepTimeModel(
            [(StepShape(n, 8, 70.0), 4.5e-3) for n in (8, 12, 16, 32)], sd=0.1
        )
        for step in range(1400):
            shape, seconds = (plain, 4e-3) if step % 300 >= 270 else (checking, 4.6e-3)
            cost.observe(shape, noisy(seconds, draw, 0.08))
        found.append(cost.seconds(checking) / cost.seconds(plain))
    assert statistics.mean(found) == pytest.approx(1.15, abs=0.01)


def test_one_long_step_changes_nothing() -> None:
    cost = exact()
    for shape in SHAPES * 4:
        cost.observe(shape, planted(shape))
    before = cost.seconds(StepShape(4))
    cost.observe(StepShape(4), 100 * planted(StepShape(4)))
    for shape in SHAPES * 2:
        cost.observe(shape, planted(shape))
    assert cost.seconds(StepShape(4)) == pytest.approx(before, rel=0.03)


def test_a_wrong_prior_is_not_mistaken_for_a_slow_machine() -> None:
    """A data sheet is wrong where many rows are multiplied: few rows still cost what they did."""
    cost = TargetStepTimeModel([(shape, 5e-3 + 1e-4 * shape.rows) for shape in SHAPES], sd=0.4)
    for _ in range(100):
        cost.observe(StepShape(1, 1, 32.0), 5e-3)
    for _ in range(64):
        cost.observe(StepShape(64, 64, 32.0), 40e-3)
    assert cost.level == pytest.approx(1.0, rel=0.3)
    assert cost.seconds(StepShape(64, 64, 32.0)) == pytest.approx(40e-3, rel=0.1)
    assert cost.seconds(StepShape(1, 1, 32.0)) == pytest.approx(5e-3, rel=0.3)


@given(
    st.integers(1, 300), st.integers(1, 64), st.floats(0, 4000), st.integers(0, 300),
    st.integers(0, 40),
)  # fmt: skip
def test_a_curve_is_seconds_and_never_falls(
    rows: int, sequences: int, context: float, prompt_rows: int, most: int
) -> None:
    cost = exact()
    shape = StepShape(rows, sequences, context, min(rows, prompt_rows))
    curve = cost.curve(shape, most)
    assert curve.dtype == np.float64
    assert curve == pytest.approx(
        [cost.seconds(shape._replace(rows=rows + more)) for more in range(most + 1)]
    )
    assert (np.diff(curve) >= 0).all()


def test_rows_beyond_all_tables_are_on_the_last_line() -> None:
    cost = exact()
    far = [cost.seconds(StepShape(rows)) for rows in (3000, 4000, 5000)]
    assert far[2] - far[1] == pytest.approx(far[1] - far[0])
    assert cost.curve(StepShape(2000), 3000)[-1] == pytest.approx(far[2])


def test_what_is_visited_no_more_returns_to_the_prior() -> None:
    """A third of the truth is forgotten for what it was at the start, not for nothing."""
    cost = exact()
    shape = StepShape(256, 64, 32.0)
    for _ in range(300):
        cost.observe(shape, 1.1 * planted(shape))
    for _ in range(6000):
        cost.observe(StepShape(1, 1, 32.0), planted(StepShape(1, 1, 32.0)))
    assert cost.seconds(shape) == pytest.approx(planted(shape), rel=0.05)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scaling_all_times_scales_all_costs(scale: float) -> None:
    plain = exact()
    scaled = TargetStepTimeModel([(shape, scale * planted(shape)) for shape in SHAPES], sd=0.1)
    draw = random.Random(0)
    for _ in range(200):
        shape = draw.choice(SHAPES)
        seconds = noisy(planted(shape), draw)
        plain.observe(shape, seconds)
        scaled.observe(shape, scale * seconds)
    for shape in SHAPES:
        assert scaled.seconds(shape) == pytest.approx(scale * plain.seconds(shape), rel=1e-6)


def test_costs_come_back_from_a_file() -> None:
    cost = exact()
    draw = random.Random(0)
    for _ in range(1000):
        shape = draw.choice(SHAPES)
        cost.observe(shape, 1.3 * planted(shape) * math.exp(draw.gauss(0, 0.02)))
    again = TargetStepTimeModel.from_dict(json.loads(json.dumps(cost.to_dict())))
    for shape in [*SHAPES, StepShape(5, 1, 300.0), StepShape(24, 3, 800.0, 20)]:
        assert cost.seconds(shape) == pytest.approx(1.3 * planted(shape), rel=0.07)
        assert again.seconds(shape) == pytest.approx(1.3 * planted(shape), rel=0.07)

    drafter = DrafterCost([(shape, planted_draft(shape)) for shape in DRAFTS], sd=0.1)
    known = DrafterCost.from_dict(json.loads(json.dumps(drafter.to_dict())))
    assert known.drafting(3, 6, 70.0) == pytest.approx(drafter.drafting(3, 6, 70.0), rel=0.01)
    assert known.feeding(90, 40.0) == pytest.approx(drafter.feeding(90, 40.0), rel=0.01)


def test_drafting_begins_at_nothing() -> None:
    drafter = DrafterCost([(shape, planted_draft(shape)) for shape in DRAFTS], sd=0.1)
    curve = drafter.drafting(4, 7, 200.0)
    assert curve[0] == 0.0
    assert len(curve) == 8
    assert (np.diff(curve) > 0).all()
    assert drafter.feeding(0, 100.0) == 0.0
    assert drafter.drafting(4, 100, 200.0)[:8] == pytest.approx(curve)


def one_pass_s(sequences: int, rows: int) -> float:
    return 1e-3 + 2e-5 * sequences + 1e-4 * rows


def one_pass_drafter() -> DrafterCost:
    shapes = [DraftShape(n, 1, n * k, 0.0) for n in (1, 4, 16, 64) for k in (1, 5)]
    prior = [(shape, one_pass_s(shape.sequences, shape.rows)) for shape in shapes]
    return DrafterCost(prior, sd=0.1, one_pass=True)


def test_one_pass_costs_the_rows_of_all_its_drafts() -> None:
    """Drafts of a parallel head come at once, and in a batch each of them takes time."""
    curve = one_pass_drafter().drafting(8, 5, 0.0)
    assert curve == pytest.approx([0.0] + [one_pass_s(8, 8 * k) for k in range(1, 6)], rel=0.03)


def test_one_pass_is_not_taken_for_several() -> None:
    """A step says how deep its drafts were, which is not how many passes they took."""
    drafter = one_pass_drafter()
    for _ in range(400):
        drafter.observe(DraftShape(8, 5, 40, 0.0), one_pass_s(8, 40))
    assert drafter.drafting(8, 5, 0.0)[5] == pytest.approx(one_pass_s(8, 40), rel=0.02)


def test_a_resting_drafter_slows_down_with_its_target() -> None:
    target = exact()
    drafter = DrafterCost([(s, planted_draft(s)) for s in DRAFTS], sd=0.1, machine=target)
    shape, draft = StepShape(4, 1, 32.0), DraftShape(1, 4, 4, 32.0)

    def step(times: float, *, drafts: bool) -> float:
        target.observe(shape, times * planted(shape))
        if drafts:
            drafter.observe(draft, times * planted_draft(draft))
        return float(drafter.drafting(1, 4, 32.0)[4]) / planted_draft(draft)

    for _ in range(50):
        step(1.0, drafts=True)
    for _ in range(50):
        found = step(8.0, drafts=False)
    assert found == pytest.approx(8.0, rel=0.05)
    for _ in range(50):
        assert step(8.0, drafts=True) == pytest.approx(8.0, rel=0.05)
    for _ in range(50):
        assert step(1.0, drafts=True) < 10.0
    assert step(1.0, drafts=True) == pytest.approx(1.0, rel=0.05)


def test_nothing_impossible_is_learnt() -> None:
    cost = exact()
    before = cost.seconds(StepShape(1))
    for seconds in (0.0, -1.0, math.inf, math.nan):
        for _ in range(20):
            cost.observe(StepShape(1), seconds)
    assert cost.seconds(StepShape(1)) == before
    assert math.isnan(cost.error[0])
    assert cost.describe()["error_p50"] is None
    json.dumps(cost.describe())


def test_coefficients_are_the_best_that_are_not_negative() -> None:
    """The conditions of Karush, Kuhn and Tucker: no coefficient would rather be another."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        columns = draw.normal(size=(30, 6)) * draw.uniform(0.1, 10, size=6)
        points = [((float(index),), 1.0) for index in range(30)]

        def features(shapes: Floats, columns: Floats = columns) -> Floats:
            return np.take(columns, shapes[:, 0].astype(int), axis=0)

        learner = Learner(
            features, points, sd=0.1, slopes=range(0), knots=(),
        )  # fmt: skip
        precision = np.linalg.inv(learner.covariance)
        moments = (columns / 0.1).T @ np.full(30, 10.0)
        found = learner.coefficients
        slope = precision @ found - moments
        assert (found >= 0.0).all()
        assert slope[found > 0.0] == pytest.approx(0.0, abs=1e-5 * np.abs(moments).max())
        assert (slope[found == 0.0] >= -1e-5 * np.abs(moments).max()).all()


@pytest.mark.parametrize("seed", range(24))
def test_no_times_break_it(seed: int) -> None:
    """Times that fit nothing, shapes without any cost, clocks that jump: estimates stay numbers."""
    draw = random.Random(seed)
    known_steps = [(StepShape(r, r, 32.0), 1e-3 + 3e-5 * r) for r in (1, 2, 8, 64)]
    target = TargetStepTimeModel(known_steps, sd=0.1, passes_only=True)
    known = [
        (DraftShape(n, p, n * p, context, 0), 1e-4 + p * 5e-5)
        for n in (1, 4)
        for p in (1, 5)
        for context in (32.0, 512.0)
    ]
    known.append((DraftShape(0, 0, 0, 16.0, 64), 1e-4 * draw.random()))
    drafter = DrafterCost(known, sd=0.1, machine=target)
    for _ in range(600):
        count, passes = draw.choice([1, 3, 8]), draw.choice([0, 1, 2, 5])
        context, fed = draw.choice([0.0, 50.0, 300.0]), draw.choice([0, 0, 0, 5, 130, 900])
        noise = draw.lognormvariate(0.0, 0.3)
        drafting = DraftShape(count, passes, count * passes, context, fed)
        drafter.observe(drafting, noise * draw.choice([1e-9, 1e-6, 1e-4, 3e-4, 1e-2, 5.0]))
        step = StepShape(count * (1 + passes), count, context, draw.choice([0, 0, count]))
        target.observe(step, noise * draw.choice([1e-9, 1e-5, 1e-3, 2e-3, 1.0]))
    assert np.isfinite(drafter.drafting(4, 5, 100.0)).all()
    assert np.isfinite(target.curve(StepShape(4, 4, 10.0), 20)).all()
