"""How long answers may be, for a search on a slow server to be worth its time."""

import math

import pytest

from foretoken.lab.tune.real import LEAST_TOKENS, fitting, time_to_ask
from foretoken.lab.tune.visits import Answered, LoadSeen, summarize_load

SIZES = ((1, 8), (8, 16))


def seen(pace_s: float, batched_pace_s: float) -> tuple[LoadSeen, LoadSeen]:
    return (
        LoadSeen(load=1, pace_s=pace_s, requests=1),
        LoadSeen(load=4, pace_s=batched_pace_s, requests=4),
    )


def test_a_fast_server_is_asked_for_whole_answers() -> None:
    assert fitting(60.0, 256, SIZES, seen(0.01, 0.012)) == 0


def test_a_slow_one_for_what_fits() -> None:
    most = fitting(60.0, 256, SIZES, seen(0.1, 0.2))
    # 8 answers at 10 tokens/s and 16 at 20 tokens/s.
    assert most == pytest.approx(60.0 / (8 / 10 + 16 / 20), abs=1)
    assert fitting(1.0, 256, SIZES, seen(0.1, 0.2)) == LEAST_TOKENS
    assert fitting(1.0, LEAST_TOKENS, SIZES, seen(0.1, 0.2)) == 0


def test_one_standstill_does_not_cut_all_answers() -> None:
    usual, stood = Answered("", 2.0, 16), Answered("", 300.0, 16)
    alone = summarize_load(1, [usual, stood, usual])
    at_once = summarize_load(4, [usual] * 4)
    quiet = fitting(60.0, 256, SIZES, (summarize_load(1, [usual] * 3), at_once))
    assert fitting(60.0, 256, SIZES, (alone, at_once)) > 0.6 * quiet > LEAST_TOKENS
    # All of those that were in flight stood still.
    assert fitting(60.0, 256, SIZES, seen(0.1, 40.0)) == fitting(60.0, 256, SIZES, seen(0.1, 0.4))


def test_of_a_server_that_answered_nothing_nothing_is_known() -> None:
    assert fitting(1.0, 256, SIZES, seen(math.nan, math.nan)) == 0


def test_a_slow_start_leaves_some_time_to_ask() -> None:
    assert time_to_ask(1600.0, 60.0) == 40.0
    assert time_to_ask(1600.0, 99.0) == 40.0
    assert time_to_ask(1600.0, 10.0) == 90.0
