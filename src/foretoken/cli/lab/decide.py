"""`foretoken lab decide`: options and printing of the verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.decide.verdict import Decision, Overall
    from foretoken.lab.records.results import ArmSummary

EPILOG = (
    "Exit code: 0: SHIP; 1: DO NOT SHIP; 4: NOT YET, measure as much more as it says; 2: no A/B "
    "there, or a wrong policy."
)


def decide(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of `lab ab`; several: the best configuration counts."),
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
    show_policy: Annotated[
        bool, typer.Option("--show-policy", help="Print the default policy file and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Ship, do not ship, or not yet: every rule with its number, interval and what is missing."""
    from foretoken.lab.decide.ship_policy import default_text, load_policy
    from foretoken.lab.decide.verdict import EXIT_CODES, best_decision
    from foretoken.lab.decide.verdict import decide as judge
    from foretoken.lab.records.run_files import read_ab

    if show_policy:
        print(default_text(), end="")
        raise typer.Exit()
    if not runs:
        allowed = "at least one folder that `foretoken lab ab --out FOLDER` wrote"
        raise ConfigError("RUNS", None, allowed)
    rules = load_policy(policy, tuple(changes or ()))
    other = _reference(reference) if reference else None
    decisions = [judge(read_ab(run), rules, run=str(run), reference=other) for run in runs]
    best = best_decision(decisions)
    if as_json:
        print(json.dumps(_document(rules.name, decisions, best)))
    else:
        _print(decisions, best)
    raise typer.Exit(EXIT_CODES[best.verdict])


def _reference(run: Path) -> "ArmSummary":
    from foretoken.lab.records.results import AbSummary
    from foretoken.lab.records.run_files import read_summary

    summary = read_summary(run, "--reference")
    return summary.arm(summary.candidate) if isinstance(summary, AbSummary) else summary.arm


def _document(policy: str, decisions: list["Decision"], best: "Overall") -> dict[str, object]:
    from foretoken.lab.decide.verdict import EXIT_CODES
    from foretoken.lab.plain import to_plain

    return {
        "command": "foretoken lab decide",
        "policy": policy,
        "verdict": best.verdict,
        "exit_code": EXIT_CODES[best.verdict],
        "sentence": best.sentence,
        "best": best.best.run,
        "decisions": to_plain(decisions),
    }


def _print(decisions: list["Decision"], best: "Overall") -> None:
    from rich.console import Console

    from foretoken.lab.decide.verdict import print_decision

    console = Console(highlight=False)
    for decision in decisions:
        if decision is not best.best:
            print_decision(console, decision, full=False)
    if len(decisions) > 1:
        console.print("\nWhat decides, of the best configuration:", style="bold")
    print_decision(console, replace(best.best, sentence=best.sentence))
