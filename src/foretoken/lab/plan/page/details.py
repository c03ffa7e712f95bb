"""Everything behind a plan as tables: memory by rank, costs, methods, checks. Computes nothing."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.lab.plan.memory_plan import MemoryPlan
from foretoken.lab.plan.page.document import assumptions
from foretoken.lab.plan.page.tables import make_table
from foretoken.lab.plan.planner import SpeculationPlan

_FEWEST_OF_NOMINAL = 500_000_000
"""The table of size times bytes is in gigabytes; a smaller target has zeros there."""
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "ok": "green"}


def details(plan: SpeculationPlan) -> Iterator[RenderableType]:
    """Tables, findings, assumptions."""
    yield _memory_table(plan)
    if plan.nominal and plan.setup.target.params >= _FEWEST_OF_NOMINAL:
        yield _nominal_table(plan)
        for number, text in enumerate(_differences(plan), start=1):
            yield Text(f"({number}) {text}", style="dim")
    if plan.setup.method != "none":
        yield _speed_table(plan)
    yield _methods_table(plan)
    yield _findings_table(plan)
    yield Panel("\n".join(assumptions(plan)), title="assumed, not measured", title_align="left")


def _differences(plan: SpeculationPlan) -> list[str]:
    """Each thing that a row of size times bytes leaves out, once."""
    return list(dict.fromkeys(line.differs for line in plan.nominal))


def gigabytes(count: float) -> str:
    """Bytes in gigabytes of 1e9, small ones with more digits."""
    return f"{count / 1e9:.4f}" if 0 < count < 1e8 else f"{count / 1e9:,.1f}"


def _kib(count: float) -> str:
    return f"{count / 1024:.0f}" if count >= 10240 else f"{count / 1024:.1f}"


def _memory_table(plan: SpeculationPlan) -> Table:
    setup = plan.setup
    table = make_table(
        f"Memory, GB on {setup.tp} ranks at {setup.utilization:.2f}", "", "plain", "speculating"
    )
    both = (plan.plain, plan.speculating)

    def row(label: str, *cells: str) -> None:
        table.add_row(label, *cells)

    row("may be used, overhead off", *(gigabytes(p.usable_bytes) for p in both))
    row("weights", *(gigabytes(p.weight_bytes) for p in both))
    row("draft weights", "", gigabytes(plan.speculating.draft_weight_bytes))
    if setup.tp > 1:
        row("weights on the fullest rank", *(gigabytes(p.fullest_rank_bytes) for p in both))
        row("weights on the emptiest", *(gigabytes(p.emptiest_rank_bytes) for p in both))
    row("idle on the emptier ranks", "", gigabytes(plan.speculating.imbalance_bytes))
    row("keys and values", *(gigabytes(p.kv_pool_bytes) for p in both))
    row("KiB per token, target", *(_kib(p.kv_bytes_per_token) for p in both))
    row("KiB per token, draft", "", _kib(plan.speculating.draft_kv_bytes_per_token))
    row("look-ahead slots per request", "", f"{plan.speculating.lookahead}")
    row("tokens", *(f"{p.tokens:,}" for p in both))
    row(f"requests of {setup.settings.context:,} tokens", *(_requests(p) for p in both))
    return table


def _requests(plan: MemoryPlan) -> str:
    return f"{plan.requests:,}" if plan.fits else "[bold red]none[/]"


def _nominal_table(plan: SpeculationPlan) -> Table:
    memory = plan.setup.device.advertised_bytes * plan.setup.devices / 1e9
    table = make_table(
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
    table = make_table(
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
    return table


def _methods_table(plan: SpeculationPlan) -> Table:
    setup = plan.setup
    table = make_table(
        "Methods", "method", "memory GB", f"at {setup.usual}",
        f"at {setup.peak}", "needs",
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for outlook in plan.outlooks:
        day = outlook.prediction.at(setup.usual)
        peak = outlook.prediction.at(setup.peak)
        table.add_row(
            outlook.method,
            gigabytes(outlook.memory_bytes),
            f"{day.best:.2f}x (k {day.best_k})" if day.best_k else "off",
            f"{peak.best:.2f}x (k {peak.best_k})" if peak.best_k else "off",
            outlook.needs,
        )
    return table


def _findings_table(plan: SpeculationPlan) -> Table:
    table = make_table("Checks", "level", "check", "what", left=3)
    for finding in plan.findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="italic")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.check, text)
    return table
