"""`foretoken train auto`: a drafter in the hours that there are, and whether it is worth having.

Owns the arguments, the table and the verdict; the run is in `foretoken.training.auto`.
"""

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.timed_runs import estimate, show_ratio
from foretoken.lab.verdict import EXITS, FASTER, LEAVE_IT_OFF, MEASURE_MORE, Verdict, judge_gain

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.training.auto.judging import Judgement
    from foretoken.training.auto.run import AutoOutcome

EPILOG = (
    f"{EXITS}: these prompts do not tell; 2 and 3: wrong settings, or a model that cannot be "
    "loaded. It has to be faster than plain decoding and every look-up."
)


def auto(
    model: Annotated[str, typer.Argument(help="The target: folder, packaged name or hub id.")],
    prompts: Annotated[
        str, typer.Argument(help="A .jsonl or text file, or hf:NAME:SPLIT, like your traffic.")
    ],
    hours: Annotated[float, typer.Option(help="When all is to be done, pauses included.")],
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/auto-MODEL.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Progress to stderr, one JSON document to stdout.")
    ] = False,
) -> None:
    """Choose, train and measure a drafter in the time given.

    The same command goes on with a run that was interrupted. The model is in memory twice while
    drafters are measured.
    """
    from rich.console import Console

    from foretoken.training.auto.run import REPORT, Assignment, AutoRun

    folder = out or Path("runs") / f"auto-{Path(model).name}"
    asked = Assignment(target=model, prompts=prompts, hours=hours, out=folder.expanduser())
    console = Console(stderr=as_json, highlight=False)
    outcome = AutoRun(asked, lambda line: typer.echo(line, err=as_json)).run()
    config = json.dumps(outcome.config)
    use = f"foretoken serve {model} --speculative-config '{config}'"
    verdict = verdict_on(outcome.judgement, use)
    if as_json:
        report = json.loads((asked.out / REPORT).read_text())
        typer.echo(json.dumps({**report, "verdict": verdict.word, "sentence": verdict.sentence}))
    _print_worth(console, outcome)
    for line in (what_more(outcome), f"The drafter is in {outcome.folder}:", config):
        console.print(line, soft_wrap=True, markup=False)
    console.print(verdict.sentence, style=verdict.style, soft_wrap=True, markup=False)
    raise typer.Exit(verdict.exit_code)


def verdict_on(found: "Judgement", use: str = "") -> Verdict:
    """Beside the best of what needs no training: plain decoding and look-ups.

    `use` is the command that serves with the drafter.
    """
    from foretoken.training.auto.judging import OFF
    from foretoken.training.auto.run import TRAINED

    rival = found.best([OFF, *found.look_ups])[0]
    over = estimate(found.speedups(TRAINED, rival))
    name = "plain decoding" if rival == OFF else rival
    seen = f"{show_ratio(over)} the speed of {name}, the best that needs no training"
    word = judge_gain(over.low, over.high, FASTER)
    if word == MEASURE_MORE and over.median > FASTER:
        return Verdict(word=word, reason=f"{seen}; more prompts would tell")
    word = LEAVE_IT_OFF if word == MEASURE_MORE else word
    return Verdict(word=word, reason=seen, command="" if word == LEAVE_IT_OFF else use)


def what_more(outcome: "AutoOutcome") -> str:
    """What twice the time would bring, if the curve goes on."""
    from foretoken.training.auto.run import TRAINED

    found = outcome.doubling
    if found is None:
        return "The run was too short to say what more hours would bring."
    speed = median(outcome.judgement.speedups(TRAINED))
    guess = speed * (found.now + found.tokens) / found.now
    return (
        f"Twice the training would add about {found.tokens:.2f} [{found.low:.2f}, "
        f"{found.high:.2f}] to {found.now:.2f} tokens a verification on held-out text, and make "
        f"{speed:.2f}x about {guess:.2f}x, if the curve goes on; a small head or few prompts "
        "may end it sooner."
    )


def _print_worth(console: "Console", outcome: "AutoOutcome") -> None:
    from rich import box
    from rich.table import Table

    from foretoken.training.auto.judging import OFF
    from foretoken.training.auto.run import TRAINED

    found = outcome.judgement
    prompts = len(next(iter(found.paces[OFF].values())))
    title = (
        f"{outcome.kind} after {outcome.steps:,} steps ({outcome.trained_s / 60:.1f} minutes), "
        f"one client, {prompts} held-out prompts in turns, passes: {found.passes}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("drafter", no_wrap=True)
    for column in ("drafts", "tokens a\nverification", "speed-up\n[95 %]"):
        table.add_column(column, justify="right", no_wrap=True)
    for temperature in found.paces[OFF]:
        table.add_column(f"T = {temperature}", justify="right", no_wrap=True)
    for name in found.best([name for name in found.paces if name != OFF]):
        table.add_row(
            f"[bold]{name} ({outcome.kind})[/]" if name == TRAINED else name,
            str(found.lengths[name]),
            f"{found.tokens[name]:.2f}",
            show_ratio(estimate(found.speedups(name))),
            *(f"{median(found.speedups_at(name, t)):.2f}x" for t in found.paces[OFF]),
        )
    console.print(table)
