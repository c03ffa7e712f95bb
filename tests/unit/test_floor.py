"""`min_acceptance`: below it a drafter rests, and is tried again."""

import pytest

from foretoken.config import SpeculativeConfig
from foretoken.control.floor import FIRST_REST, JUDGED_FROM, LONGEST_REST, AcceptanceFloor
from foretoken.control.plan import DraftOutcome
from foretoken.errors import ConfigError
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.choose.policy import FirstPolicy
from tests.unit.proposing import make_context, make_sequence
from tests.unit.test_drafters import Stub


def steps(floor: AcceptanceFloor, count: int, accepted: int) -> list[bool]:
    """Whether it rested after each step; drafts of four while it does not."""
    found = []
    for _ in range(count):
        outcomes = [] if floor.rests else [DraftOutcome("r", "d", 4, accepted)]
        floor.observe("d", [*outcomes, DraftOutcome("r", "other", 4, 0)])
        found.append(floor.rests)
    return found


def test_it_rests_once_enough_drafts_were_refused() -> None:
    floor = AcceptanceFloor(0.3)
    assert floor.acceptance == 1.0 and not floor.rests
    judged = JUDGED_FROM // 4
    assert steps(floor, judged, accepted=1) == [False] * (judged - 1) + [True]


def test_it_goes_on_while_enough_is_accepted() -> None:
    floor = AcceptanceFloor(0.3)
    assert not any(steps(floor, 300, accepted=2))
    assert floor.acceptance == pytest.approx(0.5)


def test_rests_grow_while_trials_fail_and_begin_short_again() -> None:
    floor, judged = AcceptanceFloor(0.3), JUDGED_FROM // 4
    lengths = []
    for _ in range(8):
        steps(floor, judged, accepted=0)
        lengths.append(0)
        while floor.rests:
            floor.observe("d", [])
            lengths[-1] += 1
    assert lengths == [min(FIRST_REST << i, LONGEST_REST) for i in range(8)]
    steps(floor, judged, accepted=4)
    while not floor.rests:
        steps(floor, 1, accepted=0)
    assert sum(steps(floor, FIRST_REST, accepted=0)) == FIRST_REST - 1


def test_only_those_drafters_are_left_out() -> None:
    one, two = Stub("one", 1, "a"), Stub("two", 2, "a")
    floor = AcceptanceFloor(0.5)
    members = {
        "one": Member(proposer=one, most=3, floor=floor),
        "two": Member(proposer=two, most=3),
    }
    sequence = make_sequence([1], [2], request_id="a")
    both, alone = Drafters(members, FirstPolicy()), Drafters({"one": members["one"]}, FirstPolicy())
    assert both.propose(make_context((sequence, 2))).names == ("one",)
    floor.observe("one", [DraftOutcome("a", "one", JUDGED_FROM, 0)])
    assert both.propose(make_context((sequence, 2))).names == ("two",)
    assert alone.propose(make_context((sequence, 2))).ids == ((),)


def test_the_key_is_a_share() -> None:
    config = SpeculativeConfig.from_dict({"method": "ngram", "min_acceptance": 0.4})
    assert config.drafters[0].stop.min_acceptance == 0.4
    with pytest.raises(ConfigError, match="min_acceptance"):
        SpeculativeConfig.from_dict({"method": "ngram", "min_acceptance": 1.0})
