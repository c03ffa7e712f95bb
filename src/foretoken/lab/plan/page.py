"""A plan on one page: the verdict, what to draft at which load, times, what fits, the command; all
that stands behind it as tables, and as JSON. Computes nothing but what would fit.

A terminal of 80 columns is the usual one. A table that is too wide for it is set as several, one
under the other, with its first column in each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.lab.plain import to_plain
from foretoken.lab.plan.memory_plan import draft_load, plan_memory
from foretoken.lab.plan.planner import SpeculationPlan, package_of
from foretoken.lab.plan.predict import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    LoadPrediction,
    PlannedSpeed,
    StepCosts,
    show_seconds,
)
from foretoken.lab.plan.setup import Setup
from foretoken.lab.plan.sizes import find_quantization
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, WORD_STYLES, Verdict
from foretoken.shape.mixtures.experts import share_read

_BETWEEN = 2


def make_table(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table whose first columns are aligned left."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        first = index < left
        table.add_column(name, justify="left" if first else "right", no_wrap=first and left == 1)
    # A title is set as wide as its table: a narrow table gets the width of the title.
    table.min_width = cell_len(title) + _BETWEEN
    return table


def tables(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[Table]:
    """The rows as one table or, where that takes more than `width` characters, as several of about
    as many columns each, with the first column in every one. Cells are markup; none is broken into
    lines as long as its column alone has room."""
    widths = [
        max(cell_len(Text.from_markup(cell).plain) for cell in column) + _BETWEEN
        for column in zip(header, *rows, strict=True)
    ]
    last = len(widths)
    for size in sorted({-(-(last - 1) // count) for count in range(1, last)}, reverse=True):
        groups = [range(i, min(i + size, last)) for i in range(1, last, size)]
        if all(widths[0] + sum(widths[i] for i in group) <= width for group in groups):
            break
    for number, group in enumerate(groups):
        columns = [0, *group]
        named = f"{title} (more)" if number else title
        table = make_table(named, *(header[i] for i in columns))
        table.min_width = min(table.min_width or 0, width)
        for column in table.columns:
            column.no_wrap = True
        for row in rows:
            table.add_row(*(row[i] for i in columns))
        yield table


def what_fits(setup: Setup) -> Iterator[dict[str, Any]]:
    """Typical requests that fit at once, without drafts and with: for the asked quantization and
    the usual ones, on one GPU to eight; on CPUs as asked."""
    in_gguf = setup.settings.engine == "llama.cpp"
    usual = ("bf16", "q8_0", "q4_k_m") if in_gguf else ("bf16", "fp8", "int4")
    on_gpus, together = setup.device.kind == "gpu", setup.draft_tp == setup.tp
    models = [setup.target]
    if setup.draft_model is not None and together:
        models.append(setup.draft_model)
    for name in dict.fromkeys((setup.quantization.name, *usual)):
        other = replace(setup, quantization=find_quantization(name, "quantization"))
        for count in sorted({1, 2, 4, 8, setup.tp}) if on_gpus else [setup.devices]:
            if on_gpus:
                if any(model.shape.num_attention_heads % count for model in models):
                    continue
                ranks = count if together else min(setup.draft_tp, count)
                other = replace(other, tp=count, draft_tp=ranks, devices=count)
            yield {
                "quantization": name,
                "count": count,
                "plain": plan_memory(other, None).requests,
                "speculating": plan_memory(other, draft_load(other)).requests,
            }


_ROWS = (1, 2, 4, 6, 8, 16)


def expert_reads(setup: Setup) -> Iterator[dict[str, Any]]:
    """Of a mixture: what a step of so many rows of one request reads if they choose evenly and
    apart from each other, and V, the tokens it has to give before drafts gain anything; of others
    nothing."""
    model, stored = setup.target, setup.quantization
    if not model.num_experts:
        return
    head = model.head_params * (stored.stored_bytes if stored.tables_too else 2.0)
    dense = model.dense_params * stored.dense_bytes(model)
    experts = model.expert_params * stored.stored_bytes
    share = [share_read(model.expert_share, rows) for rows in _ROWS]
    steps = StepCosts(setup)
    for rows, one in zip(_ROWS, share, strict=True):
        yield {
            "rows": rows,
            "experts": round(one * model.num_experts, 1),
            "bytes": round(head + dense + one * experts),
            "break_even_tokens": round(steps.verify(1, rows), 2),
        }


def _most_context(plan: SpeculationPlan) -> dict[str, int]:
    """Tokens that each request may have when the usual number of them share the memory."""
    usual, memory = plan.setup.usual, plan.speculating
    return {
        "requests": usual,
        "plain": plan.plain.tokens // usual,
        "speculating": max(0, memory.tokens // usual - memory.lookahead),
    }


def plan_document(plan: SpeculationPlan) -> dict[str, Any]:
    """Everything as JSON values; infinite becomes None."""
    setup = plan.setup
    return {
        "command": "foretoken lab plan",
        "assumptions": assumptions(plan),
        **to_plain(plan),
        "exit_code": plan.verdict.exit_code,
        "what_fits": {
            "device": setup.device.name,
            "context": setup.settings.context,
            "rows": list(what_fits(setup)),
            "most_context": _most_context(plan),
        },
        "experts_of_a_step": list(expert_reads(setup)),
    }


def assumptions(plan: SpeculationPlan) -> list[str]:
    setup, device = plan.setup, plan.setup.device
    return [
        f"device: {device.name} ({device.source})",
        f"{BANDWIDTH_SHARE:.0%} of peak bandwidth and {COMPUTE_SHARE:.0%} of peak compute are "
        f"reached; a step takes at least {device.step_s_per_layer * 1e6:.0f} us per layer, an "
        f"exchange between ranks {setup.host.exchange_s * 1e6:.0f} us, {setup.host.exchanges} a "
        "layer",
        f"overhead {plan.overhead_bytes / 1e9:.1f} GB per device"
        + (" (given)" if setup.settings.overhead_gb >= 0 else " (estimated)"),
        *(f"{setup.target.name}: {note}" for note in setup.target.approximations),
    ]


STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "ok": "green"}


def details(plan: SpeculationPlan) -> Iterator[RenderableType]:
    if plan.setup.method != "none":
        yield _speed_table(plan.prediction)
    table = make_table("Checks", "level", "check", "what", left=3)
    for finding in plan.findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="italic")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.check, text)
    yield table
    yield Panel("\n".join(assumptions(plan)), title="assumed, not measured", title_align="left")


def _speed_table(prediction: PlannedSpeed) -> Table:
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


_SHOWN_LOADS = (1, 64, 256, 16, 4)
_MOST_WARNINGS = 4


def print_plan(console: Console, plan: SpeculationPlan, *, everything: bool = False) -> None:
    """One page; with `everything` the tables behind it too. A terminal breaks sentences between
    words; in a file a sentence stays one line. A command stays as it has to be typed."""

    def show(parts: Iterable[RenderableType]) -> None:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)

    show(_parts(plan, console.width))
    for text in _command(plan):
        console.print(text, soft_wrap=True)
    more = Text("\nEvery check, cost and assumption: --details", style="dim")
    show(details(plan) if everything else [more])
    # The verdict again, below everything, with what to type next.
    verdict, command = plan.verdict, ""
    if verdict.word == MEASURE_MORE:
        command = "foretoken lab ab --baseline URL-without --candidate URL-with --workload FILE"
    if plan.instead and verdict.word == LEAVE_IT_OFF:
        command = f"the same with --method {plan.instead}"
    last = Verdict(word=verdict.word, reason=verdict.reason, command=command).sentence
    show([Text(last, style="bold")])


def _parts(plan: SpeculationPlan, width: int) -> Iterator[RenderableType]:
    setup, schedule = plan.setup, plan.schedule
    style = WORD_STYLES.get(plan.verdict.word, "bold")
    yield Text.assemble((plan.verdict.word, style), f": {plan.verdict.reason}")
    yield Text(_asked(plan), style="dim")
    if setup.method != "none":
        yield from _by_load(plan, width)
        yield Text(
            f"{'Chosen' if schedule.follows else 'Best'}, by requests in flight: {schedule.words}. "
            "In brackets: what would have to be trained or found, or cannot be used.",
            style="dim",
        )
        for one in plan.drafts:
            if one.problem:
                yield Text(f"{one.draft}: {one.problem}", style="yellow")
        yield Text(_acceptance(plan), style="dim")
        if plan.instead:
            said = f"{plan.instead} is there and expected to gain more: --method {plan.instead}."
            yield Text(said, style="bold")
    yield _times(plan)
    yield from _experts(setup)
    yield from _fits(plan, width)
    yield Text(_memory(plan), style="dim")
    yield from _warnings(plan)


def _experts(setup: Setup) -> Iterator[Table]:
    reads = list(expert_reads(setup))
    if not reads:
        return
    table = make_table(
        f"Experts that a step reads, of {setup.target.num_experts}",
        "rows", "experts of a layer", "weights GB", "V: tokens to break even", left=0,
    )  # fmt: skip
    for one in reads:
        cells = (one["rows"], one["experts"], one["bytes"] / 1e9, one["break_even_tokens"])
        table.add_row(*(f"{cell:.4g}" for cell in cells))
    yield table


def _asked(plan: SpeculationPlan) -> str:
    setup, settings, draft = plan.setup, plan.setup.settings, plan.setup.draft_model
    drafts = f" + {draft.name} ({setup.draft_quantization.name})" if draft is not None else ""
    return (
        f"{setup.target.name} ({setup.quantization.name}){drafts}, {setup.method}, on {setup.tp} x "
        f"{setup.device.name} with {settings.engine}; {settings.workload} at temperature "
        f"{settings.temperature:g}, {settings.concurrency} in flight, {settings.peak_concurrency} "
        f"at the peak, {settings.context:,} tokens of which {settings.output_tokens:,} are written"
    )


def _by_load(plan: SpeculationPlan, width: int) -> Iterator[Table]:
    setup = plan.setup
    drafters = [(one.draft.split("/")[-1], one.prediction, not one.problem) for one in plan.drafts]
    drafters += [
        (one.method, one.prediction, one.available)
        for one in sorted(plan.outlooks, key=lambda one: one.method != setup.method)
        if setup.draft_model is None or one.method != setup.method
    ]
    mark = {setup.peak: " peak", setup.usual: " usual"}
    most = plan.plain.requests or max(_SHOWN_LOADS)
    shown = dict.fromkeys((*mark, *(load for load in _SHOWN_LOADS if load <= most)))
    loads = sorted(list(shown)[:5])
    rows = [
        [name if there else f"({name})", *(_cell(prediction.at(load)) for load in loads)]
        for name, prediction, there in drafters
    ]
    header = ["", *(f"{load}{mark.get(load, '')}" for load in loads)]
    title = "Speed-up per token and drafts per step (k) by requests in flight"
    return tables(title, header, rows, width)


def _cell(load: LoadPrediction) -> str:
    if not load.best_k:
        return "[dim]off[/]"
    style = "green" if load.best_low > 1.0 else "yellow"
    return f"[{style}]{load.best:.2f}x[/] k{load.best_k}"


def _acceptance(plan: SpeculationPlan) -> str:
    own = plan.prediction.acceptance
    usual = plan.prediction.at(plan.setup.deciding)
    k = plan.schedule.told(usual.requests) or plan.setup.k
    gain = usual.gain(k)
    expected, limit = plan.prediction.rates(usual.requests, k)
    even = f"it breaks even at {limit:.0%}" if limit <= 1.0 else "not even all would break even"
    found = ""
    if own.hits < 1.0:
        found = f", with the look-ups paid that find nothing: {1.0 - own.hits:.0%} of the steps"
    return (
        f"A draft is taken to be accepted with {own.middle:.2f} ({own.low:.2f} to {own.high:.2f})"
        f"{' over all steps' if own.over_all_steps and own.hits < 1.0 else ''}, "
        f"{own.source}. At k = {k} that is {gain.middle:.2f}x, {gain.low:.2f} to {gain.high:.2f} "
        f"in 80 of 100 cases. Of the drafted tokens {expected:.0%} should then be accepted, and "
        f"{even}{found}."
    )


def _times(plan: SpeculationPlan) -> Table:
    table = make_table(
        "Times without and with drafts", "in flight", "k", "first token", "each further token",
        "whole answer",
    )  # fmt: skip
    for times in dict.fromkeys(plan.latencies):
        pairs = (
            (times.ttft_plain_s, times.ttft_s),
            (times.tpot_plain_s, times.tpot_s),
            (times.end_to_end_plain_s, times.end_to_end_s),
        )
        cells = [f"{show_seconds(plain)}, {show_seconds(drafted)}" for plain, drafted in pairs]
        table.add_row(f"{times.requests}", f"{times.k}" if times.k else "off", *cells)
    return table


def _fits(plan: SpeculationPlan, width: int) -> Iterator[Table]:
    cells: dict[str, dict[int, str]] = {}
    for row in what_fits(plan.setup):
        with_drafter = f"{row['speculating']:,}" if row["speculating"] else "[red]none[/]"
        places = f"{with_drafter} ({row['plain']:,})" if row["plain"] else "[red]none[/]"
        cells.setdefault(row["quantization"], {})[row["count"]] = places
    counts = sorted({count for found in cells.values() for count in found})
    rows = [[name, *(found.get(count, "-") for count in counts)] for name, found in cells.items()]
    context, device = plan.setup.settings.context, plan.setup.device.name
    title = f"What fits: requests of {context:,} tokens, with drafter (without)"
    return tables(title, ["target", *(f"{count} x {device}" for count in counts)], rows, width)


def _memory(plan: SpeculationPlan) -> str:
    def gigabytes(count: float) -> str:
        return f"{count / 1e9:.4f}" if 0 < count < 1e8 else f"{count / 1e9:,.1f}"

    memory, longest, ranks = plan.speculating, _most_context(plan), "1 rank"
    usual = longest["requests"]
    if plan.setup.tp > 1:
        ends = (memory.emptiest_rank_bytes, memory.fullest_rank_bytes)
        ranks = (
            f"{plan.setup.tp} ranks ({' to '.join(dict.fromkeys(map(gigabytes, ends)))} GB on each)"
        )
    return (
        f"Weights {gigabytes(plan.plain.weight_bytes)} GB + drafter "
        f"{gigabytes(memory.draft_weight_bytes)} GB of {gigabytes(memory.usable_bytes)} GB that "
        f"may be used on {ranks}; room for {memory.tokens:,} tokens ({plan.plain.tokens:,} "
        f"without). {usual} request{'s' if usual > 1 else ''} may have "
        f"{longest['speculating']:,} tokens each ({longest['plain']:,} without)."
    )


def _warnings(plan: SpeculationPlan) -> Iterator[Text]:
    """What may go wrong, the worst first; the verdict has its own reason already."""
    serious = [one for one in plan.findings if one.level in ("error", "warning")]
    found = [one for one in serious if one.message != plan.verdict.reason]
    found.sort(key=lambda finding: finding.level)
    for finding in found[:_MOST_WARNINGS]:
        text = Text(f"{finding.level}: ", style=STYLES[finding.level])
        text.append(finding.message, style="default")
        if finding.remedy:
            text.append(f" -> {finding.remedy}", style="italic")
        yield text
    if len(found) > _MOST_WARNINGS:
        yield Text(f"and {len(found) - _MOST_WARNINGS} more warnings: --details", style="dim")


def _command(plan: SpeculationPlan) -> Iterator[Text]:
    engine, verdict, schedule = plan.setup.settings.engine, plan.verdict, plan.schedule
    command = plan.commands[engine]
    if not plan.plain.fits:
        yield Text("\nno command: the target does not fit without drafts either", style="bold")
        return
    if command.startswith("# ") and "\n" not in command:
        yield Text(f"\nno command: {command[2:]}", style="bold")
        return
    title, needs = "serve it without speculation", ""
    if verdict.speculates:
        title, needs = "serve it with", package_of(plan.setup)
    yield Text(f"\n{title} ({engine}):", style="bold")
    yield Text(command)
    if verdict.speculates and not schedule.follows:
        why = "takes one number for all loads"
        if engine == "vllm" and not schedule.falls:
            why = "has a schedule that may not rise with the load"
        yield Text(
            f"k = {schedule.decided} throughout: {engine} {why}, and the best would be "
            f"{schedule.words}.",
            style="yellow",
        )
    if needs:
        yield Text(f"It needs {needs}.", style="yellow")
