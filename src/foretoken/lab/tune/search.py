"""Which start of the server comes next, and when enough is known: a pure function of the visits.

First plain decoding alone, for its pace; then turns, in which plain decoding and every setting that
may still be best are asked the same; then pairs of plain decoding and the best, which decide by
themselves whether it is used. Since the next visit follows from the visits so far, a search that
was cut short goes on from what is on disk. Invariant: no visit begins that is not expected to end
within the budget.

What all visits say about every setting, the ones hardly measured included, is a Gaussian model of
the logarithm of seconds per token (Rasmussen and Williams 2006, chapter 2). What is unknown: the
gain of each setting at each load, alike for neighbouring lengths and loads; the pace of plain
decoding; what a turn's prompts and the machine at that time add for all alike; what one start adds;
noise. Measuring few settings so says something about the others, and a lucky start is drawn towards
what its neighbours say. Which setting is best follows from gains that may be true: its value is the
mean logarithm of its gain over loads, within what the engine can be told.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median_low

import numpy as np
from numpy.typing import NDArray

from foretoken.lab.stats.intervals import Floats, Interval, student_quantile, unknown
from foretoken.lab.stats.repeats import in_turn
from foretoken.lab.tune.settings import OFF, OUTLIER, NextVisit, Question, Setting, Visit

Bools = NDArray[np.bool_]

GAIN_SD = 0.5
"""Of the logarithm of a gain, before anything is measured."""
LENGTH_SCALE, LOAD_SCALE = 1.5, 3.0
"""Doublings of (length + 1), and of the load, after which settings have little in common."""
OWN_SD = 0.015
"""What a setting may differ by from what its neighbours say."""
TURN_SD, PROMPTS_SD = 0.03, 0.1
"""Of a turn at all loads, and of its prompts at one load, for all settings alike."""
SUITS_BOTH = 0.5
"""Correlation at two loads of how well a turn's prompts suit a drafter."""
PLAIN_SD = 10.0
"""Of the pace of plain decoding: nothing is known of it."""
START_SDS, NOISE_SDS = (0.01, 0.02, 0.035, 0.05, 0.07, 0.1, 0.2), (0.01, 0.02, 0.04, 0.08, 0.2)
SUITS_SDS = (0.1, 0.2, 0.4)
USUAL_START_SD, USUAL_NOISE_SD, USUAL_SUITS_SD = 0.04, 0.03, 0.25
"""Before anything is measured; starts of one build differ by so much."""
KNOWN = 0.7
"""Spread of the logarithm of what spreads usually are."""
TAILS = 3.0
"""Degrees of freedom of the noise of one load: now and then a request stands still, and a load of
few requests looks twice as slow. What no neighbour and no other start confirms counts for less."""
_ROUNDS = 2
"""Of finding the spreads, and what stood still under them."""
_USUAL_DEPTH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads:
    """How much measurements differ that should be equal, as shares."""

    start: float = USUAL_START_SD
    """From one start to the next, at all loads alike."""
    noise: float = USUAL_NOISE_SD
    """Of one load beyond that."""
    suits: float = USUAL_SUITS_SD
    """From one request to the next, of what a drafter gains on it: a turn of few requests may suit
    one drafter and not another, whatever the length."""

    def of_pair(self, requests: Sequence[int]) -> float:
        """Standard deviation of the mean logarithm of a gain, from one start of each side.
        `requests` is how many were asked at each load. Both sides are asked the same, so what suits
        the drafter differs from pair to pair."""
        few_L = 1.0 / np.sqrt(np.array(requests, np.float64))
        alike = np.where(np.eye(few_L.size), 1.0, SUITS_BOTH)
        suits = self.suits**2 * float(few_L @ alike @ few_L) / few_L.size**2
        return math.sqrt(2.0 * (self.start**2 + self.noise**2 / few_L.size) + suits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Gains of all settings at all loads: what is likely, and together with what."""

    question: Question
    mean_SL: Floats
    """Logarithms of gains over plain decoding, by setting and load."""
    covariance: Floats
    """(S x L, S x L), settings first."""
    spreads: Spreads

    def draw(self, count: int, seed: int = 0) -> Floats:
        """Gains that may be true: (count, S, L)."""
        normal = np.random.default_rng(seed).standard_normal((count, self.mean_SL.size))
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        drawn: Floats = (normal @ root.T).reshape(count, *self.mean_SL.shape) + self.mean_SL
        return drawn


def believe(question: Question, visits: Sequence[Visit], spreads: Spreads | None = None) -> Beliefs:
    """What the visits say; without `spreads`, those that explain the visits best."""
    model = _Model(question, [visit for visit in visits if not visit.problem])
    return model.beliefs(spreads or model.likeliest())


class _Model:
    """The visits as one vector, and what its entries have in common."""

    def __init__(self, question: Question, visits: Sequence[Visit]) -> None:
        self._question = question
        self._prior = _prior(question)
        rows = [
            (number, visit, question.loads.index(seen.load), seen)
            for number, visit in enumerate(visits)
            for seen in visit.loads
            if seen.pace_s > 0.0
        ]
        paces = [seen.pace_s for *_, seen in rows]
        center = math.log(mean(paces)) if rows else 0.0
        self._logs_N: Floats = np.log(np.array(paces, np.float64)) - center
        visit_N = np.array([number for number, *_ in rows], np.int64)
        turn_N = np.array([visit.turn for _, visit, *_ in rows], np.int64)
        load_N = np.array([place for *_, place, _ in rows], np.int64)
        names = ["", *question.drafters]
        drafters = [names.index(visit.setting.drafter) for _, visit, *_ in rows]
        drafter_N = np.array(drafters, np.int64)
        few_N = np.array([max(seen.requests, 1) for *_, seen in rows], np.float64) ** -0.5
        # A gain makes answers sooner: it is taken off the logarithm of the pace.
        self._design = np.zeros((len(rows), len(self._prior)))
        for row, (_, visit, place, _) in enumerate(rows):
            if (own := question.index_at(visit.setting, place)) is not None:
                self._design[row, own * len(question.loads) + place] = -1.0
        load, turn = load_N[:, None] == load_N, turn_N[:, None] == turn_N
        drafts = (drafter_N[:, None] == drafter_N) & (drafter_N > 0)
        shared = PLAIN_SD**2 * load + TURN_SD**2 * turn + PROMPTS_SD**2 * (load & turn)
        self._common = self._design @ self._prior @ self._design.T + shared
        self._start = visit_N[:, None] == visit_N
        self._suits = np.outer(few_N, few_N) * np.where(load, 1.0, SUITS_BOTH) * (turn & drafts)
        self._times_N: Floats = np.ones(len(rows))

    def _covariance(self, spreads: Spreads) -> Floats:
        noise = spreads.noise**2 * np.diag(self._times_N)
        varies = spreads.start**2 * self._start + spreads.suits**2 * self._suits
        whole: Floats = self._common + varies + noise
        return whole

    def likeliest(self) -> Spreads:
        """Of a few spreads those that explain the visits best, usual ones preferred."""
        found = Spreads()
        if self._logs_N.size < 3 * len(self._question.loads):
            return found
        for _ in range(_ROUNDS):
            pairs = itertools.product(START_SDS, NOISE_SDS)
            found = max((Spreads(start=start, noise=n) for start, n in pairs), key=self._evidence)
            found = max((replace(found, suits=one) for one in SUITS_SDS), key=self._evidence)
            # Times the usual variance that the noise of each measurement has, under Student's t: a
            # step of expectation and maximization (Lange, Little and Taylor 1989).
            noise_N = found.noise**2 * self._times_N
            inverse = np.linalg.inv(self._covariance(found))
            seen_N = noise_N * (inverse @ self._logs_N)
            squares_N = seen_N**2 + noise_N - noise_N**2 * np.diag(inverse)
            self._times_N = (TAILS + squares_N / found.noise**2) / (TAILS + 1.0)
        return found

    def _evidence(self, spreads: Spreads) -> float:
        root = np.linalg.cholesky(self._covariance(spreads))
        left = np.linalg.solve(root, self._logs_N)
        usual = (
            math.log(spreads.start / USUAL_START_SD) ** 2
            + math.log(spreads.noise / USUAL_NOISE_SD) ** 2
            + math.log(spreads.suits / USUAL_SUITS_SD) ** 2
        ) / (2.0 * KNOWN**2)
        return float(-0.5 * left @ left - np.log(np.diag(root)).sum() - usual)

    def beliefs(self, spreads: Spreads) -> Beliefs:
        gains, covariance = np.zeros(len(self._prior)), self._prior
        if self._logs_N.size:
            cross = self._prior @ self._design.T
            weights = np.linalg.solve(self._covariance(spreads), cross.T).T
            gains = weights @ self._logs_N
            covariance = covariance - weights @ cross.T
        return Beliefs(
            question=self._question,
            mean_SL=gains.reshape(len(self._question.settings), len(self._question.loads)),
            covariance=(covariance + covariance.T) / 2.0,
            spreads=spreads,
        )


def _prior(question: Question) -> Floats:
    """Covariance of the logarithms of all gains before anything is measured; their mean is 0."""
    points = [(setting, load) for setting in question.settings for load in question.loads]
    names = np.array([question.drafters.index(setting.drafter) for setting, _ in points])
    # Of a server that decides itself, a usual length.
    depths = [setting.length(0) if setting.lengths else _USUAL_DEPTH for setting, _ in points]
    lengths = np.log2(np.array(depths, np.float64) + 1.0)
    loads = np.log2([float(load) for _, load in points])
    # No drafts gain nothing: gains are pinned there, whoever drafts.
    at_none = _near(lengths, np.zeros(1), LENGTH_SCALE)
    pinned = _near(lengths, lengths, LENGTH_SCALE) - np.outer(at_none, at_none)
    alike = np.where(names[:, None] == names, pinned, 0.0) * _near(loads, loads, LOAD_SCALE)
    return GAIN_SD**2 * alike + OWN_SD**2 * np.eye(len(points))


def _near(one: Floats, other: Floats, scale: float) -> Floats:
    return np.exp(-0.5 * ((one[:, None] - other[None, :]) / scale) ** 2)


def best_setting(
    question: Question, gains_SL: Floats, kept: Bools | None = None
) -> tuple[Setting, float]:
    """The best that the engine can be told, made of the settings that are `kept`, and its value."""
    best, value = OFF, 0.0
    for one, value_D, lengths_DL in _schedules(question, gains_SL[None], kept):
        if value_D[0] > value:
            lengths = () if one.decides_itself else tuple(map(int, lengths_DL[0]))
            best, value = Setting(one.drafter, lengths).shortest(), float(value_D[0])
    return best, value


def best_values(question: Question, gains_DSL: Floats, kept: Bools | None = None) -> Floats:
    """The value of the best setting under each draw of gains."""
    best: Floats = np.zeros(len(gains_DSL))
    for _, value_D, _ in _schedules(question, gains_DSL, kept):
        best = np.maximum(best, value_D)
    return best


def value_of(question: Question, gains_DSL: Floats, setting: Setting) -> Floats:
    total = np.zeros(len(gains_DSL))
    for place in range(len(question.loads)):
        if (own := question.index_at(setting, place)) is not None:
            total += gains_DSL[:, own, place]
    return total / len(question.loads)


def worth_measuring(
    question: Question, gains_DSL: Floats, most_lost: float, *, at_most: int
) -> Bools:
    """The fewest settings among which the best is, but for so much of its value on average. They
    are dropped one by one, the one that is missed least first; of two that are alike one stays."""
    kept = np.ones(len(question.settings), np.bool_)
    whole = float(best_values(question, gains_DSL).mean())
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


def _schedules(
    question: Question, gains_DSL: Floats, kept: Bools | None
) -> Iterator[tuple[Setting, Floats, NDArray[np.int64]]]:
    """Of each drafter one of its settings, and of its best schedule under each draw the value (D)
    and the lengths by load (D, L)."""
    for drafter in question.drafters:
        own = [
            i
            for i, one in enumerate(question.settings)
            if one.drafter == drafter and (kept is None or kept[i])
        ]
        if not own:
            continue
        own.sort(key=lambda i: question.settings[i].length(0))
        first = question.settings[own[0]]
        draws, _, loads = gains_DSL.shape
        table = np.concatenate([np.zeros((draws, 1, loads)), gains_DSL[:, own]], axis=1)
        lengths = np.array([0, *(question.settings[i].length(0) for i in own)])
        if question.schedule == "one" or first.decides_itself:
            picks = np.repeat(table.mean(axis=2).argmax(axis=1)[:, None], loads, axis=1)
        elif question.schedule == "any":
            picks = table.argmax(axis=1)
        else:
            picks = _falling(table)
        value = np.take_along_axis(table, picks[:, None, :], axis=1)[:, 0].mean(axis=1)
        yield first, value, lengths[picks]


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


GOOD_ENOUGH = 0.002
"""Of the mean logarithm of the gain: what further turns may still be expected to bring when they
end, and what dropping settings may cost."""
SURE, SURE_EARLY = 0.95, 0.99
"""Level of the final A/B's interval over all its looks together, and that of the first where there
are two: a setting that is as fast as none passes its low end once in forty times at the most. What
is decided early is clear, so most of the error is left to the last look, where gains are small."""
FAR_APART = 1.5
"""Times as many pairs as at the first look, below which a second one is not worth its price."""
FEWEST_PAIRS, MOST_PAIRS = 4, 40
POWER = 1.65
"""Standard errors beyond the interval's end at which a true gain is found 95 times in 100."""
CHECK_SHARE = 0.65
"""Of the budget that the final A/B may take, if it needs to."""
LATE = 1.3
"""A visit may take so much longer than those before it."""
DRAWS = 300
FEWEST_REQUESTS = 8
FEWEST_STARTS = 2
_SELF_DECIDING_LEAD = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    question: Question
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    chosen: Setting
    """The best of what was started, as far as is known."""
    value: float
    missing: float
    """How much better the truly best setting is expected to be."""
    kept: tuple[Setting, ...]
    beliefs: Beliefs


def spent_s(visits: Sequence[Visit]) -> float:
    return sum(visit.seconds for visit in visits)


def next_visit(search: Search, visits: Sequence[Visit]) -> NextVisit | None:
    """What to measure next; None: the search has ended."""
    question = search.question
    if not visits:
        return NextVisit(OFF, 0, tuple((n, max(2 * n, FEWEST_REQUESTS)) for n in question.loads))
    checks = [visit for visit in visits if visit.check]
    found = [visit for visit in visits if not visit.check]
    now = stand(search, found)
    wanted = None if checks else _next_of_turn(search, found, now)
    return wanted or _next_check(search, found, checks, now)


def stand(search: Search, found: Sequence[Visit]) -> SearchState:
    """What the search's visits say, the final A/B aside."""
    broken = {visit.setting for visit in found if visit.problem}
    able = tuple(setting for setting in search.question.settings if setting not in broken)
    question = replace(search.question, settings=able)
    beliefs = believe(question, found)
    draws = beliefs.draw(DRAWS, seed=len(found))
    chosen = _choose(question, beliefs, draws, {visit.setting for visit in found})
    missing = best_values(question, draws) - value_of(question, draws, chosen)
    visits_left = (search.budget_s - spent_s(found)) / max(visit_s(search, found), 1e-9)
    kept = worth_measuring(question, draws, GOOD_ENOUGH, at_most=max(int(visits_left / 3), 2))
    return SearchState(
        chosen=chosen,
        value=float(value_of(question, beliefs.mean_SL[None], chosen)[0]),
        missing=float(missing.mean()),
        kept=tuple(one for one, stays in zip(able, kept, strict=True) if stays),
        beliefs=beliefs,
    )


def _choose(
    question: Question, beliefs: Beliefs, draws: Floats, started: Collection[Setting]
) -> Setting:
    """The best on average of what was started: a final A/B with a guess may lose what is known. A
    server that decides itself keeps the right to, unless it is beaten."""
    seen = [setting for setting in question.settings if setting in started]
    kept = np.array([setting in started for setting in question.settings], np.bool_)
    best, _ = best_setting(question, beliefs.mean_SL, kept)
    for setting in seen:
        if setting.decides_itself and not best.is_off and best != setting:
            ahead = value_of(question, draws, best) > value_of(question, draws, setting)
            if float(ahead.mean()) < _SELF_DECIDING_LEAD:
                return setting
    return best


def visit_s(search: Search, visits: Sequence[Visit]) -> float:
    """Seconds that a visit is expected to take; one that stood still says nothing about that."""
    first, last = visits[0], visits[-1]
    # The first visit asked little; those that follow ask as much as suits their start.
    asked = zip(first.loads, sizes(search, visits, last.turn + 1), strict=True)
    more = sum(
        (requests - seen.requests) * seen.seconds / max(seen.requests, 1)
        for seen, (_, requests) in asked
    )
    found = [first.seconds + more]
    found += [visit.seconds for visit in visits if visit.turn > 0 and not visit.problem]
    most = OUTLIER * median_low(found)
    return mean(min(seconds, most) for seconds in found[1:] or found)


def _next_of_turn(search: Search, found: Sequence[Visit], now: SearchState) -> NextVisit | None:
    """The next setting of this turn, or the first of another; None where enough is known, or it
    would take the time that the final A/B needs."""
    each_s = LATE * visit_s(search, found)
    pairs = FEWEST_PAIRS if now.chosen.is_off else wanted_pairs(search, found, now)
    # One visit alone may have stood still; a second tells, so it only has to fit.
    reserve_s = min(2 * pairs * each_s, CHECK_SHARE * search.budget_s) if len(found) > 1 else 0.0
    if spent_s(found) + each_s + reserve_s > search.budget_s:
        return None
    unsure = _hardly_seen(now, found)
    if now.missing < GOOD_ENOUGH and len(found) > 2 and not unsure:
        return None
    turn = max(found[-1].turn, 1)
    members = [OFF, *sorted({*now.kept, *unsure}, key=_coarse_first)]
    for one in (turn, turn + 1):
        seen = {visit.setting for visit in found if visit.turn == one}
        left = [setting for setting in in_turn(members, one - 1) if setting not in seen]
        if left:
            return NextVisit(left[0], one, sizes(search, found, one))
    return None


def _hardly_seen(now: SearchState, found: Sequence[Visit]) -> list[Setting]:
    """What the chosen setting is made of, and the next lengths to either side, as far as nobody has
    started them twice: one bad start may have made the best look bad, or another good."""
    settings = now.beliefs.question.settings
    own = [one for one in settings if one.drafter == now.chosen.drafter]
    own.sort(key=lambda one: one.length(0))
    used = {one.length(0) for one in own} & set(now.chosen.lengths)
    near = set()
    for place, one in enumerate(own):
        if now.chosen.decides_itself or one.length(0) in used:
            near.update(own[max(place - 1, 0) : place + 2])
    starts = Counter(visit.setting for visit in found)
    return [one for one in own if one in near and starts[one] < FEWEST_STARTS]


def _coarse_first(setting: Setting) -> tuple[int, str]:
    """A server that decides itself is the one to beat; then lengths that say most about the others:
    the middle, the ends, the rest."""
    order = (0, 3, 8, 1, 5, 2)
    length = setting.length(0)
    return (order.index(length) if length in order else len(order), setting.name)


def sizes(search: Search, found: Sequence[Visit], turn: int) -> tuple[tuple[int, int], ...]:
    """Requests at each load: half as long in all as a start takes, within bounds of the budget.
    Starts differ by more than what is left of the requests' differences then. Powers of two, so
    that one turn is asked what another was. All visits of a turn are asked the same: what is known
    of the pace is from the turns before."""
    plain = [visit for visit in found if visit.setting.is_off and visit.turn < turn]
    start_s = _undisturbed([visit.start_s for visit in plain])
    wanted_s = min(max(start_s / 2.0, search.budget_s / 120), search.budget_s / 30)
    each_s = wanted_s / len(plain[0].loads)
    chosen = []
    for place, seen in enumerate(plain[0].loads):
        least = max(2 * seen.load, FEWEST_REQUESTS)
        loads = [visit.loads[place] for visit in plain]
        request_s = _undisturbed([one.seconds / max(one.requests, 1) for one in loads])
        doublings = int(math.log2(max(each_s / max(request_s, 1e-9) / least, 1.0)))
        chosen.append((seen.load, least * 2 ** min(doublings, 3)))
    return tuple(chosen)


def _undisturbed(seconds: Sequence[float]) -> float:
    least = min(seconds)
    return seconds[0] if seconds[0] <= OUTLIER * least else least


def _next_check(
    search: Search, found: Sequence[Visit], checks: Sequence[Visit], now: SearchState
) -> NextVisit | None:
    """The next half of a pair; None where the pairs have decided, or there is no more time."""
    if now.chosen.is_off:
        return None
    first = found[-1].turn + 1
    if len(pair_differences(checks, search.question.loads)) == early_look(search, found, now):
        gain = checked_gain([*found, *checks], search, now)
        if gain.low > 1.0 or gain.high < 1.0 + GOOD_ENOUGH:
            return None
    visit = check_visit_s(search, [*found, *checks], now)
    for number in range(MOST_PAIRS):
        seen = {visit.setting for visit in checks if visit.turn == first + number}
        left = [setting for setting in in_turn((OFF, now.chosen), number) if setting not in seen]
        if left:
            # Half a pair is worth nothing.
            takes_s = (LATE + len(left) - 1.0) * visit
            if spent_s([*found, *checks]) + takes_s > search.budget_s:
                return None
            asked = sizes(search, found, first)
            return NextVisit(left[0], first + number, asked, check=True)
    return None


def check_visit_s(search: Search, visits: Sequence[Visit], now: SearchState) -> float:
    """Seconds that a visit of the final A/B is expected to take: others may be slower."""
    drafters = ("", now.chosen.drafter)
    return visit_s(search, [visits[0], *(v for v in visits[1:] if v.setting.drafter in drafters)])


def early_look(search: Search, found: Sequence[Visit], now: SearchState) -> int:
    """Pairs after which the final A/B is looked at before the time is up; 0: it is not. When the
    expected gain should show. Every look is paid for with a wider interval at the others, so where
    that is close to the end there is only the last."""
    first = wanted_pairs(search, found, now)
    pair_s = 2.0 * max(check_visit_s(search, found, now), 1e-9)
    affordable = min(max(int((search.budget_s - spent_s(found)) / pair_s), 1), MOST_PAIRS)
    return first if affordable > FAR_APART * first else 0


def wanted_pairs(search: Search, found: Sequence[Visit], now: SearchState) -> int:
    """Pairs that show the expected gain, had they the time."""
    asked = [requests for _, requests in sizes(search, found, found[-1].turn + 1)]
    spread = now.beliefs.spreads.of_pair(asked)
    errors = student_quantile((1.0 + SURE_EARLY) / 2.0, 10) + POWER
    wanted = math.ceil((errors * spread / max(now.value, 1e-3)) ** 2)
    return min(max(wanted, FEWEST_PAIRS), MOST_PAIRS)


def checked_gain(visits: Sequence[Visit], search: Search, now: SearchState) -> Interval:
    """Gain of the final A/B over its loads. Student's interval over pairs, at the level of their
    look. The spread of pairs is what they show and what the search's visits showed, each counted by
    how much it knows."""
    differences = np.array(pair_differences(visits, search.question.loads))
    if not differences.size:
        return unknown(level=SURE)
    found = [visit for visit in visits if not visit.check]
    known = min(max(len(found) // 2, 2), 12)
    middle, pairs = float(differences.mean()), differences.size
    level, early = SURE, early_look(search, found, now)
    if early:  # an early look's, or what that leaves
        level = SURE_EARLY if pairs == early else SURE + (1.0 - SURE_EARLY)
    squares = float(((differences - middle) ** 2).sum())
    asked = sizes(search, found, found[-1].turn + 1)
    before = now.beliefs.spreads.of_pair([requests for _, requests in asked]) ** 2
    spread = math.sqrt((known * before + squares) / (known + pairs - 1))
    half = student_quantile((1 + level) / 2, known + pairs - 1) * spread / math.sqrt(pairs)
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half), level)


def pair_differences(visits: Sequence[Visit], loads: Sequence[int]) -> list[float]:
    """For each whole pair of the final A/B the mean logarithm of the gain over the loads."""
    found = []
    for turn in sorted({visit.turn for visit in visits if visit.check}):
        pair = [visit for visit in visits if visit.check and visit.turn == turn]
        sides = {visit.setting.is_off: visit for visit in pair if not visit.problem}
        if len(sides) == 2:
            logs = [math.log(sides[True].pace(load) / sides[False].pace(load)) for load in loads]
            if known := [value for value in logs if math.isfinite(value)]:
                found.append(sum(known) / len(known))
    return found
