"""What a search found, in one sentence, one command, and as data.

Says nothing that the final A/B did not show: where that was lost or could not be held, the answer
is to leave speculation off.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from foretoken.lab.stats.intervals import Interval
from foretoken.lab.tune.search import (
    FEWEST_PAIRS,
    MOST_PAIRS,
    Search,
    SearchState,
    best_setting,
    checked_gain,
    pair_differences,
    spent_s,
    stand,
    visit_s,
)
from foretoken.lab.tune.settings import OFF, Question, Setting
from foretoken.lab.tune.visits import Visit
from foretoken.lab.verdict import FASTER, LEAVE_IT_OFF, MEASURE_MORE, USE_IT, Verdict

RESTLESS = 0.1
"""Starts that differ by so much are a machine's doing more than a server's."""
WORTH_SAYING = 0.03
"""Gains that an engine's schedule gives away are told from here on."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGain:
    """What the chosen setting does at one load."""

    load: int
    length: int | None
    """Drafts per step; None: the server decides."""
    gain: float
    """As the final A/B had it; NaN without one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KindGain:
    """What the chosen setting does for one class of requests, in the mix."""

    kind: str
    gain: Interval


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSeen:
    """One setting as the search left it."""

    setting: str
    starts: int
    gains: tuple[float, ...]
    """Expected at each load, neighbours and chance taken into account."""
    problem: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TunedAnswer:
    """Everything that is said at the end."""

    verdict: str
    """The word of `lab.verdict`."""
    sentence: str
    command: str
    """Of the server as it should be started."""
    setting: str
    candidate: str
    """The best setting found, proven or not."""
    gain: Interval
    """Of the candidate by the final A/B: time of an answer without over with."""
    pairs: int
    loads: tuple[LoadGain, ...]
    kinds: tuple[KindGain, ...]
    advice: tuple[str, ...]
    settings: tuple[SettingSeen, ...]
    start_spread: float
    """How much one start differs from the next, as a share."""
    visits: int
    minutes: float


def make_answer(
    search: Search, visits: Sequence[Visit], line: Callable[[Setting], str]
) -> TunedAnswer:
    """The answer that the visits support; `line` writes commands."""
    now = stand(search, [visit for visit in visits if not visit.check])
    loads = search.question.loads
    gain = checked_gain(visits, search, now)
    pairs = len(pair_differences(visits, loads))
    word, reason = _untried(search, visits) or _judged(
        search, now, gain, pairs, {visit.setting.name for visit in visits}
    )
    command = line(now.chosen if word == USE_IT else OFF)
    told = "" if word == MEASURE_MORE else command
    kinds = tuple(
        KindGain(kind=kind, gain=checked_gain(visits, search, now, kind)) for kind in _kinds(visits)
    )
    return TunedAnswer(
        verdict=word,
        sentence=Verdict(word=word, reason=reason, command=told).sentence,
        command=command,
        setting=now.chosen.name if word == USE_IT else OFF.name,
        candidate=now.chosen.name,
        gain=gain,
        pairs=pairs,
        loads=tuple(_at_load(now.chosen, visits, place, n) for place, n in enumerate(loads)),
        kinds=kinds,
        advice=(*_cut(visits), *_advice(search.question, now, kinds)),
        settings=_seen(search.question, now, visits),
        start_spread=now.beliefs.spreads.start,
        visits=len(visits),
        minutes=spent_s(visits) / 60.0,
    )


def _at_load(chosen: Setting, visits: Sequence[Visit], place: int, load: int) -> LoadGain:
    logs = pair_differences(visits, (load,))
    gain = math.exp(sum(logs) / len(logs)) if logs else math.nan
    length = None if chosen.decides_itself else chosen.length(place)
    return LoadGain(load=load, length=length, gain=gain)


def _kinds(visits: Sequence[Visit]) -> list[str]:
    found = {kind for visit in visits if visit.check for seen in visit.loads for kind in seen.kinds}
    return sorted(found) if len(found) > 1 else []


def _untried(search: Search, visits: Sequence[Visit]) -> tuple[str, str] | None:
    """What is said where the time was up before a setting was tried; None where one was."""
    if any(not visit.setting.is_off for visit in visits) or not search.question.settings:
        return None
    each_s = visit_s(search, visits)
    starts = len(search.question.settings) + 2 * FEWEST_PAIRS + 2
    return MEASURE_MORE, (
        f"one visit of this server takes {each_s / 60:.1f} minutes, "
        f"so {search.budget_s / 60:g} minutes were too few to try anything; "
        f"--minutes {math.ceil(each_s * starts / 60)} --resume goes on"
    )


def _judged(
    search: Search, now: SearchState, gain: Interval, pairs: int, tried: Collection[str]
) -> tuple[str, str]:
    """The word and its reason."""
    chosen = now.chosen
    if chosen.is_off:
        nearest = _nearest(now, tried)
        found = f"; the nearest, {nearest[0]}, is {nearest[1]:.2f}x" if nearest else ""
        count = len(search.question.settings)
        known = sum(setting.name in tried for setting in search.question.settings)
        of_all = f" of the {known} that were tried, out of {count}," if 0 < known < count else ""
        return LEAVE_IT_OFF, f"no setting{of_all} makes answers sooner{found}"
    name = _words(search.question, chosen)
    if not pairs:
        return MEASURE_MORE, (
            f"{name} looks best ({math.exp(now.value):.2f}x expected), but there was no time to "
            "prove it; give more --minutes and --resume"
        )
    shown = f"{gain.estimate:.2f} times as fast as without ({gain.low:.2f} to {gain.high:.2f})"
    starts = f"{pairs} start{'s' if pairs > 1 else ''} of each"
    if gain.low > FASTER:
        return USE_IT, f"{name}: answers come {shown}, by a final A/B of {starts}"
    seen = f"the best setting found, {name}, was {shown} in a final A/B of {starts}"
    if gain.high < FASTER:
        return LEAVE_IT_OFF, f"{seen}: it is slower"
    if pairs >= MOST_PAIRS:
        return LEAVE_IT_OFF, f"{seen}: that is no proof, and more pairs would hardly be one"
    return MEASURE_MORE, f"{seen}: that is no proof; give more --minutes and --resume"


def _words(question: Question, chosen: Setting) -> str:
    """A setting for a sentence."""
    if chosen.decides_itself:
        return "the server's own control"
    if len(chosen.lengths) == 1:
        return f"{chosen.drafter} with {chosen.lengths[0]} drafts"
    by_load = ", ".join(
        f"{length} at {load}" for length, load in zip(chosen.lengths, question.loads, strict=True)
    )
    return f"{chosen.drafter} with drafts by requests in flight ({by_load})"


def _nearest(now: SearchState, tried: Collection[str]) -> tuple[str, float] | None:
    """Of the settings that were tried the one that is expected to lose least."""
    values_S = now.beliefs.mean_SL.mean(axis=1).tolist()
    pairs = zip(now.beliefs.question.settings, values_S, strict=True)
    found = [(value, setting.name) for setting, value in pairs if setting.name in tried]
    if not found:
        return None
    value, name = max(found)
    return name, math.exp(value)


def _cut(visits: Sequence[Visit]) -> tuple[str, ...]:
    """What is said where answers were shorter than the workload has them."""
    most = max((visit.most_tokens for visit in visits), default=0)
    if not most:
        return ()
    return (
        f"Answers were cut at {most} tokens to fit the time, so prompts weigh more than they do in "
        "whole answers. More --minutes with another --out lets them be longer.",
    )


def _advice(question: Question, now: SearchState, kinds: Sequence[KindGain]) -> tuple[str, ...]:
    """What the engine cannot be told, and what its operator can do."""
    said = [
        f"{one.kind} loses in this mix: {one.gain.estimate:.2f}x ({one.gain.low:.2f} to "
        f"{one.gain.high:.2f}). Send it to a server without speculation, or tune the two apart."
        for one in kinds
        if one.gain.high < 1.0
    ]
    beliefs = now.beliefs
    if beliefs.spreads.start >= RESTLESS:
        said.append(
            f"Starts of one setting differ by {beliefs.spreads.start:.0%}: is something else using "
            "this machine? A quiet one needs less time and shows smaller gains."
        )
    longest = max((setting.length(0) for setting in question.settings), default=0)
    if now.chosen.lengths and max(now.chosen.lengths) == longest:
        longer = sorted({longest, longest + 4, longest * 2})
        said.append(
            f"{longest} drafts is the longest that was tried; -k {','.join(map(str, longer))} "
            "with another --out would try more."
        )
    possible = replace(beliefs.question, schedule="any")
    if now.chosen.is_off or now.chosen.decides_itself or not possible.settings:
        return tuple(said)
    free = best_setting(possible, beliefs.mean_SL)
    if free.value > now.value + WORTH_SAYING and free.setting != now.chosen:
        told = "one length" if question.schedule == "one" else "lengths that do not rise with load"
        said.append(
            f"{_words(question, free.setting)} would be {math.exp(free.value - now.value):.2f}x as "
            f"fast as that, but this engine can only be told {told}. Give each load a server of "
            "its own, where that is worth it."
        )
    return tuple(said)


def _seen(question: Question, now: SearchState, visits: Sequence[Visit]) -> tuple[SettingSeen, ...]:
    beliefs = now.beliefs
    rows = []
    for setting in question.settings:
        own = [visit for visit in visits if visit.setting == setting and not visit.check]
        problem = next((visit.problem for visit in own if visit.problem), "")
        gains: tuple[float, ...] = ()
        if setting in beliefs.question.settings:
            place = beliefs.question.settings.index(setting)
            gains = tuple(float(gain) for gain in np.exp(beliefs.mean_SL[place]))
        rows.append(
            SettingSeen(setting=setting.name, starts=len(own), gains=gains, problem=problem)
        )
    return tuple(rows)
