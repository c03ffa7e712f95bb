"""What is promised of the search, on the sixteen simulated servers: long, so only in `full`."""

import pytest

from benchmarks.simulate.tune_answers import SimulatedAnswers
from benchmarks.simulate.tune_rehearsal import Rehearsed, play, rehearsed_cases, summarize

SEEDS = 20


@pytest.mark.slow
def test_the_search_is_as_good_as_is_promised() -> None:
    found: list[Rehearsed] = []
    for case in rehearsed_cases():
        answers = SimulatedAnswers(case.case)
        found += [play(case, answers, seed) for seed in range(SEEDS)]
    said = summarize(found)
    assert said.median_share >= 0.97
    assert said.near >= 0.95
    assert said.slower <= 0.01
    assert said.most_minutes <= 60.0
    assert said.as_asked(60.0)
