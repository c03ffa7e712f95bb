"""A plan as tables for people and as plain data for JSON. Computes nothing."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.lab.plain import to_plain
from foretoken.lab.plan.memory_plan import MemoryPlan
from foretoken.lab.plan.planner import SpeculationPlan
from foretoken.lab.plan.predict import ONE_HOT_LOSS_PER_T
from foretoken.lab.plan.roofline import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    EAGER_STEP_S_PER_LAYER,
    EXCHANGE_LATENCY_S,
)
from foretoken.lab.plan.speedup import NextStep

_FEWEST_OF_NOMINAL = 500_000_000
"""The table of size times bytes is in gigabytes; a smaller target has zeros there."""
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "ok": "green"}


def plan_document(plan: SpeculationPlan, step: NextStep | None) -> dict[str, Any]:
    """Everything as JSON values; infinite becomes None."""
    content = {
        "command": "foretoken lab plan",
        "assumptions": assumptions(plan),
        **to_plain(plan),
        "nominal": [{**asdict(row), "differs": row.differs} for row in plan.nominal],
        "next_step": asdict(step) if step else None,
    }
    return content


def assumptions(plan: SpeculationPlan) -> list[str]:
    """What the numbers rest on, one sentence each."""
    setup, own = plan.setup, plan.prediction.acceptance
    return [
        f"device: {setup.device.name} ({setup.device.source})",
        f"{BANDWIDTH_SHARE:.0%} of peak bandwidth and {COMPUTE_SHARE:.0%} of peak compute are "
        f"reached; a step takes at least {setup.device.step_s_per_layer * 1e6:.0f} us per layer "
        f"({EAGER_STEP_S_PER_LAYER * 1e6:.0f} without graphs), an all-reduce "
        f"{EXCHANGE_LATENCY_S * 1e6:.0f} us",
        f"overhead {plan.overhead_bytes / 1e9:.1f} GB per device"
        + (" (given)" if setup.settings.overhead_gb >= 0 else " (estimated)"),
        f"alpha {own.low:.2f} to {own.high:.2f}, drafts in {own.hits:.0%} of steps: {own.source}",
        f"greedy drafts lose {ONE_HOT_LOSS_PER_T:.0%} of alpha at temperature 1",
        *(f"{setup.target.name}: {note}" for note in setup.target.approximations),
    ]


def print_plan(console: Console, plan: SpeculationPlan, step: NextStep | None) -> None:
    """Tables, findings, assumptions, commands."""
    for part in _parts(plan, step):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(plan: SpeculationPlan, step: NextStep | None) -> Iterator[RenderableType]:
    setup = plan.setup
    draft = f" + {setup.draft.name} ({setup.draft_quantization.name})" if setup.draft else ""
    yield Text(
        f"{setup.target.name} ({setup.quantization.name}){draft}, {setup.method}, k = {setup.k}, "
        f"on {setup.tp} x {setup.device.name}",
        style="bold",
    )
    yield Text(_headline(plan))
    yield _memory_table(plan)
    if plan.nominal and setup.target.params >= _FEWEST_OF_NOMINAL:
        yield _nominal_table(plan)
        for number, text in enumerate(_differences(plan), start=1):
            yield Text(f"({number}) {text}", style="dim")
    yield _speed_table(plan)
    yield _methods_table(plan)
    yield _findings_table(plan)
    if step is not None:
        yield Text(f"Next step: {step.action}. {step.reason}", style="bold")
    yield Panel("\n".join(assumptions(plan)), title="assumed, not measured", title_align="left")
    for engine, command in plan.commands.items():
        yield Text(f"\n{engine}:", style="bold")
        yield Text(command)


def _headline(plan: SpeculationPlan) -> str:
    """What the tables below come to."""
    setup, fits = plan.setup, plan.speculating
    load = plan.prediction.at(setup.settings.concurrency)
    return (
        f"Predicted {load.middle:.2f}x ({load.low:.2f} to {load.high:.2f}) with {load.requests} "
        f"requests in flight; {_crossover(plan)}; {fits.requests:,} requests of "
        f"{setup.settings.context:,} tokens fit, {plan.plain.requests:,} without a draft"
    )


def _differences(plan: SpeculationPlan) -> list[str]:
    """Each thing that a row of size times bytes leaves out, once."""
    return list(dict.fromkeys(line.differs for line in plan.nominal))


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        first = index < left
        table.add_column(name, justify="left" if first else "right", no_wrap=first and left == 1)
    return table


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f}" if count == 0 or count >= 1e8 else f"{count / 1e9:.4f}"


def _kib(count: float) -> str:
    return f"{count / 1024:.0f}" if count >= 10240 else f"{count / 1024:.1f}"


def _memory_table(plan: SpeculationPlan) -> Table:
    setup = plan.setup
    table = _table(
        f"Memory, GB on {setup.tp} ranks at {setup.utilization:.2f}", "", "plain", "speculating"
    )
    both = (plan.plain, plan.speculating)

    def row(label: str, *cells: str) -> None:
        table.add_row(label, *cells)

    row("may be used, overhead off", *(_gb(p.usable_bytes) for p in both))
    row("weights", *(_gb(p.weight_bytes) for p in both))
    row("draft weights", "", _gb(plan.speculating.draft_weight_bytes))
    row("idle on the emptier ranks", "", _gb(plan.speculating.imbalance_bytes))
    row("keys and values", *(_gb(p.kv_pool_bytes) for p in both))
    row("KiB per token, target", *(_kib(p.kv_bytes_per_token) for p in both))
    row("KiB per token, draft", "", _kib(plan.speculating.draft_kv_bytes_per_token))
    row("look-ahead slots per request", "", f"{plan.speculating.lookahead}")
    row("tokens", *(f"{p.tokens:,}" for p in both))
    row(f"requests of {setup.settings.context:,} tokens", *(_requests(p) for p in both))
    return table


def _requests(plan: MemoryPlan) -> str:
    return f"{plan.requests:,}" if plan.fits else "[bold red]none[/]"


def _nominal_table(plan: SpeculationPlan) -> Table:
    memory = plan.setup.device.advertised_bytes * plan.setup.tp / 1e9
    table = _table(
        f"Memory by size times bytes, {memory:.0f} GB advertised, and corrected",
        "target + draft", "weights", "it says left", "may be used", "tokens plain",
        "one for one", "really", "see",
    )  # fmt: skip
    numbers = {text: number for number, text in enumerate(_differences(plan), start=1)}
    for line in plan.nominal:
        table.add_row(
            f"{line.target_quantization} + {line.draft_quantization}",
            f"{line.weights_gb:.0f}",
            f"{line.left_gb:.0f}",
            f"{line.budget_gb:.1f}",
            f"{line.tokens_plain / 1e3:.0f}k",
            f"{line.tokens_one_for_one / 1e3:.0f}k",
            f"{line.tokens / 1e3:.0f}k",
            f"({numbers[line.differs]})",
        )
    return table


def _speed_table(plan: SpeculationPlan) -> Table:
    prediction = plan.prediction
    table = _table(
        f"Predicted speed-up of {prediction.method}, k = {prediction.k}",
        "in flight", "plain ms", "V", "c", "break-even rate", "low", "middle", "high", "best k",
        left=0,
    )  # fmt: skip
    for load in prediction.loads:
        style = "green" if load.low >= 1 else ("yellow" if load.middle >= 1 else "red")
        table.add_row(
            f"{load.requests}",
            f"{load.plain_step_s * 1e3:.1f}",
            f"{load.verify_cost:.2f}",
            f"{load.draft_cost:.3f}",
            f"{load.break_even_rate:.2f}",
            f"{load.low:.2f}",
            f"[{style}]{load.middle:.2f}[/]",
            f"{load.high:.2f}",
            f"{load.best_k} ({load.best:.2f}x)" if load.best_k else "off",
        )
    table.caption = _crossover(plan)
    table.caption_justify = "left"
    return table


def _crossover(plan: SpeculationPlan) -> str:
    prediction = plan.prediction
    if prediction.crossover == 0:
        return "never pays at the middle of the acceptance"
    if math.isinf(prediction.crossover):
        return "pays at every load looked at, at the middle of the acceptance"
    return (
        f"stops paying at {prediction.crossover:.0f} requests in flight, about "
        f"{prediction.crossover_qps:.1f} per second"
    )


def _methods_table(plan: SpeculationPlan) -> Table:
    settings = plan.setup.settings
    table = _table(
        "Methods", "method", "memory GB", f"at {settings.concurrency}",
        f"at {settings.peak_concurrency}", "needs",
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for outlook in plan.outlooks:
        day = outlook.prediction.at(settings.concurrency)
        peak = outlook.prediction.at(settings.peak_concurrency)
        table.add_row(
            outlook.method,
            _gb(outlook.memory_bytes),
            f"{day.low:.2f} to {day.high:.2f}x",
            f"{peak.low:.2f} to {peak.high:.2f}x",
            outlook.needs,
        )
    return table


def _findings_table(plan: SpeculationPlan) -> Table:
    table = _table("Checks", "level", "check", "what", left=3)
    for finding in plan.findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="italic")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.check, text)
    return table
