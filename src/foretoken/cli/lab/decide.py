"""`foretoken lab decide`: everything that runs say, and the verdict."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.lab.options import JsonOption, parse_whole
from foretoken.errors import ConfigError
from foretoken.lab.verdict import EXITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from foretoken.lab.analysis.cost_model import MeasuredCosts
    from foretoken.lab.analysis.whole_time import OtherLength
    from foretoken.lab.decide.overall import JudgedRun, Overall

EPILOG = f"{EXITS}; 2: no A/B there, a wrong policy, or --html without matplotlib."
RunsArgument = Annotated[
    list[Path] | None,
    typer.Argument(help="Folders of `lab ab`, grids too; several are judged together."),
]
ChangesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="RULE.KEY=VALUE", help="Over the policy; several times."),
]
PolicyOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="YAML; default: what --show-policy prints.")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write one page with every plot.")
]


def decide(
    runs: RunsArgument = None,
    policy: PolicyOption = None,
    changes: ChangesOption = None,
    fitted: Annotated[
        bool, typer.Option("--fit", help="What verifying and drafting cost, and the crossover.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option("--k", metavar="K,K", help="What other draft lengths would have done."),
    ] = None,
    html: HtmlOption = None,
    show_policy: Annotated[
        bool, typer.Option("--show-policy", help="Print the default policy file and end.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Use it, leave it off, or measure more: every rule with its number and what is missing.

    Several runs: what differs between them is found out. Configurations (k, method, engine version)
    compete; each counts by the traffic (temperature, class, context, load) that it does worst with.
    --fit takes the steps of all runs together, those of one pair of servers at two loads or more,
    and fits one cost model, from which `lab export ENGINE --costs RUN` writes. --k replays the
    accept stream of the run that decides; it needs a candidate that was started with
    --per-request-spec-decode-metrics detailed.
    """
    from foretoken.lab.analysis.cost_model import by_length, learn
    from foretoken.lab.analysis.whole_time import other_lengths
    from foretoken.lab.decide.overall import judge_runs, read_runs
    from foretoken.lab.decide.ship_policy import default_text, load_policy

    if show_policy:
        print(default_text(), end="")
        raise typer.Exit()
    if not runs:
        allowed = "at least one folder that `foretoken lab ab --out FOLDER` wrote"
        raise ConfigError("RUNS", None, allowed)
    tried = parse_whole(lengths, "--k") if lengths is not None else []
    rules = load_policy(policy, tuple(changes or ()))
    found = read_runs(runs, rules)
    best = judge_runs(found, rules)
    own = best.best
    others = other_lengths(own.summary, own.answers[1], tried) if tried else ()
    costs = learn(by_length([(run.summary, *run.answers) for run in found])) if fitted else None
    if html is not None:
        from foretoken.lab.report.page import write_page

        write_page(html, found, best, rules.name)
    if as_json:
        print(json.dumps(_document(rules.name, found, best, others, costs)))
    else:
        _print(found, best, others, costs)
    raise typer.Exit(best.conclusion.exit_code)


def _document(
    policy: str,
    runs: "Sequence[JudgedRun]",
    best: "Overall",
    others: tuple["OtherLength", ...],
    costs: "MeasuredCosts | None",
) -> dict[str, object]:
    from foretoken.lab.plain import to_plain

    return {
        "command": "foretoken lab decide",
        "policy": policy,
        "verdict": best.verdict,
        "exit_code": best.conclusion.exit_code,
        "answer": best.answer,
        "sentence": ". ".join(best.says),
        "conclusion": best.conclusion.sentence,
        "best": best.best.decision.run,
        "differs": to_plain(best.dimensions),
        "crossings": to_plain(best.crossings),
        "decisions": to_plain([run.decision for run in runs]),
        "other_lengths": to_plain(list(others)),
        "costs": to_plain(costs),
    }


def _print(
    runs: "Sequence[JudgedRun]",
    best: "Overall",
    others: tuple["OtherLength", ...],
    costs: "MeasuredCosts | None",
) -> None:
    """The reasons first: the last line is the verdict."""
    from rich.console import Console
    from rich.table import Table

    from foretoken.cli.lab.run_tables import cells_table, print_classes
    from foretoken.lab.decide.decision import rules_table

    console = Console(highlight=False)
    summaries, decisions = [run.summary for run in runs], [run.decision for run in runs]
    if len(runs) > 1:
        places = {d.name: [d.show(row) for row in range(len(runs))] for d in best.dimensions} or {
            "run": [decision.run for decision in decisions]
        }
        console.print(cells_table(places, summaries, [d.verdict for d in decisions]))
        console.print("The run that decides, rule by rule:", style="bold")
    console.print(best.best.decision.run)
    console.print(rules_table(best.best.decision.rules))
    print_classes(console, best.best.summary)
    if others:
        names = ("k", "tokens/step", "between", "rate", "speed-up")
        table = Table(*names, title="Other draft lengths")
        for row in others:
            table.add_row(
                str(row.k), f"{row.tokens_per_step:.2f}", f"{row.least:.2f}-{row.most:.2f}",
                f"{row.acceptance_rate:.2f}", "-" if row.speedup is None else f"{row.speedup:.2f}",
            )  # fmt: skip
        console.print(table)
    if costs is not None:
        _print_costs(console, costs)
    for said in best.says if len(best.says) > 1 else ():
        console.print(f"{said}.", markup=False)
    found = best.conclusion
    console.print(found.sentence, style=found.style, soft_wrap=True, markup=False)


def _print_costs(show: "Console", found: "MeasuredCosts") -> None:
    from rich.table import Table

    lengths = [f"k={one.k}" for one in found.lengths]
    title = "Speed-up by length, and the acceptance rate that breaks even"
    table = Table("requests at once", "plain step", *lengths, "draft", title=title)
    for batch in found.batches:
        gains = [f"{found.gain(batch, one):.2f}x ({found.break_even(batch, one):.0%})"
                 for one in found.lengths]  # fmt: skip
        plain = f"{1000 * found.step_s(batch):.2f} ms"
        table.add_row(str(batch), plain, *gains, str(found.best(batch)))
    show.print(table)
    parts = {"a step": found.base_s, "each request": found.request_s, "each row": found.row_s,
             "drafting": found.once_s, "each draft": found.draft_s}  # fmt: skip
    costs = ", ".join(f"{name} {1000 * value:.3f} ms" for name, value in parts.items())
    show.print(f"{costs}; off by {found.misfit:.0%} at most")
    for note in found.notes:
        show.print(f"{note}.", style="yellow")
