"""A/B runs of servers whose true speed-up is known: what the statistics are checked against.

Draws seconds per token from laws, nothing is timed. Every start of a server is a little faster or
slower than the last (`restart_sd`), prompts differ and are shared by the arms, and the fast arm's
time follows from a stream of accepted drafts where `draft` is given.
"""

import math
from dataclasses import dataclass

import numpy as np

from foretoken.control.cost import speculative_step
from foretoken.lab.stats.intervals import Floats
from foretoken.lab.stats.ratios import (
    Sample,
    paired_ratio,
    weighted_mean,
    weighted_quantile,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLaw:
    """How drafts are accepted: each with its request's own chance, up to the first rejection."""

    k: int = 4
    alpha: float = 0.7
    concentration: float = 20.0
    """Concentration of the beta distribution of requests' chances; large is homogeneous."""
    verify_cost: float = 1.1
    """V: a verification over a plain step."""
    draft_cost: float = 0.1
    """c: a draft step over a plain step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbLaw:
    """What is true of two arms; times in plain decoding steps."""

    speedup: float = 1.3
    """True speed-up of median and mean alike, unless `draft` says otherwise."""
    restart_sd: float = 0.07
    """Standard deviation of the logarithm of a start's speed."""
    prompt_sd: float = 0.2
    """Standard deviation of the logarithm of what both arms share of a prompt."""
    noise_sd: float = 0.1
    """Standard deviation of the logarithm of what the arms do not share."""
    noise_memory: float = 0.0
    """Correlation of the noise of one request with the next."""
    stall_chance: float = 0.0
    """Share of requests that a stall makes three times slower, in both arms."""
    draft: DraftLaw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbDesign:
    """How much is measured."""

    num_blocks: int = 10
    requests_per_block: int = 30
    output_tokens: int = 128


SCENARIOS: dict[str, tuple[AbLaw, AbDesign]] = {
    "restarts": (AbLaw(), AbDesign()),
    "few blocks": (AbLaw(restart_sd=0.05), AbDesign(num_blocks=6)),
    "wild restarts": (AbLaw(restart_sd=0.1), AbDesign(num_blocks=16)),
    "drafts": (AbLaw(draft=DraftLaw(concentration=6.0)), AbDesign(num_blocks=12)),
    "memory": (AbLaw(noise_memory=0.7, noise_sd=0.3), AbDesign(num_blocks=12)),
    "stalls": (AbLaw(stall_chance=0.05, noise_sd=0.3), AbDesign(num_blocks=12)),
}
"""What the intervals' coverage is tested on."""


def simulate_ab(law: AbLaw, design: AbDesign, rng: np.random.Generator) -> tuple[Sample, Sample]:
    """Seconds per token of the baseline and of the candidate, over the same prompts and blocks."""
    blocks, requests = design.num_blocks, design.requests_per_block
    prompts_BN = rng.normal(0.0, law.prompt_sd, (blocks, requests))
    stalls_BN = math.log(3.0) * (rng.random((blocks, requests)) < law.stall_chance)
    arms = []
    for fast in (False, True):
        restarts_B1 = rng.normal(0.0, law.restart_sd, (blocks, 1))
        noise_BN = _remembering_noise(law, (blocks, requests), rng)
        logs_BN = prompts_BN + stalls_BN + restarts_B1 + noise_BN
        if fast:
            logs_BN = logs_BN + _log_pace(law, design, rng)
        numbers_N = np.repeat(np.arange(blocks), requests)
        arms.append(Sample(np.exp(logs_BN).ravel(), numbers_N))
    return arms[0], arms[1]


def _remembering_noise(law: AbLaw, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    fresh_BN = rng.normal(0.0, law.noise_sd, shape)
    if law.noise_memory == 0.0:
        return fresh_BN
    noise_BN = fresh_BN.copy()
    scale = math.sqrt(1 - law.noise_memory**2)
    for n in range(1, shape[1]):
        noise_BN[:, n] = law.noise_memory * noise_BN[:, n - 1] + scale * fresh_BN[:, n]
    return noise_BN


def _log_pace(law: AbLaw, design: AbDesign, rng: np.random.Generator) -> Floats | float:
    """Logarithm of plain steps per token of the fast arm, (blocks, requests) or one number."""
    if law.draft is None:
        return -math.log(law.speedup)
    count = design.num_blocks * design.requests_per_block
    paces_N = draft_paces(law.draft, count, design.output_tokens, rng)
    return np.log(paces_N).reshape(design.num_blocks, design.requests_per_block)


def draft_paces(law: DraftLaw, count: int, tokens: int, rng: np.random.Generator) -> Floats:
    """Plain steps per token of `count` requests that each write `tokens` tokens."""
    accepted_NS = draw_accepted(law, count, tokens, rng)
    written_NS = np.cumsum(accepted_NS + 1, axis=1)
    steps_N = (written_NS < tokens).sum(axis=1) + 1
    paces_N: Floats = steps_N * speculative_step(law.verify_cost, law.draft_cost, law.k) / tokens
    return paces_N


def draw_accepted(law: DraftLaw, count: int, steps: int, rng: np.random.Generator) -> Floats:
    """Accepted drafts of `steps` verifications of `count` requests: (count, steps)."""
    a, b = law.alpha * law.concentration, (1 - law.alpha) * law.concentration
    alphas_N1 = rng.beta(a, b, (count, 1)) if math.isfinite(law.concentration) else law.alpha
    # Drafts before the first rejection are geometric; k cuts them off.
    runs_NS = np.floor(np.log(rng.random((count, steps))) / np.log(alphas_N1))
    accepted_NS: Floats = np.minimum(runs_NS, float(law.k))
    return accepted_NS


def true_ratio(law: AbLaw, design: AbDesign, statistic: str, *, seed: int = 7) -> float:
    """The ratio that an endless experiment would find; `statistic` is mean, p50, p95 or p99.

    By one very large simulation, exact where the fast arm is the slow one over a constant.
    """
    if law.draft is None:
        return law.speedup
    rng = np.random.default_rng(seed)
    big = AbDesign(num_blocks=5_000, requests_per_block=20, output_tokens=design.output_tokens)
    slow, fast = (arm.values_N for arm in simulate_ab(law, big, rng))
    if statistic == "mean":
        return float(slow.mean() / fast.mean())
    q = {"p50": 0.5, "p95": 0.95, "p99": 0.99}[statistic]
    return float(np.quantile(slow, q) / np.quantile(fast, q))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How often intervals held the truth."""

    statistic: str
    replications: int
    share: float
    median_width: float
    """Median of high / low - 1."""


def measure_coverage(
    law: AbLaw, design: AbDesign, statistic: str, replications: int, seed: int
) -> Coverage:
    """Share of simulated A/Bs whose 95 % interval holds the true ratio."""
    compute = (
        weighted_mean if statistic == "mean" else weighted_quantile(float(statistic[1:]) / 100)
    )
    truth = true_ratio(law, design, statistic)
    rng = np.random.default_rng(seed)
    held, widths = 0, []
    for replication in range(replications):
        slow, fast = simulate_ab(law, design, rng)
        interval = paired_ratio(slow, fast, compute, seed=replication)
        held += interval.low <= truth <= interval.high
        widths.append(interval.high / interval.low - 1)
    return Coverage(
        statistic=statistic,
        replications=replications,
        share=held / replications,
        median_width=float(np.median(widths)),
    )
