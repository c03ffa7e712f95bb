"""RunJournal, curve and verdict of `foretoken train auto`."""

import json
import math
from pathlib import Path

import pytest

from foretoken.cli.train_auto import (
    verdict_on,
    what_more,
)
from foretoken.errors import ConfigError
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT
from foretoken.training.auto.curve import Doubling, doubling
from foretoken.training.auto.journal import BEAT, FILE, RunJournal
from foretoken.training.auto.judging import Judgement
from foretoken.training.auto.run import Assignment, AutoOutcome


class Hands:
    """A clock that is set by hand."""

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


def test_a_doubling_is_the_slope_over_the_logarithm() -> None:
    many = (10, 100, 150, 200, 250, 300, 400, 900)
    steps = (90, 128, 200, 300, 512)
    exact = [{"step": s, "tokens_a_step": 1.0 + 0.25 * math.log2(s)} for s in steps]
    found = doubling(exact, 512)
    assert found is not None and found.tokens == pytest.approx(0.25)
    assert found.low == pytest.approx(0.25) and found.high == pytest.approx(0.25)
    noisy = [{"step": s, "tokens_a_step": 2.0 + (s % 3) * 0.1} for s in many]
    found = doubling(noisy, 400)
    assert found is not None and found.low < 0 < found.high, "noise says nothing"
    assert doubling(exact[:4], 512) is None


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


def test_what_more_hours_bring_is_in_speed_too(tmp_path: Path) -> None:
    outcome = AutoOutcome(
        kind="mlp",
        folder=tmp_path,
        steps=10,
        trained_s=60.0,
        judgement=judgement([0.5] * 6, 0.9),
        doubling=Doubling(now=2.5, tokens=0.5, low=0.4, high=0.6),
        ranking=(("mlp", 1.5),),
    )
    assert "make 2.00x about 2.40x" in what_more(outcome)
    assert outcome.config["num_speculative_tokens"] == 3 and outcome.config["method"] == "mlp"


def test_hours_are_checked(tmp_path: Path) -> None:
    for hours in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--hours"):
            Assignment(target="demo", prompts="p", hours=hours, out=tmp_path)
