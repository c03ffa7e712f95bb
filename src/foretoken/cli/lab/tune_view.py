"""What `foretoken lab tune` shows: what it will try, each visit as it ends, and the answer.

Writes to stderr only, so that --json stays alone on stdout.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.cli.lab.run_tables import console
from foretoken.lab.tune.answer import TunedAnswer
from foretoken.lab.tune.search import NextVisit, Search, sizes, spent_s, stand, visit_s
from foretoken.lab.tune.server_command import Commands
from foretoken.lab.tune.settings import OFF
from foretoken.lab.tune.visits import Visit
from foretoken.lab.verdict import WORD_STYLES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from foretoken.lab.tune.candidates import Expectation


def announce(search: Search, commands: Commands) -> None:
    """What will be tried, and how long it takes at most."""
    show, question = console(), search.question
    at = ", ".join(map(str, question.loads))
    show.print(
        f"{len(question.settings)} settings against no speculation, with {at} requests in flight. "
        f"At most {search.budget_s / 60:g} minutes; sooner where the answer is clear.",
        soft_wrap=True,
    )
    for name in commands.to_install():
        show.print(
            f"{commands.command.engine} imports {name}: pip install it first", soft_wrap=True
        )
    for setting in (OFF, *question.settings):
        said = f"  {setting.name}: {commands.to_type(setting)}"
        show.print(said, soft_wrap=True, markup=False, style="dim")


def show_expected(hoped: "Expectation", loads: Sequence[int]) -> None:
    """What a plan promises of each drafter, and what would promise more."""
    show = console()
    for name in hoped.drafters:
        own = [(length, gains) for drafter, length, gains in hoped.gains if drafter == name]
        best = [max((gains[i], length) for length, gains in own) for i in range(len(loads)) if own]
        told = zip(loads, best, strict=False)
        at = ", ".join(f"{gain:.2f}x with k={length} at {load}" for load, (gain, length) in told)
        if at:
            show.print(f"expected, not measured: {name} {at} in flight", soft_wrap=True)
    for sentence in hoped.said:
        show.print(sentence, soft_wrap=True, markup=False)


class TuningView:
    """Follows visits: a bar on a terminal, a line for each visit elsewhere."""

    def __init__(
        self, show: "Console", bar: "Progress", search: Search, before: Sequence[Visit]
    ) -> None:
        self._show, self._bar, self._search = show, bar, search
        self._visits = list(before)
        self._task = bar.add_task("", total=search.budget_s, completed=int(self._spent))
        self._name = ""
        if before:
            self._print(f"goes on after {len(before)} visits, {self._spent / 60:.1f} minutes")

    @property
    def _spent(self) -> float:
        return spent_s(self._visits)

    def begins(self, wanted: NextVisit) -> None:
        """A server is about to be started."""
        part = "final A/B" if wanted.check else f"turn {wanted.turn}" if wanted.turn else "first"
        self._name = f"{part}, {wanted.setting.name}"
        self._bar.update(self._task, description=f"{self._name}: starts")

    def asked(self, load: int, done: int, requests: int) -> None:
        """A request has ended."""
        said = f"{self._name}: {done} of {requests} with {load} in flight"
        self._bar.update(self._task, description=said)

    def ended(self, visit: Visit) -> None:
        """A server was stopped."""
        self._visits.append(visit)
        self._bar.update(self._task, completed=self._spent)
        if len(self._visits) == 1:
            visit_takes = visit_s(self._search, self._visits)
            fit = int(self._search.budget_s / visit_takes)
            if visit.most_tokens:
                self._print(
                    f"answers are cut at {visit.most_tokens} tokens: longer ones would leave too "
                    "few visits"
                )
            asked = ", ".join(f"{n} at {load}" for load, n in sizes(self._search, self._visits, 1))
            self._print(
                f"a start takes {visit.start_s:.0f} s, a visit about {visit_takes:.0f} s "
                f"({asked} in flight): time for {fit} visits"
            )
            return
        paces = ", ".join(f"{1000 * seen.pace_s:.2f}" for seen in visit.loads)
        if visit.problem:
            self._print(f"{self._name}: given up: {visit.problem}")
            return
        now = stand(self._search, [one for one in self._visits if not one.check])
        left = (
            f"; best so far {now.chosen.name} ({math.exp(now.value):.2f}x), "
            f"{len(now.kept)} still in question"
            if not visit.check
            else ""
        )
        self._print(f"{self._spent / 60:.1f} min, {self._name}: {paces} ms a token{left}")

    def _print(self, text: str) -> None:
        self._show.print(text, soft_wrap=True, markup=False)


@contextmanager
def tuning_view(search: Search, before: Sequence[Visit]) -> Iterator[TuningView]:
    """A view for as long as a search lasts."""
    from rich.progress import Progress

    show = console()
    with Progress(console=show, transient=True, disable=not show.is_terminal) as bar:
        yield TuningView(show, bar, search, before)


def show_answer(answer: TunedAnswer, search: Search, out: Path) -> None:
    """What was measured, what the engine cannot be told, then the sentence and the command."""
    from rich.table import Table

    show = console()
    table = Table("setting", "starts", *(f"{n} in flight" for n in search.question.loads))
    for row in answer.settings:
        if row.problem:
            table.add_row(row.setting, str(row.starts), row.problem.splitlines()[0])
        elif row.starts:
            table.add_row(row.setting, str(row.starts), *(f"{gain:.2f}x" for gain in row.gains))
    show.print(table)
    if answer.pairs:
        by_load = ", ".join(f"{one.gain:.2f}x at {one.load}" for one in answer.loads)
        show.print(f"final A/B of {answer.candidate}: {by_load} in flight", soft_wrap=True)
    for kind in answer.kinds:
        gain = kind.gain
        show.print(f"  {kind.kind}: {gain.estimate:.2f}x ({gain.low:.2f} to {gain.high:.2f})")
    for advice in answer.advice:
        show.print(advice, style="yellow", soft_wrap=True)
    show.print(
        f"{answer.visits} starts, {answer.minutes:.0f} minutes; one start differs from the next by "
        f"{answer.start_spread:.1%}; all of it is in {out}",
        soft_wrap=True, style="dim",
    )  # fmt: skip
    show.print(answer.sentence, style=WORD_STYLES[answer.verdict], soft_wrap=True, markup=False)
