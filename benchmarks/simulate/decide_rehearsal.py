"""How often a policy says what, on simulated experiments whose truth is known.

Plays the whole procedure on simulated requests: the slow start is cut, gains and their intervals
are computed, rules judge, and as many more blocks as they ask for are measured before the next
look. What a policy is worth is how rarely it ships a gain at its limit, and how surely one above.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulate.ab_draws import LAWS, AbLaw, SimulatedAb, simulate_ab, true_ratio
from foretoken.lab.analysis.summary import time_gain
from foretoken.lab.decide.decision import decide
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.records.results import AbSummary, ArmSummary, ClassGains, Equality, ServerInfo
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.stats.ratios import RESTART_SD
from foretoken.lab.stats.steady import start_length
from foretoken.lab.verdict import MEASURE_MORE, USE_IT

METRICS = ("tpot_p50", "tpot_p95", "tpot_p99", "ttft_p95")
"""The gains that the default policy's rules look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedExperiment:
    """What is true, and how the experiment is run."""

    law: AbLaw = LAWS["base"]
    first_blocks: int = 9
    requests_per_block: int = 120
    most_looks: int = 5
    most_requests: int = 2000
    """Per arm; what is asked for beyond is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    verdict: str
    sentence: str
    looks: int
    blocks: int
    asked: int
    """The most blocks that were asked for, measured or not."""


def play(policy: ShipPolicy, rehearsal: SimulatedExperiment, seed: int) -> Played:
    """One experiment, from the first sample to a verdict or the last look."""
    per_block = rehearsal.requests_per_block
    most = max(rehearsal.first_blocks, rehearsal.most_requests // per_block)
    rng = np.random.default_rng(seed)
    drawn = simulate_ab(rehearsal.law, rng, blocks=most, requests=per_block)
    blocks, asked = rehearsal.first_blocks, rehearsal.first_blocks
    for look in range(1, rehearsal.most_looks + 1):
        decision = decide(summarize(drawn.first(blocks), rehearsal.law, look), policy)
        wanted = decision.needed_blocks or 0
        asked = max(asked, wanted)
        if decision.verdict != MEASURE_MORE or min(wanted, most) <= blocks:
            break
        blocks = min(wanted, most)
    return Played(
        verdict=decision.verdict, sentence=decision.sentence, looks=look, blocks=blocks, asked=asked
    )


def shares_of_ship(played: Sequence[Played]) -> tuple[float, float]:
    """Share of experiments that end in USE IT at the first look, and at any."""
    ships = [p for p in played if p.verdict == USE_IT]
    return sum(p.looks == 1 for p in ships) / len(played), len(ships) / len(played)


def without_start(drawn: SimulatedAb) -> SimulatedAb:
    """What is left after the slow start, found as in a measured run."""
    blocks, size = int(drawn.blocks_N.max()) + 1, int(drawn.places_N.max()) + 1
    cut = 0
    for times_2N in (drawn.tpot_2N, drawn.ttft_2N):
        off_CN, on_CN = (np.log(times_N).reshape(blocks, size) for times_N in times_2N)
        cuts = (start_length(off_CN), start_length(on_CN),
                start_length(off_CN - on_CN, either_way=True))  # fmt: skip
        cut = max(cut, *cuts)
    return drawn.only(drawn.places_N >= cut) if cut else drawn


def unseen_of(law: AbLaw) -> float:
    """Scatter of gains that a run of this law cannot show: that of starts, where each is one."""
    return RESTART_SD * math.sqrt(2) if law.one_start else 0.0


def summarize(drawn: SimulatedAb, law: AbLaw, look: int = 1) -> AbSummary:
    """An A/B in which everything but time is in order."""
    unseen = unseen_of(law)
    settled = without_start(drawn)
    requests = drawn.blocks_N.size
    gains = tuple(time_gain(m, settled.samples(m.split("_")[0]), unseen) for m in METRICS)
    command = None if law.one_start else "simulated --port {port}"
    return AbSummary(
        baseline="off",
        candidate="on",
        arms=tuple(_arm(name, requests, command) for name in ("off", "on")),
        gains=gains,
        classes=_classes(settled, law, unseen),
        equality=Equality(
            num_compared=requests, num_equal=requests, share=Interval(1.0, 0.99, 1.0)
        ),
        look=look,
    )


def _classes(settled: SimulatedAb, law: AbLaw, unseen_sd: float) -> tuple[ClassGains, ...]:
    """The median gain over the requests of each class."""
    found = []
    for number, own in enumerate(law.classes):
        samples = settled.only(settled.classes_N == number).samples("tpot")
        gain = time_gain("tpot_p50", samples, unseen_sd)
        found.append(
            ClassGains(by="category", value=own.name, num_pairs=gain.num_pairs, gains=(gain,))
        )
    return tuple(found)


def _arm(name: str, requests: int, command: str | None) -> ArmSummary:
    drafted = {"vllm:spec_decode_num_draft_tokens": 1.0} if name == "on" else {}
    return ArmSummary(
        arm=name,
        server=ServerInfo(url=f"http://{name}", engine="mock", command=command),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How often intervals of a metric held the truth."""

    metric: str
    share: float
    median_width: float
    """Median of high / low - 1."""
    bias: float
    """Mean of estimate / truth - 1."""


def measure_coverage(rehearsal: SimulatedExperiment, metric: str, experiments: int) -> Coverage:
    """Share of simulated A/Bs whose first 95 % interval holds the true ratio."""
    law, times = rehearsal.law, metric.split("_")[0]
    q = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "mean": None}[metric.split("_")[1]]
    truth = true_ratio(law, times, q)
    held, widths, biases = 0, [], []
    for seed in range(experiments):
        drawn = simulate_ab(
            law,
            np.random.default_rng(1_000_000 + seed),
            blocks=rehearsal.first_blocks,
            requests=rehearsal.requests_per_block,
        )
        ratio = time_gain(metric, without_start(drawn).samples(times), unseen_of(law)).ratio
        held += ratio.low <= truth <= ratio.high
        widths.append(ratio.high / ratio.low - 1)
        biases.append(ratio.estimate / truth - 1)
    return Coverage(
        metric=metric,
        share=held / experiments,
        median_width=float(np.median(widths)),
        bias=float(np.mean(biases)),
    )
