"""Measures an A/B block by block until its verdict is known, or the limits are reached.

Each judgement is one look: the intervals of later ones are wider for it (see `evidence`), so that
going on until a rule passes does not ship what should not be.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.lab.decide.decision import Decision, decide
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.http.timed import now
from foretoken.lab.measure.ab import run_ab, silent
from foretoken.lab.measure.experiment import AbConfig
from foretoken.lab.measure.segments import Watch
from foretoken.lab.records.results import AbSummary
from foretoken.lab.verdict import MEASURE_MORE

MOST_LOOKS = 5
"""The sixth look's intervals are so wide that another limit should be asked for instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilLimits:
    """How long to go on."""

    most_s: float = 1800.0
    """No block begins that would end later than this, by the pace so far."""
    tell: Callable[[int, Decision | None], object] = lambda _blocks, _decision: None
    """Told of the blocks that are wanted, and of what was said about those before."""


def run_until_decided(
    config: AbConfig,
    out: Path,
    policy: ShipPolicy,
    limits: UntilLimits | None = None,
    *,
    resume: bool = False,
    watch: Watch = silent,
) -> AbSummary:
    """Measure `config.sizes`, judge, measure the blocks that are asked for, and judge again. Raises
    ConfigError: wrong settings; EndpointError: a server is not there."""
    limits = limits or UntilLimits()
    began = now()
    limits.tell(config.sizes.blocks, None)
    while True:
        summary = run_ab(config, out, resume=resume, watch=watch)
        decision = decide(summary, policy, run=str(out))
        spent, done = now() - began, max(1, decision.num_blocks)
        affordable = decision.num_blocks + int((limits.most_s - spent) / (spent / done))
        wanted = min(decision.needed_blocks or 0, affordable)
        limits.tell(wanted, decision)
        open_still = decision.verdict == MEASURE_MORE and summary.look < MOST_LOOKS
        if not open_still or wanted <= decision.num_blocks:
            return summary
        config = replace(config, sizes=replace(config.sizes, blocks=wanted))
        resume = True
