"""`foretoken lab decide`: options and printing of the verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.lab.options import parse_whole
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from foretoken.lab.analysis.other_lengths import OtherLength
    from foretoken.lab.decide.overall import Overall
    from foretoken.lab.decide.verdict import Decision
    from foretoken.lab.records.results import AbSummary, ArmSummary

EPILOG = (
    "Exit code: 0: SHIP; 1: DO NOT SHIP; 4: NOT YET, measure as much more as it says, or "
    "INVALID, measure anew; 2: no A/B there, or a wrong policy."
)


def decide(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of `lab ab`, grids too; several are judged together."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML; default: what --show-policy prints.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE.KEY=VALUE", help="Over the policy; several times."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="A run with the unquantized model, to compare acceptance with."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--k", metavar="K,K", help="What other draft lengths would have done."),
    ] = None,
    show_policy: Annotated[
        bool, typer.Option("--show-policy", help="Print the default policy file and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Ship, do not ship, or not yet: every rule with its number, interval and what is missing.

    Several runs: what differs between them is found out. Configurations (k, method, engine version)
    compete; each counts by the traffic (temperature, class, context, load) that it does worst with.
    --k replays the accept stream of the run that decides; it needs a candidate that was started
    with --per-request-spec-decode-metrics detailed.
    """
    from foretoken.lab.decide.overall import judge_runs
    from foretoken.lab.decide.ship_policy import default_text, load_policy
    from foretoken.lab.decide.verdict import EXIT_CODES
    from foretoken.lab.decide.verdict import decide as judge
    from foretoken.lab.records.run_files import ab_folders, read_ab

    if show_policy:
        print(default_text(), end="")
        raise typer.Exit()
    if not runs:
        allowed = "at least one folder that `foretoken lab ab --out FOLDER` wrote"
        raise ConfigError("RUNS", None, allowed)
    tried = parse_whole(lengths, "--k") if lengths is not None else []
    rules = load_policy(policy, tuple(changes or ()))
    other = _reference(reference) if reference else None
    folders = ab_folders(runs)
    summaries = [read_ab(folder) for folder in folders]
    decisions = [
        judge(summary, rules, run=str(folder), reference=other)
        for folder, summary in zip(folders, summaries, strict=True)
    ]
    best = judge_runs(list(zip(summaries, decisions, strict=True)), rules)
    others = _other_lengths(folders[decisions.index(best.best)], tried)
    if as_json:
        print(json.dumps(_document(rules.name, decisions, best, others)))
    else:
        _print(summaries, decisions, best, others)
    raise typer.Exit(EXIT_CODES[best.verdict])


def _reference(run: Path) -> "ArmSummary":
    from foretoken.lab.records.results import AbSummary
    from foretoken.lab.records.run_files import read_summary

    summary = read_summary(run, "--reference")
    return summary.arm(summary.candidate) if isinstance(summary, AbSummary) else summary.arm


def _other_lengths(folder: Path, lengths: list[int]) -> tuple["OtherLength", ...]:
    from foretoken.lab.analysis.other_lengths import other_lengths
    from foretoken.lab.analysis.summary import counted
    from foretoken.lab.analysis.warm_up import without_start
    from foretoken.lab.records.run_files import read_ab, read_requests

    if not lengths:
        return ()
    summary, records = read_ab(folder), without_start(read_requests(folder)).records
    return other_lengths(summary, counted(records, summary.candidate), lengths)


def _document(
    policy: str, decisions: list["Decision"], best: "Overall", others: tuple["OtherLength", ...]
) -> dict[str, object]:
    from foretoken.lab.decide.verdict import EXIT_CODES
    from foretoken.lab.plain import to_plain

    return {
        "command": "foretoken lab decide",
        "policy": policy,
        "verdict": best.verdict,
        "exit_code": EXIT_CODES[best.verdict],
        "answer": best.answer,
        "sentence": best.sentence,
        "best": best.best.run,
        "differs": to_plain(best.dimensions),
        "crossings": to_plain(best.crossings),
        "decisions": to_plain(decisions),
        "other_lengths": to_plain(list(others)),
    }


def _print(
    summaries: list["AbSummary"],
    decisions: list["Decision"],
    best: "Overall",
    others: tuple["OtherLength", ...],
) -> None:
    from rich.console import Console

    from foretoken.cli.lab.run_tables import cells_table, print_classes
    from foretoken.lab.decide.verdict import print_decision

    console = Console(highlight=False)
    several = len(decisions) > 1
    run = best.best.run
    title = f"- {best.answer.lower()}" if several else f"{run} - {best.answer.lower()}"
    whole = replace(best.best, sentence="\n".join(best.says), run=title)
    print_decision(console, whole, full=not several)
    if several:
        places = {
            d.name: [d.show(row) for row in range(len(decisions))] for d in best.dimensions
        } or {"run": [decision.run for decision in decisions]}
        console.print(cells_table(places, summaries, [d.verdict for d in decisions]))
        console.print("The run that decides, rule by rule:", style="bold")
        print_decision(console, best.best)
    print_classes(console, summaries[decisions.index(best.best)])
    if others:
        console.print(_lengths_table(others))


def _lengths_table(others: tuple["OtherLength", ...]) -> "Table":
    from rich.table import Table

    table = Table("k", "tokens/step", "between", "rate", "speed-up", title="Other draft lengths")
    for row in others:
        table.add_row(
            str(row.k), f"{row.tokens_per_step:.2f}", f"{row.least:.2f}-{row.most:.2f}",
            f"{row.acceptance_rate:.2f}", "-" if row.speedup is None else f"{row.speedup:.2f}",
        )  # fmt: skip
    return table
