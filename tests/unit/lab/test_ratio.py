"""Ratios of two arms: the bootstrap's parts, its coverage, and how much more to measure."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate.ab_draws import AbLaw, DraftLaw, draw_accepted, simulate_ab
from foretoken.lab.analysis.summary import time_gain
from foretoken.lab.stats.ratios import (
    Sample,
    WeightedQuantile,
    at_level,
    blocks_to_exceed,
    clustered_interval,
    level_of_look,
    paired_ratio,
    standard_error,
    supports_quantile,
    weighted_mean,
)


def both_arms(law: AbLaw, seed: int = 0, blocks: int = 10, requests: int = 30) -> list[Sample]:
    """Time per token of the baseline and of the candidate."""
    rng = np.random.default_rng(seed)
    return list(simulate_ab(law, rng, blocks=blocks, requests=requests).samples("tpot"))


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 3)), min_size=1, max_size=20).filter(
        lambda rows: sum(weight for _, weight in rows) > 0
    ),
    st.floats(0, 1),
)
def test_weighted_statistics_are_those_of_repeated_values(
    rows: list[tuple[float, int]], q: float
) -> None:
    values = np.array([value for value, _ in rows])
    weights = np.array([[float(weight) for _, weight in rows]])
    repeated = np.repeat(values, weights[0].astype(int))
    assert WeightedQuantile(q)(values, weights)[0] == pytest.approx(np.quantile(repeated, q))
    assert weighted_mean(values, weights)[0] == pytest.approx(repeated.mean())


@pytest.mark.slow
def test_the_ratio_does_not_depend_on_the_unit_and_turns_round() -> None:
    slow, fast = both_arms(AbLaw())
    median = WeightedQuantile(0.5)
    one = paired_ratio(slow, fast, median)
    thousand = paired_ratio(
        Sample(slow.values_N * 1000, slow.blocks_N), Sample(fast.values_N * 1000, fast.blocks_N),
        median,
    )  # fmt: skip
    back = paired_ratio(fast, slow, median)
    assert thousand.low == pytest.approx(one.low)
    assert back.estimate == pytest.approx(1 / one.estimate)
    assert back.low == pytest.approx(1 / one.high)


def test_pairing_takes_out_what_the_arms_share() -> None:
    """The same prompts in both arms: the interval is far narrower than the prompts' spread."""
    law = AbLaw(restart_sd=0.0, prompt_sd=0.6, draft_sd=0.0, noise=0.03, outlier_chance=0.0)
    slow, fast = both_arms(law, requests=10)
    paired = paired_ratio(slow, fast, weighted_mean)
    alone = clustered_interval(fast, weighted_mean)
    assert paired.high / paired.low < 1.15 < 1.2 < alone.high / alone.low


def test_blocks_of_one_arm_only_do_not_count() -> None:
    slow, fast = both_arms(AbLaw())
    cut = fast.blocks_N < 7
    half = Sample(fast.values_N[cut], fast.blocks_N[cut])
    whole = slow.blocks_N < 7
    assert paired_ratio(slow, half, weighted_mean) == paired_ratio(
        Sample(slow.values_N[whole], slow.blocks_N[whole]), half, weighted_mean
    )


def test_two_blocks_have_no_interval() -> None:
    slow, fast = both_arms(AbLaw(), blocks=2)
    ratio = paired_ratio(slow, fast, weighted_mean)
    assert ratio.estimate > 1 and not ratio.known
    empty = Sample(np.array([]), np.array([], np.int64))
    assert math.isnan(paired_ratio(empty, fast, weighted_mean).estimate)


def test_the_standard_error_comes_back_out_of_the_interval() -> None:
    slow, fast = both_arms(AbLaw())
    for unseen in (0.0, 0.07):
        ratio = paired_ratio(slow, fast, weighted_mean, unseen_sd=unseen)
        error = standard_error(ratio, 10)
        assert error == pytest.approx(math.sqrt(2 * 0.05**2 / 10), rel=0.5)
        assert at_level(ratio, 10, ratio.level).high == pytest.approx(ratio.high)


def test_one_start_widens_the_interval_however_many_blocks_there_are() -> None:
    law = AbLaw(restart_sd=0.0)
    for blocks in (10, 200):
        slow, fast = both_arms(law, blocks=blocks)
        ratio = paired_ratio(slow, fast, weighted_mean, unseen_sd=0.07)
        assert ratio.high / ratio.low > math.exp(2 * 1.96 * 0.07)
    assert blocks_to_exceed(0.1, 0.07, math.log(1.1), (0.95, 0.9)) is None, "no number of blocks"
    assert blocks_to_exceed(0.1, 0.0, math.log(1.1), (0.95, 0.9)) == 14


def test_tails_are_compared_block_by_block() -> None:
    """One start in nine that is twice as slow is the P95 of all values, and of no usual block."""
    rng = np.random.default_rng(0)
    blocks = np.repeat(np.arange(9), 100)
    times = rng.lognormal(0.0, 0.1, 900)
    slow = Sample(np.where(blocks == 3, 2 * times, times), blocks)
    fast = Sample(rng.lognormal(0.0, 0.1, 900), blocks)
    found = time_gain("tpot_p95", (slow, fast)).ratio
    assert found.low < 1.0 < found.high and found.estimate < 1.15
    assert paired_ratio(slow, fast, WeightedQuantile(0.95)).estimate > 1.3


def test_looks_share_out_the_error() -> None:
    assert level_of_look(0.95, 1) == pytest.approx(0.975)
    assert sum(1 - level_of_look(0.95, j) for j in range(1, 500)) < 0.05


@pytest.mark.slow
def test_peeking_does_not_inflate_the_error() -> None:
    rng = np.random.default_rng(9)
    fooled = 0
    for seed in range(150):
        slow, fast = simulate_ab(AbLaw(speedup=1.0), rng, blocks=16, requests=30).samples("tpot")
        for look, blocks in enumerate((4, 8, 12, 16), start=1):
            keep = slow.blocks_N < blocks
            ratio = paired_ratio(
                Sample(slow.values_N[keep], slow.blocks_N[keep]),
                Sample(fast.values_N[keep], fast.blocks_N[keep]),
                weighted_mean,
                level=level_of_look(0.95, look),
                seed=seed,
            )
            if ratio.low > 1.0 or ratio.high < 1.0:
                fooled += 1
                break
    assert fooled <= 15, fooled


def test_a_p99_needs_a_thousand_requests() -> None:
    few = Sample(np.ones(900), np.zeros(900, np.int64))
    many = Sample(np.ones(1000), np.zeros(1000, np.int64))
    assert not supports_quantile(few, 0.99)
    assert supports_quantile(many, 0.99)


def test_drafts_are_accepted_as_the_law_says() -> None:
    rng = np.random.default_rng(0)
    law = DraftLaw(k=5, alpha=0.7, concentration=float("inf"))
    accepted = draw_accepted(law, 4000, 20, rng)
    assert accepted.mean() == pytest.approx(sum(0.7**i for i in range(1, 6)), rel=0.01)
    assert accepted.max() == 5
