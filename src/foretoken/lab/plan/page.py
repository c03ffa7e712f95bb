"""A plan on one page: the verdict, what to draft at which load, times, what fits, the command; all
that stands behind it as tables, and as JSON. Computes nothing but what would fit.

A terminal of 80 columns is the usual one. A table that is too wide for it is set as several, one
under the other, with its first column in each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.lab.plain import to_plain
from foretoken.lab.plan.acceptance import AssumedAcceptance
from foretoken.lab.plan.bits import find_quantization
from foretoken.lab.plan.memory_plan import draft_load, plan_memory
from foretoken.lab.plan.planner import (
    InsteadOutlook,
    OtherReading,
    SpeculationPlan,
    package_of,
)
from foretoken.lab.plan.predict import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    EAGER_STEP_S_PER_LAYER,
    LoadPrediction,
    PlannedSpeed,
    show_seconds,
)
from foretoken.lab.plan.setup import DRAWN_FROM, Setup
from foretoken.lab.plan.speedup import NextStep
from foretoken.lab.plan.verdict import WORDS, PlanVerdict
from foretoken.lab.verdict import WORD_STYLES, Verdict

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
    as many columns each, with the first column in every one.

    Cells are markup; none is broken into lines as long as its column alone has room.
    """
    widths = [
        max(cell_len(Text.from_markup(cell).plain) for cell in column)
        for column in zip(header, *rows, strict=True)
    ]
    for number, part in enumerate(_groups(widths, width)):
        columns = [0, *part]
        named = title if not number else f"{title} (more)"
        table = make_table(named, *(header[i] for i in columns))
        table.min_width = min(table.min_width or 0, width)
        for column in table.columns:
            column.no_wrap = True
        for row in rows:
            table.add_row(*(row[i] for i in columns))
        yield table


def _groups(widths: Sequence[int], width: int) -> list[range]:
    """The columns after the first, in as few groups as fit, of about equal size."""
    last = len(widths)
    for count in range(1, last):
        size = -(-(last - 1) // count)
        groups = [range(i, min(i + size, last)) for i in range(1, last, size)]
        if all(_wide(widths, group) <= width for group in groups):
            return groups
    return [range(i, i + 1) for i in range(1, last)]


def _wide(widths: Sequence[int], columns: Sequence[int]) -> int:
    return sum(widths[i] + _BETWEEN for i in (0, *columns))


COUNTS = (1, 2, 4, 8)
_GPU_WEIGHTS = ("bf16", "fp8", "int4")
_GGUF_WEIGHTS = ("bf16", "q8_0", "q4_k_m")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingRow:
    """One quantization of the target on a number of devices."""

    quantization: str
    count: int
    plain: int
    """Typical requests that fit at once."""
    speculating: int


def what_fits(setup: Setup) -> Iterator[FittingRow]:
    """Rows for the asked quantization and the usual ones, on one GPU to eight; on CPUs as asked."""
    usual = _GGUF_WEIGHTS if setup.settings.engine == "llama.cpp" else _GPU_WEIGHTS
    on_gpus = setup.device.kind == "gpu"
    counts = sorted({*COUNTS, setup.tp}) if on_gpus else [setup.devices]
    for name in dict.fromkeys((setup.quantization.name, *usual)):
        for count in counts:
            if on_gpus and not _divides(setup, count):
                continue
            other = replace(setup, quantization=find_quantization(name, "quantization"))
            other = _on(other, count) if on_gpus else other
            yield FittingRow(
                quantization=name,
                count=count,
                plain=plan_memory(other, None).requests,
                speculating=plan_memory(other, draft_load(other)).requests,
            )


def _on(setup: Setup, count: int) -> Setup:
    draft = min(setup.draft_tp, count) if setup.draft_tp != setup.tp else count
    return replace(setup, tp=count, draft_tp=draft, devices=count)


def most_context(setup: Setup, tokens: int, lookahead: int) -> int:
    """Tokens that each request may have when the usual number of them share so many."""
    return max(0, tokens // setup.usual - lookahead)


def _divides(setup: Setup, count: int) -> bool:
    models = [setup.target]
    if setup.drafts_with == "model" and setup.draft is not None and setup.draft_tp == setup.tp:
        models.append(setup.draft)
    return all(model.num_heads % count == 0 for model in models)


def plan_document(plan: SpeculationPlan, step: NextStep | None) -> dict[str, Any]:
    """Everything as JSON values; infinite becomes None."""
    content = {
        "command": "foretoken lab plan",
        "assumptions": assumptions(plan),
        **to_plain(plan),
        "exit_code": plan.verdict.exit_code,
        "verdict": {**asdict(plan.verdict), "verdict": WORDS[plan.verdict.word]},
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


STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "ok": "green"}


def details(plan: SpeculationPlan) -> Iterator[RenderableType]:
    """Tables, findings, assumptions."""
    if plan.setup.method != "none":
        yield _speed_table(plan)
    yield _findings_table(plan)
    yield Panel("\n".join(assumptions(plan)), title="assumed, not measured", title_align="left")


def gigabytes(count: float) -> str:
    """Bytes in gigabytes of 1e9, small ones with more digits."""
    return f"{count / 1e9:.4f}" if 0 < count < 1e8 else f"{count / 1e9:,.1f}"


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


def _findings_table(plan: SpeculationPlan) -> Table:
    table = make_table("Checks", "level", "check", "what", left=3)
    for finding in plan.findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="italic")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.check, text)
    return table


_SHOWN_LOADS = (1, 64, 256, 16, 4)
_MOST_LOADS = 5
_MOST_WARNINGS = 4


def print_plan(
    console: Console, plan: SpeculationPlan, step: NextStep | None, *, everything: bool = False
) -> None:
    """One page; with `everything` the tables behind it too.

    A terminal breaks sentences between words; in a file a sentence stays one line. A command stays
    as it has to be typed.
    """
    for part in _parts(plan, step, console.width):
        _print(console, part)
    for command in _command(plan):
        console.print(command, soft_wrap=True)
    if everything:
        for part in details(plan):
            _print(console, part)
    else:
        console.print(Text("\nEvery check, cost and assumption: --details", style="dim"))
    _print(console, Text(_last_line(plan), style="bold"))


def _print(console: Console, part: RenderableType) -> None:
    console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)


def _parts(plan: SpeculationPlan, step: NextStep | None, width: int) -> Iterator[RenderableType]:
    setup = plan.setup
    yield _answer(plan)
    yield Text(_asked(plan), style="dim")
    if plan.other_reading is not None:
        yield _other_reading(plan, plan.other_reading)
    if step is not None:
        yield Text(f"Next step by what was measured: {step.action}. {step.reason}", style="bold")
    if setup.method != "none":
        yield from _by_load(plan, width)
        yield Text(
            f"{'Chosen' if plan.schedule.follows else 'Best'}, by requests in flight: "
            f"{plan.schedule.words}. In brackets: what would have to be trained or found, or "
            "cannot be used.",
            style="dim",
        )
        for one in plan.drafts:
            if one.problem:
                yield Text(f"{one.draft}: {one.problem}", style="yellow")
        yield Text(_acceptance(plan), style="dim")
        yield from _instead(plan)
    if setup.measured is None:
        yield from _by_workload(plan, width)
    yield _times(plan)
    yield from _fits(plan, width)
    yield Text(_memory(plan), style="dim")
    yield from _warnings(plan)


def _left_for_another(plan: SpeculationPlan) -> InsteadOutlook | None:
    return plan.instead if plan.verdict.word == "leave_off" else None


def _styled(verdict: PlanVerdict) -> tuple[str, str]:
    word = WORDS[verdict.word]
    return word, WORD_STYLES.get(word, "bold")


def _answer(plan: SpeculationPlan) -> Text:
    verdict, other = plan.verdict, _left_for_another(plan)
    word = _styled(verdict)
    if other is None:
        return Text.assemble(word, f": {verdict.reason}")
    instead = _styled(other.verdict)
    return Text.assemble(
        word, f": {verdict.reason}. Another drafter, {_named(other)}: ", instead,
        f": {other.verdict.reason}",
    )  # fmt: skip


def _last_line(plan: SpeculationPlan) -> str:
    """The verdict again, below everything, with what to type next."""
    verdict, other = plan.verdict, _left_for_another(plan)
    if verdict.word == "plain":
        return f"{WORDS[verdict.word]}: {verdict.reason}."
    measure = "foretoken lab ab --baseline URL-without --candidate URL-with --workload FILE"
    command = measure if verdict.word == "measure" else ""
    if other is not None:
        command = f"the same with --method {other.method}"
    return Verdict(word=WORDS[verdict.word], reason=verdict.reason, command=command).sentence


def _named(other: InsteadOutlook) -> str:
    return f"{other.method} (--method {other.method}; it needs {other.needs or 'nothing new'})"


def _other_reading(plan: SpeculationPlan, other: OtherReading) -> Text:
    given, k = plan.setup.settings.acceptance, plan.setup.k
    differs = other.verdict.word != plan.verdict.word
    return Text(
        f"{'Which is it? ' if differs else ''}--acceptance {given} is read as the chance that a "
        f"draft is accepted given that all before it were; of all drafted tokens that is "
        f"{other.rate:.0%} at k = {k}. If {given} is accepted over drafted tokens, as servers "
        f"count it, say --rate {given}: the chance is {other.chance:.2f} then, and the answer "
        f"{WORDS[other.verdict.word]}: {other.verdict.reason}.",
        style="bold yellow" if differs else "dim",
    )


def _asked(plan: SpeculationPlan) -> str:
    setup, settings = plan.setup, plan.setup.settings
    with_model = setup.drafts_with == "model" and setup.draft is not None
    draft = (
        f" + {setup.draft.name} ({setup.draft_quantization.name})"
        if with_model and setup.draft
        else ""
    )
    return (
        f"{setup.target.name} ({setup.quantization.name}){draft}, {setup.method}, on {setup.tp} x "
        f"{setup.device.name} with {settings.engine}; {settings.workload} at temperature "
        f"{settings.temperature:g}, {settings.concurrency} in flight, {settings.peak_concurrency} "
        f"at the peak, {settings.context:,} tokens of which {settings.output_tokens:,} are written"
    )


def _drafters(plan: SpeculationPlan) -> list[tuple[str, PlannedSpeed, bool]]:
    named = [(one.draft.split("/")[-1], one.prediction, not one.problem) for one in plan.drafts]
    others = [
        (one.method, one.prediction, one.available)
        for one in plan.outlooks
        if plan.setup.drafts_with != "model" or one.method != plan.setup.method
    ]
    asked = [one for one in others if one[0] == plan.setup.method]
    return named + asked + [one for one in others if one not in asked]


def _by_load(plan: SpeculationPlan, width: int) -> Iterator[Table]:
    mark = {plan.setup.peak: " peak", plan.setup.usual: " usual"}
    most = plan.plain.requests or max(_SHOWN_LOADS)
    shown = list(dict.fromkeys((*mark, *(load for load in _SHOWN_LOADS if load <= most))))
    loads = sorted(shown[:_MOST_LOADS])
    rows = [
        [name if there else f"({name})", *(_cell(prediction.at(load)) for load in loads)]
        for name, prediction, there in _drafters(plan)
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
    own, measured = plan.prediction.acceptance, plan.setup.measured
    usual = plan.prediction.at(plan.setup.deciding)
    k = plan.schedule.told(usual.requests) or plan.setup.k
    gain = usual.gain(k)
    expected, limit = plan.prediction.rates(usual.requests, k)
    if measured is not None:
        return (
            f"Measured at k = {measured.k} and taken for {usual.requests} in flight: V "
            f"{measured.verify_cost:.2f}, c {measured.draft_cost:.2f}, "
            f"{measured.acceptance_length:.2f} tokens per verification, so that a draft is "
            f"accepted with {own.middle:.2f}{_found(own)}. At k = {k} that is {gain.middle:.2f}x, "
            f"{expected:.0%} of the drafted tokens accepted, and {_breaks_even(limit)}. Other "
            "loads and drafters are predicted."
        )
    return (
        f"A draft is taken to be accepted with {own.middle:.2f} ({own.low:.2f} to {own.high:.2f})"
        f"{' over all steps' if own.over_all_steps and own.hits < 1.0 else ''}, "
        f"{own.source}. At k = {k} that is {gain.middle:.2f}x, {gain.low:.2f} to {gain.high:.2f} "
        f"in 80 of 100 cases. Of the drafted tokens {expected:.0%} should then be accepted, and "
        f"{_breaks_even(limit)}{_found(own)}."
    )


def _breaks_even(limit: float) -> str:
    return f"it breaks even at {limit:.0%}" if limit <= 1.0 else "not even all would break even"


def _found(own: AssumedAcceptance) -> str:
    if own.hits >= 1.0:
        return ""
    return f", with the look-ups paid that find nothing: {1.0 - own.hits:.0%} of the steps"


def _instead(plan: SpeculationPlan) -> Iterator[Text]:
    if plan.instead is not None and _left_for_another(plan) is None:
        name, verdict = plan.instead.method, plan.instead.verdict
        yield Text(
            f"{name} is expected to gain more and needs {plan.instead.needs or 'nothing new'}: "
            f"{verdict.reason} (--method {name}).",
            style="bold",
        )


def _by_workload(plan: SpeculationPlan, width: int) -> Iterator[Table]:
    requests = plan.setup.usual
    rows = []
    for row in plan.workloads:
        cells = [_cell(load) for load in row.loads]
        asked = row.workload == plan.setup.settings.workload
        rows.append([f"[bold]{row.workload}[/]" if asked else row.workload, *cells])
    header = ["", *(outlook.method for outlook in plan.outlooks)]
    return tables(f"By work, per token, {requests} in flight", header, rows, width)


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
    setup = plan.setup
    rows = list(what_fits(setup))
    counts = sorted({row.count for row in rows})
    lines = []
    for name in dict.fromkeys(row.quantization for row in rows):
        found = {row.count: row for row in rows if row.quantization == name}
        cells = [
            _places(found[count].speculating, found[count].plain) if count in found else "-"
            for count in counts
        ]
        lines.append([name, *cells])
    title = f"What fits: requests of {setup.settings.context:,} tokens, with drafter (without)"
    header = ["target", *(f"{count} x {setup.device.name}" for count in counts)]
    return tables(title, header, lines, width)


def _places(speculating: int, plain: int) -> str:
    if not plain:
        return "[red]none[/]"
    return f"{speculating:,} ({plain:,})" if speculating else f"[red]none[/] ({plain:,})"


def _memory(plan: SpeculationPlan) -> str:
    setup, memory = plan.setup, plan.speculating
    longest = most_context(setup, memory.tokens, memory.lookahead)
    plain = most_context(setup, plan.plain.tokens, 0)
    return (
        f"Weights {gigabytes(plan.plain.weight_bytes)} GB + drafter "
        f"{gigabytes(memory.draft_weight_bytes)} GB of {gigabytes(memory.usable_bytes)} GB that "
        f"may be used on {_ranks(plan)}; room for "
        f"{memory.tokens:,} tokens ({plan.plain.tokens:,} without). "
        f"{setup.usual} request{'s' if setup.usual > 1 else ''} may have {longest:,} tokens each "
        f"({plain:,} without)."
    )


def _ranks(plan: SpeculationPlan) -> str:
    count, memory = plan.setup.tp, plan.speculating
    if count == 1:
        return "1 rank"
    least, most = gigabytes(memory.emptiest_rank_bytes), gigabytes(memory.fullest_rank_bytes)
    return f"{count} ranks ({least if least == most else f'{least} to {most}'} GB on each)"


def _warnings(plan: SpeculationPlan) -> Iterator[Text]:
    """What may go wrong, the worst first; the verdict has its own reason already."""
    found = sorted(
        (
            finding
            for finding in plan.findings
            if finding.level in ("error", "warning") and finding.message != plan.verdict.reason
        ),
        key=lambda finding: finding.level,
    )
    for finding in found[:_MOST_WARNINGS]:
        text = Text(f"{finding.level}: ", style=STYLES[finding.level])
        text.append(finding.message, style="default")
        if finding.remedy:
            text.append(f" -> {finding.remedy}", style="italic")
        yield text
    if len(found) > _MOST_WARNINGS:
        yield Text(f"and {len(found) - _MOST_WARNINGS} more warnings: --details", style="dim")


def _to_install(package: str) -> Iterator[Text]:
    if package:
        yield Text(f"It needs {package}.", style="yellow")


def _command(plan: SpeculationPlan) -> Iterator[Text]:
    engine, verdict = plan.setup.settings.engine, plan.verdict
    other = _left_for_another(plan)
    if other is not None:
        yield Text(f"\nserve it with {other.method} ({engine}):", style="bold")
        yield Text(other.commands[engine])
        yield from _to_install(other.needs)
        return
    if not plan.plain.fits:
        yield Text("\nno command: the target does not fit without drafts either", style="bold")
        return
    if plan.commands[engine].startswith("# ") and "\n" not in plan.commands[engine]:
        yield Text(f"\nno command: {plan.commands[engine][2:]}", style="bold")
        return
    title = "serve it with" if verdict.speculates else "serve it without speculation"
    yield Text(f"\n{title} ({engine}):", style="bold")
    yield Text(plan.commands[engine])
    if verdict.speculates and not plan.schedule.follows:
        why = "takes one number for all loads"
        if engine == "vllm" and not plan.schedule.falls:
            why = "has a schedule that may not rise with the load"
        yield Text(
            f"k = {plan.schedule.decided} throughout: {engine} {why}, and the best would be "
            f"{plan.schedule.words}.",
            style="yellow",
        )
    if verdict.speculates:
        yield from _to_install(package_of(plan.setup))
    if verdict.speculates and (sampled := drawn_drafts(plan)):
        yield Text(sampled, style="yellow")
