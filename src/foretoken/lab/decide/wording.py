"""A decision for people: the verdict, every rule with its number, and what to measure next."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.lab.decide.verdict import DO_NOT_SHIP, NOT_YET, SHIP, Decision, Judged

COLOURS = {SHIP: "green", DO_NOT_SHIP: "red", NOT_YET: "yellow"}
MARKS = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}


def print_decision(console: Console, decision: Decision, *, full: bool = True) -> None:
    """The verdict's panel, and with `full` the rules below it."""
    colour = COLOURS[decision.verdict]
    body = Text(decision.sentence)
    if decision.needed_blocks is not None:
        body.append(f"\n{measure_more(decision)}", style="bold")
    console.print(
        Panel(body, title=f"[bold {colour}]{decision.verdict}[/] {decision.run}",
              title_align="left", border_style=colour)
    )  # fmt: skip
    if full:
        console.print(_rules(decision.rules))


def measure_more(decision: Decision) -> str:
    """What is missing, in blocks and minutes."""
    needed = decision.needed_blocks or 0
    more = max(0, needed - decision.num_blocks)
    return f"measure {more} more blocks ({needed} in all{_took(decision)}) and decide again"


def _took(decision: Decision) -> str:
    if not decision.more_seconds:
        return ""
    minutes = decision.more_seconds / 60
    return f", about {minutes:.0f} minutes" if minutes >= 1.5 else ", a minute or less"


def _rules(rules: Sequence[Judged]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rule", "weight", "answer", "what was seen"):
        table.add_column(name, no_wrap=name != "what was seen", overflow="fold")
    for judged in rules:
        result = judged.result
        style = "dim" if judged.weight == "note" else MARKS[result.outcome]
        text = Text(result.says, style="dim" if judged.weight == "note" else "")
        missing = [
            f"{n} {what} in all"
            for n, what in ((result.needed_blocks, "blocks"), (result.needed_requests, "requests"))
            if n
        ]
        if missing:
            text.append(f"\n-> {', '.join(missing)}", style="italic")
        if result.advice and result.outcome != "pass":
            text.append(f"\n-> {result.advice}", style="italic")
        table.add_row(
            judged.rule,
            judged.weight,
            Text(result.outcome, style=style),
            text,
        )
    return table
