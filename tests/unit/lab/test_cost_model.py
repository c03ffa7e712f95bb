"""What a step costs at every load and length, learnt from runs whose law is known."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.errors import ConfigError
from foretoken.lab.analysis.cost_model import Measured, by_length, learn
from foretoken.lab.launch.engines import MOST_RUNNING
from foretoken.lab.records.results import RequestRecord
from tests.unit.lab.costs import (
    BASE_S,
    DRAFT_S,
    LENGTHS,
    LOADS,
    ONCE_S,
    REQUEST_S,
    ROW_S,
    a_model,
    a_run,
    law_s,
)
from tests.unit.lab.summaries import ab


def test_the_law_is_learnt() -> None:
    found = a_model()
    costs = (found.base_s, found.request_s, found.row_s, found.once_s, found.draft_s)
    assert costs == pytest.approx((BASE_S, REQUEST_S, ROW_S, ONCE_S, DRAFT_S))
    assert found.batches == LOADS and found.misfit < 1e-6
    assert [one.k for one in found.lengths] == list(LENGTHS)
    assert found.context_tokens == 320
    assert found.step_s(12, 4) == pytest.approx(law_s(12, 4)), "what was not measured, too"
    three = found.lengths[1]
    assert found.gain(8, three) == pytest.approx(three.tokens_per_step * law_s(8, 0) / law_s(8, 3))
    assert found.break_even(8, three) == pytest.approx((law_s(8, 3) / law_s(8, 0) - 1) / 3)


def test_lengths_fall_as_the_load_rises() -> None:
    found = a_model()
    assert found.schedule == ((1, 2, 5), (3, 16, 3), (17, MOST_RUNNING, 1))
    for batch in LOADS:
        gains = {one.k: found.gain(batch, one) for one in found.lengths}
        chosen = next(k for first, last, k in found.schedule if first <= batch <= last)
        assert gains[chosen] >= 0.99 * max(gains.values())
    assert found.paying(1) == (1, 3, 5) and found.paying(24) == (1,)
    assert found.one_length == 3
    assert found.least_chance(5) > found.least_chance(1) > 0, "longer drafts are later in a step"


def test_where_nothing_pays_nothing_is_drafted() -> None:
    found = a_model(scale=12.0)
    assert found.schedule == ((1, MOST_RUNNING, 0),) and found.one_length == 0
    assert found.paying(1) == ()
    early = a_model(scale=2.0)
    assert [k for *_, k in early.schedule] == sorted((k for *_, k in early.schedule), reverse=True)
    assert early.schedule[-1][2] == 0 < early.schedule[0][2]
    assert early.notes[1] == f"from {early.schedule[-1][0]} requests at once on no length pays"


def test_noise_of_starts_is_told() -> None:
    rng = np.random.default_rng(0)
    by = {}
    for k in (0, 1, 3):
        records = []
        for number, batch in enumerate(LOADS):
            pace = 1 + rng.normal(0, 0.15)
            for record in a_run(k, batch):
                times = tuple(pace * t for t in record.chunk_s)
                block = record.block + 100 * number
                records.append(
                    replace(record, chunk_s=times, last_s=times[-1], first_s=times[0], block=block)
                )
        by[k] = records
    found = learn(by)
    assert found.misfit > 0.1 and "differ from these costs" in found.notes[-1]
    assert min(found.base_s, found.request_s, found.row_s, found.once_s, found.draft_s) >= 0


def test_a_machine_that_was_busy_meanwhile_does_not_choose() -> None:
    """It is twice as slow while the best length is measured, its baseline too."""
    config = {"baseline": {"command": "vllm serve m"}, "candidate": {"command": "python x.py"}}
    runs: list[Measured] = []
    for k in LENGTHS:
        for batch in LOADS:
            pace = 2.0 if k == 3 else 1.0
            arms = []
            for own in (0, k):
                records = a_run(own, batch)
                times = tuple(pace * t for t in records[0].chunk_s)
                arms.append([replace(r, chunk_s=times, last_s=times[-1]) for r in records])
            runs.append((ab(config=config), arms[0], arms[1]))
    found = learn(by_length(runs))
    assert found.schedule == a_model().schedule and found.misfit < 0.01


def test_steps_that_draft_seldom_are_told_apart() -> None:
    """A look-up that drafts three tokens in a third of its steps."""
    by: dict[int, list[RequestRecord]] = {0: [], 3: []}
    for number, batch in enumerate(LOADS):
        for k in by:
            for record in a_run(k, batch):
                mean_s = (law_s(batch, 3) + 2 * law_s(batch, 0)) / 3 if k else law_s(batch, 0)
                times = tuple(mean_s * np.arange(40))
                told = record.acceptance and replace(
                    record.acceptance, num_drafted=39, num_accepted=26, num_steps=13
                )
                tokens = 40 + 26 if k else 40
                by[k].append(
                    replace(
                        record, chunk_s=times, last_s=times[-1], acceptance=told,
                        output_tokens=tokens, block=record.block + 100 * number,
                    )
                )  # fmt: skip
    found = learn(by)
    [seen] = found.lengths
    assert seen.share == pytest.approx(1 / 3) and seen.drafted == 3
    assert seen.tokens_per_step == pytest.approx(1 + 26 / 39)
    assert found.step_s(8, 3, 1.0) == pytest.approx(law_s(8, 3), rel=1e-6)


def test_what_cannot_be_learnt_says_what_to_measure() -> None:
    plain, drafts = a_run(0, 4), a_run(3, 4)
    with pytest.raises(ConfigError, match="two loads"):
        learn({0: plain, 3: drafts})
    with pytest.raises(ConfigError, match="without speculation"):
        learn({3: drafts})
    uncounted = [replace(record, acceptance=None) for record in drafts]
    with pytest.raises(ConfigError, match="per-request-spec-decode-metrics"):
        learn({0: plain, 3: uncounted})


def test_runs_of_several_pairs_are_not_one_model() -> None:
    def run(off: str, on: str) -> Measured:
        config = {"baseline": {"command": off}, "candidate": {"command": on}}
        return ab(config=config), a_run(0, 4), a_run(3, 4)

    draft = 'vllm serve m --speculative-config \'{"method": "draft_model", "model": "d"}\''
    ngram = 'vllm serve m --speculative-config \'{"method": "ngram"}\''
    with pytest.raises(ConfigError, match="one drafter"):
        by_length([run("vllm serve m", draft), run("vllm serve m", ngram)])
    with pytest.raises(ConfigError, match="same baseline"):
        by_length([run("vllm serve m", draft), run("vllm serve n", draft)])
    told = ngram.replace('"ngram"', '"ngram", "num_speculative_tokens": 7')
    assert set(by_length([run("vllm serve m", told)])) == {0, 7}, "as the server was told"
    assert set(by_length([run("vllm serve m", "python server.py")])) == {0, 3}, "as it drafted"
