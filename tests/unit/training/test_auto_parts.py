"""Parts of `foretoken train auto`: journal, verdict and timetable."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.cli.train import verdict_on
from foretoken.errors import ConfigError
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT
from foretoken.training.auto.judging import Judgement
from foretoken.training.auto.run import BEAT, FILE, Assignment, RunJournal
from foretoken.training.auto.timetable import (
    BATCHES,
    EXPLORED,
    FIRST_SHARE,
    LAST_ARMS,
    LEAST_STEPS,
    Rates,
    Supply,
    Timetable,
    judgement_s,
    plan,
    rungs_of,
)


class Hands:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_a_part_is_done_once_and_time_goes_on_after_a_kill(tmp_path: Path) -> None:
    clock = Hands()
    journal = RunJournal(tmp_path, clock)
    clock.at += 5
    assert journal.once("one", lambda: {"n": (1, 2)}) == {"n": [1, 2]}
    clock.at += 100
    journal.beat()
    clock.at += 7  # a kill: nobody wrote this down
    later = Hands()
    later.at = 3.0
    again = RunJournal(tmp_path, later)
    assert again.seconds == 105.0
    assert again.once("one", lambda: pytest.fail("done before")) == {"n": [1, 2]}
    later.at += 10
    assert again.seconds == 115.0 and again.find("two") is None


def test_beats_are_seldom(tmp_path: Path) -> None:
    clock = Hands()
    journal = RunJournal(tmp_path, clock)
    for _ in range(100):
        clock.at += 1
        journal.beat()
    parts = [json.loads(line)["part"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert parts == [BEAT] * 5


def test_a_line_half_written_is_removed_and_a_broken_one_is_named(tmp_path: Path) -> None:
    RunJournal(tmp_path).once("one", dict)
    path = tmp_path / FILE
    whole = path.read_text()
    path.write_text(whole + '{"part": "two", "at"')
    assert RunJournal(tmp_path).find("two") is None and path.read_text() == whole
    path.write_text("{}\n" + whole)
    with pytest.raises(ConfigError, match="line 1"):
        RunJournal(tmp_path)


@pytest.mark.parametrize(
    ("trained", "ngram", "word", "words"),
    [
        ([0.5, 0.52, 0.48, 0.5, 0.51, 0.49], 0.8, USE_IT, "USE IT: 1.60x"),
        ([0.9, 0.92, 0.88, 0.9, 0.91, 0.89], 0.6, LEAVE_IT_OFF, "LEAVE IT OFF: 0.67x"),
        ([1.2] * 6, 1.5, LEAVE_IT_OFF, "the speed of plain decoding"),
        ([0.5, 0.6, 0.7, 0.78, 0.95, 0.9], 0.8, MEASURE_MORE, "MEASURE MORE: 1.08x"),
    ],
)
def test_the_verdict_is_beside_the_best_that_needs_no_training(
    trained: list[float], ngram: float, word: str, words: str
) -> None:
    found = verdict_on(judgement(trained, ngram))
    assert found.word == word and words in found.sentence


def judgement(trained: list[float], ngram: float) -> Judgement:
    count = len(trained)
    paces = {"off": [1.0] * count, "ngram": [ngram] * count, "trained": trained}
    return Judgement(
        paces={name: {"0": row, "0.8": row} for name, row in paces.items()},
        lengths={"ngram": 4, "trained": 3},
        tokens={"ngram": 1.5, "trained": 2.5},
        look_ups=("ngram",),
        passes=1,
    )


def test_hours_are_checked(tmp_path: Path) -> None:
    for hours in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--hours"):
            Assignment(target="demo", prompts="p", hours=hours, out=tmp_path)


KINDS = ("a", "b", "c", "d", "e", "f", "g")
RATES = Rates(
    prompt_s=0.05, prompt_tokens=300.0, train_s=dict.fromkeys(KINDS, 4e-4), load_s=1.0, token_s=1e-3
)
SUPPLY = Supply(held_out=24, batch=32, most_prompts=5000, answer_tokens=256, row_length=512)


def needed_s(table: Timetable, rates: Rates) -> float:
    """Time that everything in a timetable takes at these rates, but the end that is set aside."""
    batch, kinds = table.batch_tokens, list(table.steps)
    trained = 0.0
    for count in table.rungs:
        trained += sum(table.steps[kind] * rates.train_s[kind] for kind in kinds[:count]) * batch
    winner = kinds[0]
    done = len(table.rungs) * table.steps[winner]
    trained += (table.winner_steps[winner] - done) * rates.train_s[winner] * batch
    judged = table.judged_prompts, table.judged_tokens
    judging = sum(judgement_s(count, *judged, rates) for count in table.rungs)
    return trained + judging + table.prompts * rates.prompt_s


@pytest.mark.parametrize("hours", [0.05, 0.15, 0.5, 2.0, 8.0, 48.0])
@pytest.mark.parametrize("slower", [1.0, 30.0, 1000.0])
def test_everything_ends_in_time(hours: float, slower: float) -> None:
    """What is planned before the last step is done when the last step should end."""
    rates = Rates(
        prompt_s=slower * RATES.prompt_s,
        prompt_tokens=RATES.prompt_tokens,
        train_s={kind: slower * s for kind, s in RATES.train_s.items()},
        load_s=RATES.load_s,
        token_s=slower * RATES.token_s,
    )
    total, used = 3600 * hours, 20.0
    table = plan(total, used, rates, SUPPLY)
    last = judgement_s(LAST_ARMS - 1, table.judged_prompts, table.judged_tokens, rates)
    if total - used > 2 * last:
        assert total - table.train_until >= last
    if table.rungs:
        assert used + needed_s(table, rates) <= table.train_until + table.prompts * rates.prompt_s
        assert min(table.steps.values()) >= LEAST_STEPS


def test_more_hours_bring_more_candidates_and_larger_batches() -> None:
    tables = [plan(3600 * hours, 20.0, RATES, SUPPLY) for hours in (0.02, 0.2, 1.0, 8.0)]
    counts = [len(table.steps) for table in tables]
    assert counts == sorted(counts) and counts[0] < counts[-1] == len(KINDS)
    sizes = [table.batch_tokens for table in tables]
    assert sizes == sorted(sizes) and sizes[-1] == BATCHES[0]
    assert all(list(table.steps) == list(KINDS)[: len(table.steps)] for table in tables)


def test_candidates_take_a_tenth_each_at_most_and_a_third_together() -> None:
    for count in range(2, 8):
        rates = replace(RATES, train_s=dict.fromkeys(KINDS[:count], 4e-4))
        table = plan(8 * 3600, 20.0, rates, SUPPLY)
        first, rungs = table.steps["a"], table.rungs
        every = table.winner_steps["a"] + sum(n - 1 for n in rungs) * first
        assert first / every <= FIRST_SHARE + 0.001
        assert rungs[0] * first / every <= EXPLORED + 0.001


def test_equal_time_not_equal_steps() -> None:
    rates = replace(RATES, train_s={"slow": 8e-4, "fast": 2e-4})
    table = plan(8 * 3600, 20.0, rates, SUPPLY)
    assert table.steps["fast"] == pytest.approx(4 * table.steps["slow"], abs=4)


def test_few_prompts_are_all_answered_and_many_are_not() -> None:
    assert plan(8 * 3600, 0.0, RATES, replace(SUPPLY, most_prompts=90)).prompts == 90
    short = plan(600, 0.0, RATES, replace(SUPPLY, most_prompts=10**6)).prompts
    assert short < plan(3600, 0.0, RATES, replace(SUPPLY, most_prompts=10**6)).prompts
    assert (short - SUPPLY.held_out) % SUPPLY.batch == 0


def test_no_time_at_all_is_one_candidate() -> None:
    table = plan(10.0, 60.0, RATES, SUPPLY)
    assert list(table.steps) == ["a"] and table.rungs == () and table.train_until == 60.0


def test_rungs() -> None:
    assert [rungs_of(n) for n in (1, 2, 3, 4, 7)] == [(), (2,), (3,), (4, 2), (7, 3)]
