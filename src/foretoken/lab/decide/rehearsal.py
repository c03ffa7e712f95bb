"""How often a policy says what, on simulated experiments whose truth is known.

Plays the whole procedure: a first sample, a verdict, as many more blocks as it asks for, the next
look. What a policy is worth is how rarely it ships a gain at its limit and how surely it ships one
above. Simulates the logarithm of each block's ratio: starts of a server differ (`restart_sd`, both
arms), and requests within a block, more so at the tail. Whether real intervals cover is tested with
`lab.simulator`, not here.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.decide.verdict import NOT_YET, decide
from foretoken.lab.records.results import AbSummary, ArmGain, ArmSummary, Equality, ServerInfo
from foretoken.lab.stats.intervals import Floats, Interval, student_quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedExperiment:
    """What is true, and how the experiment is run."""

    speedup: float = 1.3
    """True gain in time per token at every quantile; the first token is as before."""
    restart_sd: float = 0.07
    """Standard deviation of the logarithm of a start's speed."""
    middle_sd: float = 0.03
    """Standard deviation of a block's median beyond that, both arms together."""
    tail_sd: float = 0.08
    """Standard deviation of a block's P99 beyond that."""
    first_blocks: int = 8
    requests_per_block: int = 40
    most_looks: int = 4
    most_blocks: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How one experiment ended."""

    verdict: str
    looks: int
    blocks: int


def play(policy: ShipPolicy, rehearsal: SimulatedExperiment, seed: int) -> Played:
    """One experiment, from the first sample to a verdict or the last look."""
    logs = _block_ratios(rehearsal, np.random.default_rng(seed))
    blocks = rehearsal.first_blocks
    for look in range(1, rehearsal.most_looks + 1):
        decision = decide(_summary(logs, blocks, rehearsal, look), policy)
        if decision.verdict != NOT_YET or look == rehearsal.most_looks:
            break
        blocks = min(decision.needed_blocks or blocks, rehearsal.most_blocks)
    return Played(verdict=decision.verdict, looks=look, blocks=blocks)


def rehearse(
    policy: ShipPolicy, rehearsal: SimulatedExperiment, seeds: Sequence[int]
) -> dict[str, float]:
    """Share of experiments by verdict, one experiment per seed."""
    found = Counter(play(policy, rehearsal, seed).verdict for seed in seeds)
    return {verdict: count / len(seeds) for verdict, count in found.items()}


def _block_ratios(rehearsal: SimulatedExperiment, rng: np.random.Generator) -> dict[str, Floats]:
    """Logarithms of baseline over candidate, per gain and block."""
    size = rehearsal.most_blocks
    found = {}
    for metric, truth in (("tpot", rehearsal.speedup), ("ttft", 1.0)):
        starts_C = rng.normal(0.0, math.sqrt(2) * rehearsal.restart_sd, size)
        for name, spread in (("p50", rehearsal.middle_sd), ("p99", rehearsal.tail_sd)):
            own_C = starts_C + rng.normal(0.0, spread, size)
            found[f"{metric}_{name}"] = math.log(truth) + own_C
    return found


def _summary(
    logs: dict[str, Floats], blocks: int, rehearsal: SimulatedExperiment, look: int
) -> AbSummary:
    """An A/B of the first `blocks` blocks in which everything but time is in order."""
    requests = blocks * rehearsal.requests_per_block
    gains = tuple(_gain(name, logs_C[:blocks], rehearsal) for name, logs_C in logs.items())
    return AbSummary(
        baseline="off",
        candidate="on",
        arms=(_arm("off", requests), _arm("on", requests)),
        gains=gains,
        equality=Equality(
            num_compared=requests, num_equal=requests, share=Interval(1.0, 0.99, 1.0)
        ),
        look=look,
    )


def _gain(metric: str, logs_C: Floats, rehearsal: SimulatedExperiment) -> ArmGain:
    """Student's interval of the mean logarithm."""
    blocks = logs_C.size
    middle, error = float(logs_C.mean()), float(logs_C.std(ddof=1)) / math.sqrt(blocks)
    half = student_quantile(0.975, blocks - 1) * error
    wanted = math.ceil((1000 if metric.endswith("p99") else 20) / rehearsal.requests_per_block)
    return ArmGain(
        metric=metric,
        ratio=Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half)),
        num_blocks=blocks,
        num_pairs=blocks * rehearsal.requests_per_block,
        enough=blocks >= wanted,
        needed_blocks=wanted,
    )


def _arm(name: str, requests: int) -> ArmSummary:
    drafted = {"vllm:spec_decode_num_draft_tokens": 1.0} if name == "on" else {}
    return ArmSummary(
        arm=name,
        server=ServerInfo(url="simulated", engine="mock"),
        num_requests=requests,
        num_errors=0,
        errors={},
        duration_s=1.0,
        output_tokens=128 * requests,
        tokens_per_s=Interval(1.0, 1.0, 1.0),
        requests_per_s=1.0,
        goodput_per_s=None,
        attained=None,
        ttft=None,
        tpot=None,
        e2e=None,
        counters=drafted,
    )
