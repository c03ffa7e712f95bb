"""What a search found, in one sentence, one command, and as data.

Says nothing that the final A/B did not show: where that was lost or could not be held, the answer
is to leave speculation off.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.lab.stats.intervals import Interval
from foretoken.lab.tune.search import (
    FEWEST_PAIRS,
    MOST_PAIRS,
    Search,
    SearchState,
    checked_gain,
    pair_differences,
    spent_s,
    stand,
    visit_s,
)
from foretoken.lab.tune.settings import OFF, Question, Setting, Visit
from foretoken.lab.verdict import FASTER, LEAVE_IT_OFF, MEASURE_MORE, USE_IT, Verdict

RESTLESS = 0.1
"""Starts that differ by so much are a machine's doing more than a server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGain:
    load: int
    length: int | None
    """Drafts per step; None: the server decides."""
    gain: float
    """As the final A/B had it; NaN without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSeen:
    setting: str
    starts: int
    gains: tuple[float, ...]
    """Expected at each load, neighbours and chance taken into account."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedAnswer:
    verdict: str
    sentence: str
    command: str
    setting: str
    candidate: str
    """The best setting found, proven or not."""
    gain: Interval
    """Of the candidate by the final A/B: time of an answer without over with."""
    pairs: int
    loads: tuple[LoadGain, ...]
    advice: tuple[str, ...]
    settings: tuple[SettingSeen, ...]
    start_spread: float
    """How much one start differs from the next, as a share."""
    visits: int
    minutes: float


def make_answer(
    search: Search, visits: Sequence[Visit], line: Callable[[Setting], str]
) -> TunedAnswer:
    now = stand(search, [visit for visit in visits if not visit.check])
    chosen, asked = now.chosen, search.question
    gain = checked_gain(visits, search, now)
    pairs = len(pair_differences(visits, asked.loads))
    word, reason = _untried(search, visits, now) or _judged(
        asked, now, gain, pairs, {visit.setting for visit in visits}
    )
    command = line(chosen if word == USE_IT else OFF)
    told = "" if word == MEASURE_MORE else command
    loads = []
    for place, load in enumerate(asked.loads):
        logs = pair_differences(visits, (load,))
        length = None if chosen.decides_itself else chosen.length(place)
        at_load = math.exp(sum(logs) / len(logs)) if logs else math.nan
        loads.append(LoadGain(load=load, length=length, gain=at_load))
    return TunedAnswer(
        verdict=word,
        sentence=Verdict(word=word, reason=reason, command=told).sentence,
        command=command,
        setting=chosen.name if word == USE_IT else OFF.name,
        candidate=chosen.name,
        gain=gain,
        pairs=pairs,
        loads=tuple(loads),
        advice=tuple(_advice(asked, now, visits)),
        settings=tuple(_seen(setting, now, visits) for setting in asked.settings),
        start_spread=now.beliefs.spreads.start,
        visits=len(visits),
        minutes=spent_s(visits) / 60.0,
    )


def _untried(search: Search, visits: Sequence[Visit], now: SearchState) -> tuple[str, str] | None:
    """What is said where nothing is better than no drafts so far and the time was up before a
    drafter that may be was tried; None elsewhere."""
    tried = {visit.setting.drafter for visit in visits if not visit.setting.is_off}
    may_be = (one.drafter for one in (now.kept if tried else search.question.settings))
    left = list(dict.fromkeys(name for name in may_be if name not in tried))
    if not left or not now.chosen.is_off:
        return None
    each_s = visit_s(search, visits)
    starts = len(search.question.settings) + 2 * FEWEST_PAIRS + 2
    return MEASURE_MORE, (
        f"one visit of this server takes {each_s / 60:.1f} minutes, so {search.budget_s / 60:g} "
        f"minutes were too few to try {', '.join(left) if tried else 'anything'}; "
        f"--minutes {math.ceil(each_s * starts / 60)} --resume goes on"
    )


def _judged(
    asked: Question, now: SearchState, gain: Interval, pairs: int, tried: Collection[Setting]
) -> tuple[str, str]:
    if now.chosen.is_off:
        known = [setting for setting in asked.settings if setting in tried]
        of_all = f" of the {len(known)} that were tried, out of {len(asked.settings)},"
        of_all = of_all if 0 < len(known) < len(asked.settings) else ""
        means = zip(now.beliefs.question.settings, now.beliefs.mean_SL.mean(axis=1), strict=True)
        value, nearest = max(((mean, s.name) for s, mean in means if s in tried), default=(0.0, ""))
        found = f"; the nearest, {nearest}, is {math.exp(value):.2f}x" if nearest else ""
        return LEAVE_IT_OFF, f"no setting{of_all} makes answers sooner{found}"
    chosen = now.chosen
    if chosen.decides_itself:
        name = "the server's own control"
    elif len(chosen.lengths) == 1:
        name = f"{chosen.drafter} with {chosen.lengths[0]} drafts"
    else:
        by_load = zip(chosen.lengths, asked.loads, strict=True)
        listed = ", ".join(f"{length} at {load}" for length, load in by_load)
        name = f"{chosen.drafter} with drafts by requests in flight ({listed})"
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


def _advice(asked: Question, now: SearchState, visits: Sequence[Visit]) -> list[str]:
    said = []
    if most := max((visit.most_tokens for visit in visits), default=0):
        said.append(
            f"Answers were cut at {most} tokens to fit the time, so prompts weigh more than they "
            "do in whole answers. More --minutes with another --out lets them be longer."
        )
    start = now.beliefs.spreads.start
    if start >= RESTLESS:
        said.append(
            f"Starts of one setting differ by {start:.0%}: is something else using this machine? "
            "A quiet one needs less time and shows smaller gains."
        )
    longest = max((setting.length(0) for setting in asked.settings), default=0)
    if now.chosen.lengths and max(now.chosen.lengths) == longest:
        longer = sorted({longest, longest + 4, longest * 2})
        said.append(
            f"{longest} drafts is the longest that was tried; -k {','.join(map(str, longer))} "
            "with another --out would try more."
        )
    return said


def _seen(setting: Setting, now: SearchState, visits: Sequence[Visit]) -> SettingSeen:
    own = [visit for visit in visits if visit.setting == setting and not visit.check]
    able, gains = now.beliefs.question.settings, ()
    if setting in able:
        gains = tuple(np.exp(now.beliefs.mean_SL[able.index(setting)]).tolist())
    problem = next((visit.problem for visit in own if visit.problem), "")
    return SettingSeen(setting=setting.name, starts=len(own), gains=gains, problem=problem)
