"""Which setting is best under gains that may be true, within what the engine can be told.

The value of a setting is the mean logarithm of its gain over loads. Pure arithmetic on tables of
gains; knows neither servers nor measurements.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.lab.stats.intervals import Floats
from foretoken.lab.tune.settings import OFF, Question, Setting

Bools = NDArray[np.bool_]


class Best(NamedTuple):
    """A setting, and its mean logarithm of the gain."""

    setting: Setting
    value: float


def best_setting(question: Question, gains_SL: Floats, kept: Bools | None = None) -> Best:
    """The best that the engine can be told, made of the settings that are `kept`."""
    kept = np.ones(len(question.settings), np.bool_) if kept is None else kept
    found = Best(OFF, 0.0)
    for drafter in question.drafters:
        places = _places(question, drafter, kept)
        if not places:
            continue
        value, lengths = _best_lengths(question, gains_SL[None], places)
        if value[0] > found.value:
            chosen = tuple(int(length) for length in lengths[0])
            own = question.settings[places[0]].decides_itself
            setting = Setting(drafter, () if own else chosen)
            found = Best(question.alike(setting), float(value[0]))
    return found


def best_values(question: Question, gains_DSL: Floats, kept: Bools) -> Floats:
    """The value of the best setting under each draw of gains."""
    best = np.zeros(len(gains_DSL))
    for drafter in question.drafters:
        places = _places(question, drafter, kept)
        if places:
            best = np.maximum(best, _best_lengths(question, gains_DSL, places)[0])
    return best


def value_of(question: Question, gains_DSL: Floats, setting: Setting) -> Floats:
    """The value of one setting under each draw of gains."""
    total = np.zeros(len(gains_DSL))
    for place in range(len(question.loads)):
        length = setting.length(place)
        if setting.is_off or (setting.lengths and not length):
            continue
        wanted = Setting(setting.drafter, (length,) if setting.lengths else ())
        total += gains_DSL[:, question.settings.index(wanted), place]
    value: Floats = total / len(question.loads)
    return value


def worth_measuring(
    question: Question, gains_DSL: Floats, most_lost: float, *, at_most: int
) -> Bools:
    """The fewest settings among which the best is, but for so much of its value on average.

    They are dropped one by one, the one that is missed least first; of two that are alike one
    stays.
    """
    kept = np.ones(len(question.settings), np.bool_)
    whole = float(best_values(question, gains_DSL, kept).mean())
    while kept.any():
        losses = {}
        for place in np.flatnonzero(kept):
            without = kept.copy()
            without[place] = False
            losses[int(place)] = whole - float(best_values(question, gains_DSL, without).mean())
        least = min(losses, key=lambda place: losses[place])
        if losses[least] > most_lost and kept.sum() <= at_most:
            break
        kept[least] = False
    return kept


def _places(question: Question, drafter: str, kept: Bools) -> list[int]:
    """Where a drafter's settings stand, the shortest first."""
    found = [i for i, one in enumerate(question.settings) if one.drafter == drafter and kept[i]]
    return sorted(found, key=lambda i: question.settings[i].length(0))


def _best_lengths(
    question: Question, gains_DSL: Floats, places: Collection[int]
) -> tuple[Floats, NDArray[np.int64]]:
    """Value and lengths by load of a drafter's best schedule under each draw: (D), (D, L)."""
    order = list(places)
    own = gains_DSL[:, order]
    draws, _, loads = own.shape
    table = np.concatenate([np.zeros((draws, 1, loads)), own], axis=1)
    lengths = np.array([0, *(question.settings[i].length(0) for i in order)])
    if question.schedule == "one" or question.settings[order[0]].decides_itself:
        picks = np.repeat(table.mean(axis=2).argmax(axis=1)[:, None], loads, axis=1)
    elif question.schedule == "any":
        picks = table.argmax(axis=1)
    else:
        picks = _falling(table)
    value = np.take_along_axis(table, picks[:, None, :], axis=1)[:, 0].mean(axis=1)
    return value, lengths[picks]


def _falling(table_DKL: Floats) -> NDArray[np.int64]:
    """Places of the best lengths of which none is longer than at a lower load."""
    draws, _, loads = table_DKL.shape
    # From the last load back: the best of what follows where no length is above this one.
    best_DK = np.zeros(table_DKL.shape[:2])
    choices = np.zeros(table_DKL.shape, np.int64)
    for load in range(loads - 1, -1, -1):
        total_DK = table_DKL[:, :, load] + best_DK
        best_DK = np.maximum.accumulate(total_DK, axis=1)
        is_new = total_DK >= best_DK
        numbers = np.where(is_new, np.arange(total_DK.shape[1]), 0)
        choices[:, :, load] = np.maximum.accumulate(numbers, axis=1)
    picks = np.zeros((draws, loads), np.int64)
    limit = np.full(draws, table_DKL.shape[1] - 1)
    for load in range(loads):
        limit = choices[np.arange(draws), limit, load]
        picks[:, load] = limit
    return picks
