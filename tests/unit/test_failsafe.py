"""Deciding that fails: steps are plain from then on, and it is said once."""

import logging

import pytest

from foretoken.control.failsafe import Failsafe
from foretoken.control.plan import DecodingSequence, DraftPlan, StepLoad, plan_no_drafts
from tests.unit.control_fakes import running

LOAD = StepLoad(num_decoding=2, num_prefilling=0, num_waiting=0)
SEQUENCES: list[DecodingSequence] = [running("a"), running("b")]


class Planned:
    """Plans well for some steps."""

    def __init__(self, good: int) -> None:
        self.good, self.asked = good, 0

    def plan(self, sequences: object, load: StepLoad) -> DraftPlan:
        self.asked += 1
        if self.asked > self.good:
            raise ValueError("planted\nin two lines")
        return DraftPlan(load=load, drafts=(3, 3))


def test_a_planner_that_fails_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    planned, said = Planned(2), list[str]()
    safe = Failsafe(planned.plan, ["eagle3"], said.append)
    drafts = [safe.plan(SEQUENCES, LOAD).drafts for _ in range(5)]
    assert drafts == [(3, 3), (3, 3), (0, 0), (0, 0), (0, 0)]
    assert planned.asked == 3
    assert safe.plan(SEQUENCES, LOAD) == plan_no_drafts(SEQUENCES, LOAD, frozenset({"eagle3"}))
    assert said == ["control failed planning a step: ValueError: planted in two lines"]
    [record] = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info, "with the traceback"
    assert "every step is plain from now on" in record.getMessage()


def test_learning_that_fails_ends_planning_too() -> None:
    planned, said, told = Planned(99), list[str](), list[int]()
    safe = Failsafe(planned.plan, [], said.append)

    def learn(number: int) -> None:
        told.append(number)
        if number == 2:
            raise ZeroDivisionError("planted")

    learns, forgets = safe.guarded(learn), safe.guarded(told.append)
    for number in range(4):
        learns(number)
    forgets(9)
    assert told == [0, 1, 2], "nobody knows what state it is in"
    assert said == ["control failed learning from a step: ZeroDivisionError: planted"]
    assert safe.plan(SEQUENCES, LOAD).drafts == (0, 0) and not planned.asked


def test_interrupts_are_no_failures() -> None:
    def interrupted(sequences: object, load: StepLoad) -> DraftPlan:
        raise KeyboardInterrupt

    safe = Failsafe(interrupted, [], lambda why: None)
    with pytest.raises(KeyboardInterrupt):
        safe.plan(SEQUENCES, LOAD)
