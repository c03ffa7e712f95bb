"""A plan as plain data for JSON, and what its numbers rest on."""

from dataclasses import asdict
from typing import Any

from foretoken.lab.plain import to_plain
from foretoken.lab.plan.page.fitting import most_context, what_fits
from foretoken.lab.plan.planner import SpeculationPlan
from foretoken.lab.plan.roofline import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    EAGER_STEP_S_PER_LAYER,
)
from foretoken.lab.plan.setup import DRAWN_FROM
from foretoken.lab.plan.speedup import NextStep
from foretoken.lab.plan.verdict import WORDS


def plan_document(plan: SpeculationPlan, step: NextStep | None) -> dict[str, Any]:
    """Everything as JSON values; infinite becomes None."""
    content = {
        "command": "foretoken lab plan",
        "assumptions": assumptions(plan),
        **to_plain(plan),
        "exit_code": plan.verdict.exit_code,
        "verdict": {**asdict(plan.verdict), "verdict": WORDS[plan.verdict.word]},
        "nominal": [{**asdict(row), "differs": row.differs} for row in plan.nominal],
        "what_fits": _what_fits(plan),
        "next_step": asdict(step) if step else None,
    }
    return content


def _what_fits(plan: SpeculationPlan) -> dict[str, Any]:
    """Requests at once on other numbers of devices and with other weights, and how long those that
    are usually in flight may be as asked."""
    setup, memory = plan.setup, plan.speculating
    return {
        "device": setup.device.name,
        "context": setup.settings.context,
        "rows": [asdict(row) for row in what_fits(setup)],
        "most_context": {
            "requests": setup.usual,
            "plain": most_context(setup, plan.plain.tokens, 0),
            "speculating": most_context(setup, memory.tokens, memory.lookahead),
        },
    }


def assumptions(plan: SpeculationPlan) -> list[str]:
    """What the numbers rest on, one sentence each."""
    setup = plan.setup
    return [
        f"device: {setup.device.name} ({setup.device.source})",
        f"{BANDWIDTH_SHARE:.0%} of peak bandwidth and {COMPUTE_SHARE:.0%} of peak compute are "
        f"reached; a step takes at least {setup.device.step_s_per_layer * 1e6:.0f} us per layer "
        f"({EAGER_STEP_S_PER_LAYER * 1e6:.0f} without graphs), an exchange "
        f"between ranks {setup.host.exchange_s * 1e6:.0f} us, {setup.host.exchanges} a layer",
        f"overhead {plan.overhead_bytes / 1e9:.1f} GB per device"
        + (" (given)" if setup.settings.overhead_gb >= 0 else " (estimated)"),
        *(f"{setup.target.name}: {note}" for note in setup.target.approximations),
        *filter(None, [drawn_drafts(plan)]),
    ]


def drawn_drafts(plan: SpeculationPlan) -> str:
    """How the emitted command draws its drafts, where the temperature has decided it; empty where
    it makes no difference, or the engine decides by itself."""
    setup, heat = plan.setup, plan.setup.settings.temperature
    if setup.drafts_with != "model" or setup.settings.engine == "foretoken" or heat == 0.0:
        return ""
    drawn = heat > DRAWN_FROM
    now, other = ("drawn", "greedy") if drawn else ("greedy", "drawn")
    return (
        f"Drafts are {now} in this command, as the temperature {heat:g} is "
        f"{'above' if drawn else 'not above'} {DRAWN_FROM:g}; {other} ones "
        f"({'without' if drawn else 'with'} draft_sample_method probabilistic) may be accepted "
        "more often: measure both."
    )
