"""Break-even and crossover out of step times with a known law; replays with a known answer."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.analysis.fit import (
    StepTimes,
    _Lines,
    fit_arms,
    merge_chunks,
    of_runs,
    step_times,
    without_prompts,
)
from foretoken.lab.analysis.whole_time import StepCounts, other_lengths, replay, streams_of
from foretoken.lab.records.results import RequestAcceptance, RequestRecord
from foretoken.lab.records.run_files import write_json
from tests.unit.lab.summaries import ab, write_run

K, RATE = 4, 0.5


def a_block(block: int, batch: int, start: float, step: float, spec: bool) -> list[RequestRecord]:
    """`batch` requests that decode side by side, 40 steps of `step` seconds."""
    times = tuple(start + step * np.arange(40))
    acceptance = RequestAcceptance(source="body", num_drafted=K * 39, num_accepted=78, num_steps=39)
    return [
        RequestRecord(
            index=i,
            block=block,
            first_s=times[0],
            last_s=times[-1],
            chunk_s=times,
            output_tokens=118 if spec else 40,
            acceptance=acceptance if spec else None,
        )
        for i in range(batch)
    ]


def arms(noise: float) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """off(b) = 10 + 0.2 b ms; on(b) = 12 + 1.0 b ms, each start a little off."""
    rng = np.random.default_rng(0)
    off, on = [], []
    for block in range(6):
        paces = 1 + rng.normal(0, noise, 2)
        for turn, batch in enumerate((1, 4, 8)):
            at = 100.0 * turn
            off += a_block(block, batch, at, paces[0] * (0.010 + 0.0002 * batch), False)
            on += a_block(block, batch, at, paces[1] * (0.012 + 0.0010 * batch), True)
    return off, on


def test_costs_and_break_even_are_the_laws() -> None:
    fit = fit_arms(*arms(0.0))
    assert (fit.k, fit.acceptance_rate) == (4.0, 0.5)
    assert [point.batch for point in fit.points] == [1, 4, 8]
    first = fit.points[0]
    assert first.cost.estimate == pytest.approx(13.0 / 10.2)
    assert first.break_even.estimate == pytest.approx((13.0 / 10.2 - 1) / 4)
    assert first.speedup.estimate == pytest.approx(3 * 10.2 / 13.0)
    assert fit.verify_cost.estimate == pytest.approx((10 + 0.2 * 5) / 10.2)
    # 3 * (10 + 0.2 b) = 12 + b
    assert fit.crossover_batch.estimate == pytest.approx(45.0)
    assert fit.crossover_qps.estimate == pytest.approx(45 / (0.019 * 40))


def test_intervals_hold_the_law_when_starts_differ() -> None:
    fit = fit_arms(*arms(0.03))
    truth = (12 + 4.0) / (10 + 0.8)
    point = fit.points[1]
    assert point.cost.low < truth < point.cost.high
    assert fit.crossover_batch.low < 45 < fit.crossover_batch.high


def test_what_never_crosses_is_infinite() -> None:
    off, _ = arms(0.0)
    cheap = [r for b in range(6) for n in (1, 4, 8)
             for r in a_block(b, n, 100.0 * n, 0.011 + 0.0002 * n, True)]  # fmt: skip
    assert fit_arms(off, cheap).crossover_batch.estimate == float("inf")
    dear = [r for b in range(6) for n in (1, 4, 8)
            for r in a_block(b, n, 100.0 * n, 0.050 + 0.001 * n, True)]  # fmt: skip
    assert fit_arms(off, dear).crossover_batch.estimate == 0.0


def test_without_acceptance_there_is_no_fit() -> None:
    off, _ = arms(0.0)
    with pytest.raises(ConfigError, match="acceptance"):
        fit_arms(off, off)
    with pytest.raises(ConfigError, match="chunk times"):
        fit_arms([], off)


def test_chunks_of_one_step_are_merged() -> None:
    times = np.array([0.0, 0.1, 0.1001, 0.1002, 0.2, 0.3, 0.3001])
    assert merge_chunks(times).tolist() == [0.0, 0.1, 0.2, 0.3]


def test_the_batch_is_who_decodes_at_the_same_time() -> None:
    steps = step_times(a_block(0, 3, 0.0, 0.01, False))
    assert set(steps.batch_N.tolist()) == {3}
    assert np.allclose(steps.seconds_N, 0.01)


def beside_a_prompt(block: int, step: float) -> list[RequestRecord]:
    """Sixty steps of one request; another comes in the 21st, whose prompt makes that one longer."""
    late = np.where(np.arange(61) > 20, 0.05, 0.0)
    times = step * np.arange(61) + late
    first = RequestRecord(index=0, block=block, sent_s=-0.1, first_s=0.0, last_s=times[-1],
                          chunk_s=tuple(times), output_tokens=61)  # fmt: skip
    second = RequestRecord(index=1, block=block, sent_s=20.5 * step, first_s=times[21],
                           last_s=times[51], chunk_s=tuple(times[21:52]),
                           output_tokens=31)  # fmt: skip
    return [first, second]


def test_steps_beside_a_prompt_are_left_out() -> None:
    off, on = (
        step_times([record for block in range(4) for record in beside_a_prompt(block, step)])
        for step in (0.010, 0.016)
    )
    assert off.mixed_N.sum() == on.mixed_N.sum() == 4, "one step per block"
    pure = without_prompts(off, on)
    assert float(off.seconds_N.max()) == pytest.approx(0.060)
    assert [float(steps.seconds_N.max()) for steps in pure] == pytest.approx([0.010, 0.016])
    few = off.only(np.arange(off.seconds_N.size) < 50)
    assert without_prompts(few, on) == (few, on), "too few are left: better all"


def with_steps(accepted: list[int], drafted: list[int], temperature: float = 0.0) -> RequestRecord:
    """A record with this accept stream."""
    return RequestRecord(
        index=0,
        temperature=temperature,
        acceptance=RequestAcceptance(
            source="body",
            num_drafted=sum(drafted),
            num_accepted=sum(accepted),
            num_steps=len(accepted),
            per_step_accepted=tuple(accepted),
            per_step_drafted=tuple(drafted),
        ),
    )


def test_the_recorded_k_is_replayed_as_it_was() -> None:
    record = with_steps([2, 0, 3, 1], [3, 3, 4, 3])
    (found,) = other_lengths(ab(1.5), [record], [4])
    assert found.tokens_per_step == pytest.approx(10 / 4)
    assert (found.least, found.most) == (2.5, 2.5)


def test_a_shorter_k_is_replayed_position_by_position() -> None:
    """Positions: M M x x M M M x M x; k = 1 makes steps of 2 2? as counted by hand."""
    streams = streams_of([with_steps([2, 0, 3, 1], [3, 3, 4, 3])])
    assert streams == [[1, 1, 0, 0, 1, 1, 1, 0, 1, 0]]
    found = replay(streams, 1, open_chance=0.0)
    # M+M | x | x | M+M | M+x | M+x: 6 steps, 4 of 6 drafts accepted
    assert found.tokens_per_step == pytest.approx(10 / 6)
    assert found.acceptance_rate == pytest.approx(4 / 6)
    assert found.drafts_per_step == 1.0


def test_bonus_tokens_leave_a_range() -> None:
    (found,) = other_lengths(ab(1.5), [with_steps([2, 2, 2], [2, 2, 2])], [8])
    assert found.least < found.most


def test_the_speedup_of_the_recorded_length_is_the_measured_one() -> None:
    """Drafts cost what they cost in the run: at k = 5 half of 50,000 were accepted, 3.5 tokens a
    step, at 1.5x, so that a step takes 3.5 / 1.5 plain ones."""
    records = [with_steps([5, 0] * 200, [5, 5] * 200)]
    one, five = other_lengths(ab(1.5), records, [1, 5])
    per_draft = (3.5 / 1.5 - 1) / 5
    assert five.tokens_per_step == pytest.approx(3.5, rel=0.02)
    assert five.speedup == pytest.approx(1.5, rel=0.02)
    assert one.speedup == pytest.approx(one.tokens_per_step / (1 + per_draft), rel=0.02)


def test_without_steps_nothing_can_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accept stream"):
        other_lengths(ab(1.5), [RequestRecord(index=0)], [3])
    run = str(write_run(tmp_path / "run", ab(1.5)))
    found = CliRunner().invoke(app, ["lab", "decide", run, "--k", "3"])
    assert found.exit_code == 2 and "--per-request-spec-decode-metrics" in found.output


def some_steps(base: float, slope: float, blocks: int, rng: np.random.Generator) -> StepTimes:
    """Steps at four batch sizes; every start of the server is a little slower or faster."""
    rows = []
    for block in range(blocks):
        pace = rng.normal(0, 0.05)
        for batch in (1, 4, 8, 16):
            own = pace + rng.normal(0, 0.02) + 0.03 * rng.standard_t(3, 20)
            rows.append((np.exp(own) * (base + slope * batch), batch, block))
    seconds = np.concatenate([row[0] for row in rows])
    batches, numbers = (np.repeat([row[i] for row in rows], 20) for i in (1, 2))
    return StepTimes(seconds, batches, numbers, np.zeros(seconds.size, np.bool_))


@pytest.mark.parametrize("blocks", [3, 9])
def test_intervals_of_a_fit_cover(blocks: int) -> None:
    """Percentiles of resampled blocks held the truth in 76 to 90 %: they know no t."""
    rng, held = np.random.default_rng(0), np.zeros(4)
    counts = StepCounts(num_tokens=300, num_verifications=100, num_drafted=400, num_accepted=200)
    truth = (12 / 10.4, (15.6 / 10.4 - 12 / 10.4) / 4, 40.0, 40.0 / (26 * 40))
    for _ in range(60):
        off, on = some_steps(10.0, 0.4, blocks, rng), some_steps(14.0, 1.6, blocks, rng)
        lines = _Lines(off, on, counts, 40.0)
        found = (
            lines.verify_cost, lines.draft_cost, lines.crossover_batch, lines.crossover_qps
        )  # fmt: skip
        held += [own.low <= true <= own.high for own, true in zip(found, truth, strict=True)]
    assert (held >= 51).all(), held


def test_runs_at_two_loads_are_fitted_together(tmp_path: Path) -> None:
    """One load is one batch size and no crossover; both together have one, from the shell too."""
    off, on = arms(0.01)
    loads = [[[r for r in own if (r.first_s or 0.0) // 100 == turn] for own in (off, on)]
             for turn in (0, 2)]  # fmt: skip
    assert fit_arms(*loads[0]).notes[0].endswith("foretoken lab decide A B --fit")
    both = fit_arms(*(of_runs([load[arm] for load in loads]) for arm in (0, 1)))
    assert both.crossover_batch.low < 45 < both.crossover_batch.high
    assert [point.batch for point in both.points] == [1, 8]
    runs = [str(write_run(tmp_path / name, ab(1.5))) for name in "ab"]
    found = CliRunner().invoke(app, ["lab", "decide", *runs, "--fit"])
    assert found.exit_code == 2 and "acceptance" in found.output, "both are read"
    cells = [{"values": {"load": name}, "folder": name} for name in "ab"]
    write_json(
        tmp_path / "grid.json", {"kind": "grid", "schema": 1, "forced": False, "cells": cells}
    )
    whole = CliRunner().invoke(app, ["lab", "decide", str(tmp_path), "--fit"])
    assert whole.output == found.output, "a grid's folder is its cells'"
