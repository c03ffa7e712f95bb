"""What holds of the statistics whatever is measured: units, orders, ends, and shares of error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.lab.stats.intervals import Floats, quantile_interval, share_interval
from foretoken.lab.stats.ratios import (
    Sample,
    Statistic,
    WeightedQuantile,
    at_level,
    clustered_interval,
    level_of_look,
    paired_ratio,
    weighted_mean,
)
from foretoken.lab.stats.shrinkage import request_quantiles
from foretoken.lab.stats.steady import BATCH, is_steady, measure_drift, warm_up_length

QUANTILES = st.sampled_from((0.1, 0.5, 0.9, 0.99))
SCALES = st.floats(0.001, 1000.0)
STATISTICS = st.sampled_from((weighted_mean, WeightedQuantile(0.5), WeightedQuantile(0.9)))
SEEDS = st.integers(0, 10_000)


def times(seed: int, count: int) -> Floats:
    """Positive, skewed, as latencies are."""
    return np.random.default_rng(seed).lognormal(0.0, 0.5, count)


def in_blocks(seed: int, blocks: int, each: int) -> Sample:
    """Times of some starts of a server."""
    own = np.repeat(np.arange(blocks), each)
    paces = np.random.default_rng(seed + 1).normal(1.0, 0.05, blocks)
    return Sample(times(seed, blocks * each) * paces[own], own)


@given(SEEDS, st.integers(1, 500), QUANTILES, SCALES)
def test_intervals_of_quantiles_hold_the_estimate_in_any_unit(
    seed: int, count: int, q: float, scale: float
) -> None:
    values = times(seed, count)
    one, other = quantile_interval(values, q), quantile_interval(values * scale, q)
    assert one.low <= one.estimate <= one.high
    assert other.estimate == pytest.approx(one.estimate * scale)
    assert other.low == pytest.approx(one.low * scale)
    wide = quantile_interval(values, q, 0.99)
    assert wide.low <= one.low and one.high <= wide.high


@given(st.integers(1, 500), st.floats(0.0, 1.0))
def test_intervals_of_shares_hold_the_share(n: int, part: float) -> None:
    found = share_interval(round(part * n), n)
    assert 0.0 <= found.low <= found.estimate <= found.high <= 1.0


@given(SEEDS, SEEDS, st.integers(3, 8), STATISTICS, SCALES)
def test_ratios_turn_round_and_have_no_unit(
    one: int, other: int, blocks: int, statistic: Statistic, scale: float
) -> None:
    top, bottom = in_blocks(one, blocks, 12), in_blocks(other, blocks, 12)
    there = paired_ratio(top, bottom, statistic)
    back = paired_ratio(bottom, top, statistic)
    assert there.low <= there.estimate <= there.high
    assert back.estimate == pytest.approx(1 / there.estimate)
    assert back.low == pytest.approx(1 / there.high)
    scaled = Sample(top.values_N * scale, top.blocks_N)
    slow = paired_ratio(scaled, bottom, statistic)
    assert slow.high == pytest.approx(there.high * scale)
    order = np.random.default_rng(0).permutation(top.values_N.size)
    mixed = Sample(top.values_N[order], top.blocks_N[order])
    again = paired_ratio(mixed, bottom, statistic)
    assert again.low == pytest.approx(there.low), "the order within blocks does not matter"


@given(SEEDS, st.integers(3, 8), SCALES)
def test_an_arm_against_itself_is_exactly_one(seed: int, blocks: int, scale: float) -> None:
    own = in_blocks(seed, blocks, 10)
    slower = Sample(own.values_N * scale, own.blocks_N)
    for ratio, known in ((paired_ratio(own, own, weighted_mean), 1.0),
                         (paired_ratio(slower, own, weighted_mean), scale)):  # fmt: skip
        assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((known,) * 3)


@given(SEEDS, st.integers(3, 8), st.integers(1, 10))
def test_names_of_blocks_do_not_matter(seed: int, blocks: int, step: int) -> None:
    own = in_blocks(seed, blocks, 10)
    renamed = Sample(own.values_N, own.blocks_N * step + 7)
    assert clustered_interval(renamed, weighted_mean) == clustered_interval(own, weighted_mean)


@given(SEEDS, st.integers(3, 20), st.integers(1, 6))
def test_later_looks_are_wider(seed: int, blocks: int, look: int) -> None:
    found = paired_ratio(in_blocks(seed, blocks, 8), in_blocks(seed + 1, blocks, 8), weighted_mean)
    now, later = (at_level(found, blocks, level_of_look(0.95, n)) for n in (look, look + 1))
    assert later.low < now.low <= found.estimate <= now.high < later.high


@given(st.floats(0.5, 0.999), st.integers(1, 400))
def test_looks_without_end_share_one_error(level: float, looks: int) -> None:
    spent = sum(1 - level_of_look(level, n) for n in range(1, looks + 1))
    assert spent == pytest.approx((1 - level) * looks / (looks + 1))


@given(SEEDS, st.integers(0, 300), SCALES)
def test_the_warm_up_is_whole_batches_of_the_first_half(
    seed: int, count: int, scale: float
) -> None:
    values = times(seed, count)
    cut = warm_up_length(values)
    assert cut % BATCH == 0 and 0 <= cut <= max(count / 2, 0)
    assert warm_up_length(values * scale) == cut or count < 4 * BATCH


@given(SEEDS, st.integers(20, 300), SCALES)
def test_drift_has_no_unit_and_turns_round(seed: int, count: int, scale: float) -> None:
    values = times(seed, count)
    there, back = measure_drift(values), measure_drift(values[::-1])
    assert measure_drift(values * scale).change == pytest.approx(there.change)
    if count % 10 == 0:  # batches are then the same from both ends
        assert back.change == pytest.approx(-there.change)
    assert is_steady(np.full(count, scale)), "what never changes is steady"


@given(st.integers(40, 300), st.floats(1.0, 10.0))
def test_what_grows_all_the_time_is_not_steady(count: int, growth: float) -> None:
    assert not is_steady(np.linspace(1.0, 1.0 + growth, count))


@given(SEEDS, st.integers(5, 60), SCALES)
def test_quantiles_of_requests_are_ordered_in_any_unit(seed: int, count: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    means, steps = rng.normal(2.0, 0.5, count), rng.integers(2, 40, count).astype(float)
    within = rng.uniform(0.5, 2.0, count)
    low, high = request_quantiles(means, steps, within, (0.1, 0.9))
    assert low.estimate <= high.estimate
    assert low.low <= low.estimate <= low.high
    [other] = request_quantiles(means * scale, steps, within * scale**2, (0.1,))
    assert other.estimate == pytest.approx(low.estimate * scale, rel=1e-5, abs=1e-9)
