"""Step times out of arrivals; replays with a known answer."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.analysis.cost_model import merge_chunks, step_times
from foretoken.lab.analysis.whole_time import other_lengths, replay, streams_of
from foretoken.lab.records.results import RequestAcceptance, RequestRecord
from tests.unit.lab.summaries import ab, write_run

K = 4


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


def test_steps_beside_a_prompt_are_told_apart() -> None:
    steps = step_times([one for block in range(4) for one in beside_a_prompt(block, 0.010)])
    assert steps.mixed_N.sum() == 4, "one step per block"
    assert float(steps.seconds_N.max()) == pytest.approx(0.060)
    assert float(steps.only(~steps.mixed_N).seconds_N.max()) == pytest.approx(0.010)


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
