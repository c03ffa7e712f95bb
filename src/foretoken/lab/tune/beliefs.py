"""What all visits together say about every setting, the ones hardly measured included.

A Gaussian model of the logarithm of seconds per token (Rasmussen and Williams 2006, chapter 2).
What is unknown: the gain of each setting at each load, alike for neighbouring lengths and loads;
the pace of plain decoding; what a turn's prompts and the machine at that time add for all alike;
what one start adds; noise. Measuring few settings so says something about the others, and a lucky
start is drawn towards what its neighbours say. Knows no server and chooses nothing.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import final

import numpy as np

from foretoken.lab.stats.intervals import Floats
from foretoken.lab.tune.settings import Question, Visit

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


@final
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
        the drafter differs from pair to pair.
        """
        few_L = 1.0 / np.sqrt(np.array(requests, np.float64))
        alike = np.where(np.eye(few_L.size), 1.0, SUITS_BOTH)
        suits = self.suits**2 * float(few_L @ alike @ few_L) / few_L.size**2
        return math.sqrt(2.0 * (self.start**2 + self.noise**2 / few_L.size) + suits)


@final
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


@final
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
        names = ("", *question.drafters)
        drafter_N = np.array(
            [names.index(visit.setting.drafter) for _, visit, *_ in rows], np.int64
        )
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
        self._times_N = np.ones(len(rows))

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
            self._times_N = self._stood_still(found)
        return found

    def _stood_still(self, spreads: Spreads) -> Floats:
        """Times the usual variance that the noise of each measurement has, under Student's t.

        A step of expectation and maximization (Lange, Little and Taylor 1989).
        """
        noise_N = spreads.noise**2 * self._times_N
        inverse = np.linalg.inv(self._covariance(spreads))
        seen_N = noise_N * (inverse @ self._logs_N)
        squares_N = seen_N**2 + noise_N - noise_N**2 * np.diag(inverse)
        times_N: Floats = (TAILS + squares_N / spreads.noise**2) / (TAILS + 1.0)
        return times_N

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
        """The gains given the visits."""
        gains, covariance = np.zeros(len(self._prior)), self._prior
        if self._logs_N.size:
            cross = self._prior @ self._design.T
            weights = np.linalg.solve(self._covariance(spreads), cross.T).T
            gains = weights @ self._logs_N
            covariance = covariance - weights @ cross.T
        question = self._question
        shape = (len(question.settings), len(question.loads))
        return Beliefs(
            question=question,
            mean_SL=gains.reshape(shape),
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
    covariance: Floats = GAIN_SD**2 * alike + OWN_SD**2 * np.eye(len(points))
    return covariance


def _near(one: Floats, other: Floats, scale: float) -> Floats:
    near: Floats = np.exp(-0.5 * ((one[:, None] - other[None, :]) / scale) ** 2)
    return near
