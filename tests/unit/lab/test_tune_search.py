"""The search on simulated servers: it finds the best, in time, and goes on where it was cut off."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate.machine import SimulatedDrafter, SimulatedMachine
from benchmarks.simulate.traffic import DraftChance, RequestClass
from benchmarks.simulate.tune_answers import SimulatedAnswers, SimulatedCase, SimulatedServer
from benchmarks.simulate.tune_rehearsal import RehearsedCase, play, rehearsed_cases
from foretoken.control.cost import LineCost
from foretoken.errors import ConfigError
from foretoken.lab.tune.answer import make_answer
from foretoken.lab.tune.journal import VISITS, Journal
from foretoken.lab.tune.run import run_search
from foretoken.lab.tune.search import GOOD_ENOUGH, Search, next_visit, stand
from foretoken.lab.tune.settings import OFF, Question, Setting
from foretoken.lab.tune.visits import LoadSeen, ServerUnderTest, Visit
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT

MACHINE = SimulatedMachine(
    target=LineCost(0.010, 0.0008),
    drafters=(SimulatedDrafter(name="draft_model", most=8, passes=LineCost(0.001, 0.0002)),),
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

    def visit(self, setting: Setting, turn: int, sizes: Sequence[tuple[int, int]]) -> Visit:
        seen = self.server.visit(setting, turn, sizes)
        self.left -= 1
        if self.left:
            return seen
        slow = replace(seen.loads[0], seconds=seen.loads[0].seconds + 900.0)
        return replace(seen, loads=(slow, *seen.loads[1:]), seconds=seen.seconds + 900.0)


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 2, 3, 5])
def test_one_standstill_does_not_end_a_search(place: int) -> None:
    search = Search(question=GOOD.question, budget_s=3600.0)
    server, undisturbed = (
        _StandsStill(SimulatedServer(ANSWERS, 2), place),
        SimulatedServer(ANSWERS, 2),
    )
    visits, others = visited(search, server), visited(search, undisturbed)
    found = make_answer(search, visits, lambda setting: setting.name)
    assert found.verdict == USE_IT, found.sentence
    assert found.minutes <= 60.0
    # And it is asked as much as ever.
    assert [one.requests for one in visits[-1].loads] == [one.requests for one in others[-1].loads]


class _Killed(Exception):
    """Stands for kill -9."""


class _Dies:
    """A server during whose visit everything is killed."""

    def __init__(self, server: SimulatedServer, after: int) -> None:
        self.server, self.left = server, after

    def visit(self, setting: Setting, turn: int, sizes: Sequence[tuple[int, int]]) -> Visit:
        self.left -= 1
        if self.left < 0:
            raise _Killed
        return self.server.visit(setting, turn, sizes)


def quiet(_: object) -> None:
    """Show nothing."""


@pytest.mark.slow
def test_a_killed_search_goes_on_from_its_folder(tmp_path: Path) -> None:
    search = Search(question=GOOD.question, budget_s=3600.0)
    server, whole = SimulatedServer(ANSWERS, 5), Journal(tmp_path / "whole", search, resume=False)
    run_search(search, server, whole, quiet, quiet)
    whole.close()
    again = SimulatedServer(ANSWERS, 5)
    cut = tmp_path / "cut"
    for number in range(40):
        journal = Journal(cut, search, resume=number > 0)
        try:
            run_search(search, _Dies(again, 3), journal, quiet, quiet)
        except _Killed:
            # What was being written when it died is no whole line.
            with (cut / VISITS).open("a") as file:
                file.write('{"setting": {"drafter"')
            continue
        finally:
            journal.close()
        break
    assert journal.visits == whole.visits
    with pytest.raises(ConfigError, match="--resume"):
        Journal(cut, search, resume=False)
    other = replace(search, question=replace(search.question, loads=(1, 2)))
    with pytest.raises(ConfigError, match="as the run had it"):
        Journal(cut, other, resume=True)
    Journal(cut, replace(search, budget_s=9.0), resume=True).close()


def visited(search: Search, server: ServerUnderTest) -> list[Visit]:
    """A whole search."""
    visits: list[Visit] = []
    while (wanted := next_visit(search, visits)) is not None:
        seen = server.visit(wanted.setting, wanted.turn, wanted.sizes)
        visits.append(replace(seen, check=wanted.check))
    return visits


def answer_of(case: RehearsedCase, answers: SimulatedAnswers, seed: int = 2, broken: str = ""):  # type: ignore[no-untyped-def]
    search = Search(question=case.question, budget_s=3600.0)
    server = SimulatedServer(answers, seed)
    visits: list[Visit] = []
    while (wanted := next_visit(search, visits)) is not None:
        seen = server.visit(wanted.setting, wanted.turn, wanted.sizes)
        if wanted.setting.name == broken:
            seen = replace(seen, loads=(), problem="CUDA out of memory")
        visits.append(replace(seen, check=wanted.check))
    return make_answer(search, visits, lambda setting: f"serve {setting.name}")


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
    visits = [server.visit(one, 0, first.sizes) for one in (OFF, tried)]
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


@pytest.mark.slow
def test_a_class_that_loses_is_named() -> None:
    laws = {"draft_model": DraftChance(chance=0.02)}
    poem = RequestClass(name="poem", share=0.5, prompt=30, output=30, chances=laws)
    case = rehearsed(0.97, poem)
    slow = replace(MACHINE, target=LineCost(0.010, 0.0016))
    case = replace(case, case=replace(case.case, machine=slow))
    found = answer_of(case, SimulatedAnswers(case.case))
    assert found.verdict == USE_IT
    assert any(said.startswith("poem loses in this mix: 0.") for said in found.advice)
    assert {one.kind for one in found.kinds} == {"one", "poem"}


def test_without_time_to_try_anything_it_says_how_much_it_takes() -> None:
    search = Search(question=GOOD.question, budget_s=100.0)
    seen = tuple(LoadSeen(load=n, pace_s=0.01, requests=16, seconds=5.0) for n in (1, 8))
    visits = [Visit(setting=OFF, turn=0, loads=seen, start_s=20.0, seconds=90.0)]
    assert next_visit(search, visits) is None
    found = make_answer(search, visits, lambda setting: setting.name)
    assert found.verdict == MEASURE_MORE
    assert math.isnan(found.gain.estimate)
    assert "too few to try anything; --minutes " in found.sentence


def test_there_are_sixteen_servers_to_rehearse_on() -> None:
    cases = rehearsed_cases()
    assert len({case.case.name for case in cases}) == 16
    assert {case.schedule for case in cases} == {"any", "falling", "one"}
    assert sum(len(case.case.classes) > 1 for case in cases) >= 6
