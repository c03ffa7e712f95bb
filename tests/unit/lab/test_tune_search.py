"""Which setting is best under gains that may be true, which start of a server comes next, and what
the final A/B may say.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulate.machine import LineCost, SimulatedDrafter, SimulatedMachine
from benchmarks.simulate.traffic import DraftChance, RequestClass
from benchmarks.simulate.tune_answers import SimulatedAnswers, SimulatedCase, SimulatedServer
from benchmarks.simulate.tune_rehearsal import RehearsedCase, play, rehearsed_cases
from foretoken.errors import ConfigError
from foretoken.lab.launch.engines import Schedule
from foretoken.lab.tune.answer import TunedAnswer, make_answer
from foretoken.lab.tune.real import VISITS, Journal
from foretoken.lab.tune.search import (
    GOOD_ENOUGH,
    Search,
    Spreads,
    believe,
    best_setting,
    best_values,
    next_visit,
    stand,
    value_of,
    worth_measuring,
)
from foretoken.lab.tune.settings import (
    OFF,
    Answered,
    LoadSeen,
    NextVisit,
    Question,
    Setting,
    Visit,
    ranges_of,
    summarize_load,
)
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT

LENGTHS = (1, 2, 3, 5, 8)


def question(schedule: Schedule = "any", loads: tuple[int, ...] = (1, 8, 64)) -> Question:
    settings = [Setting(name, (k,)) for name in ("draft", "ngram") for k in LENGTHS]
    return Question(loads=loads, settings=(Setting("auto"), *settings), schedule=schedule)


@pytest.mark.parametrize("schedule", ["any", "falling", "one"])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_schedule_is_the_best_of_all(schedule: Schedule, seed: int) -> None:
    """Against a list of every schedule that the engine can be told."""
    asked = question(schedule)
    gains_SL = np.random.default_rng(seed).normal(-0.1, 0.3, (len(asked.settings), 3))
    best = 0.0
    for drafter in ("draft", "ngram"):
        for lengths in itertools.product((0, *LENGTHS), repeat=3):
            falls = all(a >= b for a, b in itertools.pairwise(lengths))
            if schedule == "one" and len(set(lengths)) > 1 or schedule == "falling" and not falls:
                continue
            value = value_of(asked, gains_SL[None], Setting(drafter, lengths))[0]
            best = max(best, float(value))
    best = max(best, float(gains_SL[0].mean()))
    found, most = best_setting(asked, gains_SL)
    assert most == pytest.approx(best)
    assert float(value_of(asked, gains_SL[None], found)[0]) == pytest.approx(best)
    assert best_values(asked, gains_SL[None])[0] == pytest.approx(best)


def test_nothing_is_better_than_a_loss() -> None:
    asked = question()
    assert best_setting(asked, np.full((len(asked.settings), 3), -0.01))[0] == OFF


def test_of_settings_that_are_alike_one_stays() -> None:
    asked = question("one")
    gains_DSL = np.full((50, len(asked.settings), 3), -0.5)
    gains_DSL[:, 3:5] = 0.4
    kept = worth_measuring(asked, gains_DSL, 0.005, at_most=11)
    assert kept.sum() == 1
    assert kept[3] or kept[4]


def test_names_say_lengths_by_load() -> None:
    assert [s.name for s in (OFF, Setting("auto"), Setting("ngram", (3,)))] == [
        "off", "auto", "ngram k=3"
    ]  # fmt: skip
    assert Setting("ngram", (5, 3, 0)).name == "ngram k=5/3/0"
    assert Setting("ngram", (3, 3, 3)).shortest() == Setting("ngram", (3,))
    assert Setting("ngram", (0, 0, 0)).shortest() == OFF


def test_ranges_end_between_loads() -> None:
    assert ranges_of((5, 3, 0), (1, 8, 64)) == ((1, 2, 5), (3, 22, 3), (23, 4096, 0))
    assert ranges_of((3, 3, 1), (1, 2, 3)) == ((1, 2, 3), (3, 4096, 1))


def visit(setting: Setting, turn: int, paces: tuple[float, ...]) -> Visit:
    loads = zip((1, 8, 64), paces, strict=True)
    return Visit(
        setting=setting,
        turn=turn,
        loads=tuple(LoadSeen(load=n, pace_s=pace, requests=16) for n, pace in loads),
        seconds=60.0,
    )


def test_beliefs_come_to_what_is_measured() -> None:
    asked = question()
    plain = (0.01, 0.02, 0.05)
    visits = []
    for turn in range(6):
        luck = 1.0 + 0.01 * (-1) ** turn
        visits.append(visit(OFF, turn, tuple(luck * one for one in plain)))
        visits.append(visit(Setting("draft", (3,)), turn, (0.005, 0.02, 0.1)))
    found = believe(asked, visits)
    place = asked.settings.index(Setting("draft", (3,)))
    assert np.exp(found.mean_SL[place]) == pytest.approx([2.0, 1.0, 0.5], rel=0.03)
    # A neighbour that was never measured is expected to be alike, what has nothing to do with it
    # is not.
    near = asked.settings.index(Setting("draft", (5,)))
    far = asked.settings.index(Setting("ngram", (3,)))
    assert 1.4 < math.exp(found.mean_SL[near, 0]) < 2.1
    assert math.exp(found.mean_SL[far, 0]) == pytest.approx(1.0, abs=0.01)


def test_one_lucky_start_is_drawn_towards_its_neighbours() -> None:
    asked = question("one")
    visits = [visit(OFF, 1, (0.01, 0.01, 0.01))]
    for k in LENGTHS:
        lucky = 0.75 if k == 3 else 1.0
        visits.append(visit(Setting("draft", (k,)), 1, (0.01 * lucky,) * 3))
    found = believe(asked, visits, Spreads(start=0.1, noise=0.03))
    place = asked.settings.index(Setting("draft", (3,)))
    assert math.exp(found.mean_SL[place].mean()) < 1.2


def test_spreads_are_learnt() -> None:
    random = np.random.default_rng(3)
    asked = question()
    visits = []
    for turn in range(1, 12):
        for setting in (OFF, Setting("draft", (3,))):
            luck = math.exp(random.normal(0.0, 0.07))
            visits.append(visit(setting, turn, (0.01 * luck, 0.02 * luck, 0.03 * luck)))
    found = believe(asked, visits).spreads
    assert found.start in (0.05, 0.07, 0.1)
    assert found.noise <= 0.02


def test_one_hiccup_does_not_count_whole() -> None:
    answers = [Answered("chat", 1.0, 100)] * 9 + [Answered("chat", 60.0, 100)]
    seen = summarize_load(4, answers)
    assert seen.pace_s == pytest.approx((9 * 1.0 + 3.0) / 1000)
    assert summarize_load(4, [], failed=3).failed == 3


def test_two_requests_of_a_class_are_held_against_all() -> None:
    """The middle of two is no middle: one hiccup would stand for the class."""
    usual = [Answered("chat", 1.0, 100)] * 6
    seen = summarize_load(4, [*usual, Answered("long", 1.1, 100), Answered("long", 6.0, 100)])
    assert seen.pace_s == pytest.approx((6 * 1.0 + 1.1 + 3.0) / 800)
    slow = [Answered("long", 5.0, 100)] * 5
    assert summarize_load(4, [*usual, *slow]).pace_s == pytest.approx((6 + 5 * 5) / 1100)


MACHINE = SimulatedMachine(
    target=LineCost(0.010, 0.0008),
    drafters=(SimulatedDrafter(name="draft_model", max_drafts=8, passes=LineCost(0.001, 0.0002)),),
)


def rehearsed(chance: float, *more: RequestClass) -> RehearsedCase:
    laws = {"draft_model": DraftChance(chance=chance, spread=0.3)}
    kind = RequestClass(name="one", prompt=30, output=30, chances=laws)
    case = SimulatedCase(
        name="small", machine=MACHINE, classes=(kind, *more), loads=(1, 8), start_s=20.0
    )
    return RehearsedCase(case=case, drafters=("draft_model",))


GOOD = rehearsed(0.8)
ANSWERS = SimulatedAnswers(GOOD.case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_best_within_its_time(seed: int) -> None:
    found = play(GOOD, ANSWERS, seed)
    assert found.share > 0.95
    assert found.true_gain > 1.2
    assert found.minutes <= 60.0


@pytest.mark.slow
def test_what_loses_is_left_off() -> None:
    bad = rehearsed(0.15)
    answers = SimulatedAnswers(bad.case)
    for seed in range(4):
        assert play(bad, answers, seed).emitted == OFF


@pytest.mark.slow
def test_less_time_is_kept_as_well() -> None:
    found = play(GOOD, ANSWERS, 1, minutes=8.0)
    assert found.minutes <= 8.0
    assert found.emitted.is_off or found.true_gain > 1.0


def test_the_neighbours_of_the_best_are_started_before_the_search_ends() -> None:
    """However sure the starts so far make it: one of them may have been a lucky one."""
    asked = Question(loads=(1, 4, 16), settings=tuple(Setting("d", (k,)) for k in (1, 2, 3, 5, 8)))
    search = Search(question=asked, budget_s=3600.0)

    def seen(setting: Setting, turn: int, pace_s: float) -> Visit:
        loads = [LoadSeen(load=n, pace_s=pace_s, requests=32, seconds=10.0) for n in asked.loads]
        return Visit(setting=setting, turn=turn, loads=tuple(loads), start_s=10.0, seconds=40.0)

    visits = [seen(OFF, 0, 0.010), seen(OFF, 1, 0.010)]
    visits += [
        seen(Setting("d", (k,)), 1, pace) for k, pace in ((3, 0.0095), (8, 0.004), (1, 0.01))
    ]
    now = stand(search, visits)
    assert now.chosen == Setting("d", (8,)) and now.missing < GOOD_ENOUGH
    wanted = next_visit(search, visits)
    assert wanted is not None and wanted.setting == Setting("d", (5,)) and not wanted.check


def test_what_nobody_started_is_not_put_into_the_final_ab() -> None:
    """As vLLM was seen, whose starts left time for one setting: the guess did worse than that."""
    few = Question(loads=(1, 4), settings=(Setting("d", (2,)), Setting("d", (4,))), schedule="one")
    search = Search(question=few, budget_s=900.0)

    def seen(setting: Setting, turn: int, *paces_s: float) -> Visit:
        pairs = zip(few.loads, paces_s, (8, 32), strict=True)
        loads = [LoadSeen(load=n, pace_s=p, requests=r, seconds=13.0) for n, p, r in pairs]
        return Visit(setting=setting, turn=turn, loads=tuple(loads), start_s=66.0, seconds=93.0)

    visits = [seen(OFF, 0, 0.0548, 0.0461), seen(OFF, 1, 0.0524, 0.0516)]
    visits.append(seen(Setting("d", (2,)), 1, 0.0325, 0.0418))
    assert stand(search, visits).chosen == Setting("d", (2,))
    for setting in (OFF, Setting("d", (2,))):
        wanted = next_visit(search, visits)
        assert wanted is not None and wanted.check and wanted.setting == setting
        visits.append(replace(seen(setting, wanted.turn, 0.05, 0.05), check=True))


class _StandsStill:
    """A server during one of whose visits the machine stands still for a quarter of an hour."""

    def __init__(self, server: SimulatedServer, visit: int) -> None:
        self.server, self.left = server, visit

    def visit(self, wanted: NextVisit) -> Visit:
        seen = self.server.visit(wanted)
        self.left -= 1
        if self.left:
            return seen
        slow = replace(seen.loads[0], seconds=seen.loads[0].seconds + 900.0)
        return replace(seen, loads=(slow, *seen.loads[1:]), seconds=seen.seconds + 900.0)


def visited(search: Search, visit: Callable[[NextVisit], Visit]) -> list[Visit]:
    """A whole search."""
    visits: list[Visit] = []
    while (wanted := next_visit(search, visits)) is not None:
        visits.append(visit(wanted))
    return visits


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 2, 3, 5])
def test_one_standstill_does_not_end_a_search(place: int) -> None:
    search = Search(question=GOOD.question, budget_s=3600.0)
    visits = visited(search, _StandsStill(SimulatedServer(ANSWERS, 2), place).visit)
    others = visited(search, SimulatedServer(ANSWERS, 2).visit)
    found = make_answer(search, visits, lambda setting: setting.name)
    assert found.verdict == USE_IT, found.sentence
    assert found.minutes <= 60.0
    # And it is asked as much as ever.
    assert [one.requests for one in visits[-1].loads] == [one.requests for one in others[-1].loads]


@pytest.mark.slow
def test_a_killed_search_goes_on_from_its_folder(tmp_path: Path) -> None:
    search = Search(question=GOOD.question, budget_s=3600.0)
    whole = visited(search, SimulatedServer(ANSWERS, 5).visit)
    again, cut, ended = SimulatedServer(ANSWERS, 5), tmp_path / "cut", False
    for number in range(40):
        journal = Journal(cut, search, resume=number > 0)
        for _ in range(3):
            wanted = next_visit(search, journal.visits)
            ended = wanted is None
            if wanted is not None:
                journal.add(again.visit(wanted))
        journal.close()
        if ended:
            break
        # What was being written when it died is no whole line.
        with (cut / VISITS).open("a") as file:
            file.write('{"setting": {"drafter"')
    assert journal.visits == whole
    with pytest.raises(ConfigError, match="--resume"):
        Journal(cut, search, resume=False)
    other = replace(search, question=replace(search.question, loads=(1, 2)))
    with pytest.raises(ConfigError, match="as the run had it"):
        Journal(cut, other, resume=True)
    Journal(cut, replace(search, budget_s=9.0), resume=True).close()
    (cut / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="what a run wrote"):
        Journal(cut, search, resume=True)


def answer_of(
    case: RehearsedCase, answers: SimulatedAnswers, seed: int = 2, broken: str = ""
) -> TunedAnswer:
    search, server = Search(question=case.question, budget_s=3600.0), SimulatedServer(answers, seed)

    def visit(wanted: NextVisit) -> Visit:
        seen = server.visit(wanted)
        if wanted.setting.name == broken:
            seen = replace(seen, loads=(), problem="CUDA out of memory")
        return seen

    return make_answer(search, visited(search, visit), lambda setting: f"serve {setting.name}")


@pytest.mark.slow
def test_the_answer_is_a_sentence_and_a_command() -> None:
    found = answer_of(GOOD, ANSWERS)
    assert found.verdict == USE_IT
    assert found.sentence.startswith("USE IT: draft_model with")
    assert found.command == f"serve {found.setting}"
    assert found.gain.low > 1.0
    assert [one.load for one in found.loads] == [1, 8]
    assert found.loads[0].gain > found.loads[1].gain
    bad = rehearsed(0.15)
    found = answer_of(bad, SimulatedAnswers(bad.case))
    assert found.verdict == LEAVE_IT_OFF
    assert found.sentence.startswith("LEAVE IT OFF: ")
    assert found.command == "serve off"


def test_off_names_only_what_was_tried() -> None:
    """What was not started has a prior, and no gain to tell."""
    bad = rehearsed(0.15)
    search = Search(question=bad.question, budget_s=3600.0)
    server = SimulatedServer(SimulatedAnswers(bad.case), 2)
    first = next_visit(search, [])
    assert first is not None
    tried = bad.question.settings[-1]
    visits = [server.visit(first._replace(setting=one)) for one in (OFF, tried)]
    found = make_answer(search, visits, lambda setting: f"serve {setting.name}")
    assert (found.verdict, found.candidate) == (LEAVE_IT_OFF, OFF.name)
    count = len(bad.question.settings)
    assert f"of the 1 that were tried, out of {count}," in found.sentence
    assert f"the nearest, {tried.name}, is " in found.sentence


@pytest.mark.slow
def test_a_setting_that_does_not_start_is_given_up() -> None:
    found = answer_of(GOOD, ANSWERS, broken="draft_model k=3")
    row = next(row for row in found.settings if row.setting == "draft_model k=3")
    assert row.problem == "CUDA out of memory"
    assert row.starts == 1
    assert found.verdict == USE_IT


def test_without_time_to_try_anything_it_says_how_much_it_takes() -> None:
    search = Search(question=GOOD.question, budget_s=100.0)
    seen = tuple(LoadSeen(load=n, pace_s=0.01, requests=16, seconds=5.0) for n in (1, 8))
    visits = [Visit(setting=OFF, turn=0, loads=seen, start_s=20.0, seconds=90.0)]
    assert next_visit(search, visits) is None
    found = make_answer(search, visits, lambda setting: setting.name)
    assert found.verdict == MEASURE_MORE
    assert math.isnan(found.gain.estimate)
    assert "too few to try anything; --minutes " in found.sentence


def test_a_drafter_that_nobody_tried_is_not_dismissed() -> None:
    """The time was up behind the first of two drafters, which does not gain."""
    search = Search(question=replace(GOOD.question, settings=(
        *GOOD.question.settings, Setting("ngram", (3,)))), budget_s=400.0)  # fmt: skip
    first = next(one for one in GOOD.question.settings if one.drafter == "draft_model")
    visits = []
    for number, (setting, pace_s) in enumerate([(OFF, 0.01), (OFF, 0.01), (first, 0.02)]):
        seen = tuple(LoadSeen(load=n, pace_s=pace_s, requests=16, seconds=5.0) for n in (1, 8))
        visits.append(Visit(setting=setting, turn=min(number, 1), loads=seen, start_s=20.0,
                            seconds=45.0))  # fmt: skip
    assert next_visit(search, visits) is None
    found = make_answer(search, visits, lambda setting: setting.name)
    assert found.verdict == MEASURE_MORE
    assert "minutes were too few to try ngram; --minutes " in found.sentence


def test_there_are_sixteen_servers_to_rehearse_on() -> None:
    cases = rehearsed_cases()
    assert len({case.case.name for case in cases}) == 16
    assert {case.schedule for case in cases} == {"any", "falling", "one"}
    assert sum(len(case.case.classes) > 1 for case in cases) >= 6
