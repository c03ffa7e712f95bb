"""A/B runs of servers whose true gain is known: what intervals and verdicts are checked against.

Draws seconds from laws, nothing is timed. The law has what real measurements have and a Gaussian
has not: two classes of requests that gain differently, noise with heavy tails, requests that take
several times as long, a machine whose pace drifts, and starts of one build that differ. Arms take
turns (A B, B A, ...), so that they meet the same drift.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from foretoken.lab.stats.intervals import Floats
from foretoken.lab.stats.ratios import Ints, Sample
from foretoken.lab.stats.repeats import in_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """Requests that are alike."""

    name: str
    share: float
    gain: float = 1.0
    """Times the law's speed-up."""
    prompt: float = 1.0
    """Time to the first token, in that of a short prompt."""


CLASSES = (
    TrafficClass(name="chat", share=0.5, gain=0.95),
    TrafficClass(name="code", share=0.5, gain=1.05, prompt=2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbLaw:
    """What is true of two arms. Spreads are of logarithms."""

    speedup: float = 1.6
    """True gain in the median time per token over all requests; the first token is as before."""
    classes: tuple[TrafficClass, ...] = CLASSES
    restart_sd: float = 0.05
    one_start: bool = False
    """Servers run all along: every block of an arm has the same start."""
    bad_start_chance: float = 0.0
    bad_start: float = 1.25
    """Times as slow as other starts."""
    prompt_sd: float = 0.1
    """Between requests, shared by the arms."""
    draft_sd: float = 0.15
    """Between requests of the candidate: some drafts are better than others."""
    noise: float = 0.06
    """Scale of Student's t with three degrees of freedom; twice this for the first token."""
    outlier_chance: float = 0.01
    """Share of requests that take two to six times as long, in both arms."""
    drift_sd: float = 0.03
    drift_memory: float = 0.98
    """Correlation of the machine's pace at one request with that at the next."""
    trend: float = 0.0
    """How much slower the machine becomes over twenty blocks."""
    warm_up: float = 0.0
    """How much slower the candidate's first request of a block is; decays over `warm_up_over`."""
    warm_up_over: float = 6.0


LAWS: dict[str, AbLaw] = {
    "base": AbLaw(),
    "drift": AbLaw(drift_sd=0.06, drift_memory=0.998, trend=0.2),
    "bad starts": AbLaw(bad_start_chance=0.1),
    "warm-up": AbLaw(warm_up=0.5),
    "one class loses": AbLaw(
        classes=(
            TrafficClass(name="json", share=0.7, gain=1.1),
            TrafficClass(name="creative", share=0.3, gain=0.5),
        )
    ),
    "URL arms": AbLaw(one_start=True),
}
"""The base law, and what happens to it elsewhere."""


@dataclass(frozen=True, slots=True)
class SimulatedAb:
    """Both arms' answers to the same requests: index 0 is the baseline."""

    tpot_2N: Floats
    ttft_2N: Floats
    blocks_N: Ints
    places_N: Ints
    """Place in the block, from 0."""
    classes_N: Ints

    def first(self, blocks: int) -> "SimulatedAb":
        """What the first blocks measured."""
        return self.only(self.blocks_N < blocks)

    def only(self, keep_N: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> "SimulatedAb":
        """Some of the requests."""
        return SimulatedAb(
            self.tpot_2N[:, keep_N], self.ttft_2N[:, keep_N],
            self.blocks_N[keep_N], self.places_N[keep_N], self.classes_N[keep_N],
        )  # fmt: skip

    def samples(self, times: str) -> tuple[Sample, Sample]:
        """The arms' `tpot` or `ttft`."""
        times_2N = self.tpot_2N if times == "tpot" else self.ttft_2N
        return Sample(times_2N[0], self.blocks_N), Sample(times_2N[1], self.blocks_N)


def simulate_ab(
    law: AbLaw, rng: np.random.Generator, *, blocks: int = 9, requests: int = 120
) -> SimulatedAb:
    """One experiment of so many blocks with so many requests each."""
    shape = (blocks, requests)
    shares = [own.share for own in law.classes]
    classes_CN = rng.choice(len(law.classes), shape, p=shares)
    gains = np.log([own.gain * law.speedup / _middle_gain(law) for own in law.classes])
    prompts = np.log([own.prompt for own in law.classes])
    shared_CN = rng.normal(0.0, law.prompt_sd, shape)
    lengths_CN = prompts[classes_CN] + rng.normal(0.0, 2 * law.prompt_sd, shape)
    pace_2CN = _pace(law, shape, rng)
    tpots, ttfts = [], []
    for arm in (0, 1):
        tpot_CN = shared_CN + pace_2CN[arm] + _noise(law, law.noise, shape, rng)
        ttft_CN = lengths_CN + pace_2CN[arm] + _noise(law, 2 * law.noise, shape, rng)
        if arm == 1:
            tpot_CN += rng.normal(0.0, law.draft_sd, shape) - gains[classes_CN]
            slow_N = np.log1p(law.warm_up * np.exp(-np.arange(requests) / law.warm_up_over))
            tpot_CN, ttft_CN = tpot_CN + slow_N, ttft_CN + slow_N
        tpots.append(np.exp(tpot_CN).ravel())
        ttfts.append(np.exp(ttft_CN).ravel())
    return SimulatedAb(
        np.stack(tpots),
        np.stack(ttfts),
        np.repeat(np.arange(blocks), requests),
        np.tile(np.arange(requests), blocks),
        classes_CN.ravel().astype(np.int64),
    )


def _noise(law: AbLaw, scale: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    noise_CN = scale * rng.standard_t(3, shape)
    odd_CN = rng.random(shape) < law.outlier_chance
    times: Floats = noise_CN + odd_CN * np.log(rng.uniform(2.0, 6.0, shape))
    return times


def _pace(law: AbLaw, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Logarithm of how slow the machine and the started server are: (arms, blocks, requests)."""
    blocks, requests = shape
    starts_2C = rng.normal(0.0, law.restart_sd, (2, blocks))
    starts_2C += math.log(law.bad_start) * (rng.random((2, blocks)) < law.bad_start_chance)
    if law.one_start:
        starts_2C = np.repeat(starts_2C[:, :1], blocks, axis=1)
    drift_T = _drift(law, 2 * blocks * requests, rng).reshape(2 * blocks, requests)
    pace_2CN = np.empty((2, blocks, requests))
    for block in range(blocks):
        for turn, arm in enumerate(in_turn((0, 1), block)):
            pace_2CN[arm, block] = starts_2C[arm, block] + drift_T[2 * block + turn]
    return pace_2CN


def _drift(law: AbLaw, steps: int, rng: np.random.Generator) -> Floats:
    """An autoregressive course of spread `drift_sd`, and the trend."""
    memory, stride = law.drift_memory, 10
    # The pace is drawn at every tenth request and is a line between: it hardly moves in ten.
    knots = steps // stride + 2
    slow = memory**stride
    fresh_K = rng.normal(0.0, law.drift_sd * math.sqrt(1 - slow**2), knots).tolist()
    course = [rng.normal(0.0, law.drift_sd)]
    for fresh in fresh_K[1:]:
        course.append(slow * course[-1] + fresh)
    times_T = np.arange(steps)
    trend = math.log1p(law.trend) * times_T / (20 * 2 * 120)
    drift: Floats = np.interp(times_T, stride * np.arange(knots), course) + trend
    return drift


@lru_cache(maxsize=64)
def _middle_gain(law: AbLaw) -> float:
    """What to divide by, so that the median over all classes gains `speedup`."""
    same = {own.gain for own in law.classes}
    if len(same) == 1:
        return same.pop()
    return _true_ratio(_plain(law), "tpot", 0.5)


def true_ratio(law: AbLaw, times: str, q: float | None) -> float:
    """The ratio that an endless experiment finds, of quantile `q` of `tpot` or `ttft`; or mean.

    By one large simulation without warm-up, exact where every class gains the same.
    """
    if times == "ttft":
        return 1.0
    if len({own.gain for own in law.classes}) == 1:
        return law.speedup
    # Tails are compared within starts.
    own = (
        _plain(law)
        if q is None or q < 0.9
        else replace(_plain(law), restart_sd=0.0, bad_start_chance=0.0, drift_sd=0.0)
    )
    return law.speedup * _true_ratio(own, times, q) / _middle_gain(law)


def true_class_gain(law: AbLaw, name: str) -> float:
    """The true gain in the median time per token of one class's requests."""
    gain = next(own.gain for own in law.classes if own.name == name)
    return gain * law.speedup / _middle_gain(law)


def _plain(law: AbLaw) -> AbLaw:
    """What decides the marginal distributions: the gain itself is a factor."""
    return replace(law, speedup=1.0, one_start=False, warm_up=0.0, trend=0.0)


@lru_cache(maxsize=64)
def _true_ratio(law: AbLaw, times: str, q: float | None) -> float:
    """The ratio with every class at its own gain; classes are drawn with `speedup` 1."""
    rng = np.random.default_rng(20_000)
    alike = tuple(replace(own, gain=1.0) for own in law.classes)
    drawn = simulate_ab(replace(law, classes=alike), rng, blocks=6_000, requests=100)
    off_N, on_N = (s.values_N for s in drawn.samples(times))
    gains = np.array([own.gain for own in law.classes])
    on_N = on_N / gains[drawn.classes_N]
    if q is None:
        return float(off_N.mean() / on_N.mean())
    return float(np.quantile(off_N, q) / np.quantile(on_N, q))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLaw:
    """How drafts are accepted: each with its request's own chance, up to the first rejection."""

    k: int = 4
    alpha: float = 0.7
    concentration: float = 20.0
    """Concentration of the beta distribution of requests' chances; large is homogeneous."""


def draw_accepted(law: DraftLaw, count: int, steps: int, rng: np.random.Generator) -> Floats:
    """Accepted drafts of `steps` verifications of `count` requests: (count, steps)."""
    a, b = law.alpha * law.concentration, (1 - law.alpha) * law.concentration
    alphas_N1 = rng.beta(a, b, (count, 1)) if math.isfinite(law.concentration) else law.alpha
    # Drafts before the first rejection are geometric; k cuts them off.
    runs_NS = np.floor(np.log(rng.random((count, steps))) / np.log(alphas_N1))
    accepted_NS: Floats = np.minimum(runs_NS, float(law.k))
    return accepted_NS


def true_quantile(law: DraftLaw, q: float) -> float:
    """Quantile `q` over requests of the drafts per verification that each would have accepted."""
    if not math.isfinite(law.concentration):
        alphas_N = np.array([law.alpha])
    else:
        a, b = law.alpha * law.concentration, (1 - law.alpha) * law.concentration
        alphas_N = np.random.default_rng(20_001).beta(a, b, 400_000)
    means_N = sum(alphas_N**place for place in range(1, law.k + 1))
    return float(np.quantile(means_N, q))
