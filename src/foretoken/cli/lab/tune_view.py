"""Runs `foretoken lab tune`, and shows what it will try, each visit as it ends, and the answer.

Writes to stderr only, so that --json stays alone on stdout.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
from rich.table import Table

from foretoken.cli.lab.export import proof_by
from foretoken.cli.lab.options import EXIT_STOPPED, resolve_workload
from foretoken.cli.lab.run_tables import console, say
from foretoken.errors import ConfigError
from foretoken.lab.analysis.cost_model import learn
from foretoken.lab.launch.cost_files import WRITTEN_WITH_COSTS
from foretoken.lab.launch.read import read_source
from foretoken.lab.launch.write import LearntCosts, export_launch
from foretoken.lab.measure.workload import WorkloadConfig, load_items
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.records.run_files import ANSWER, read_requests, write_json, write_text
from foretoken.lab.tune.answer import TunedAnswer, make_answer
from foretoken.lab.tune.real import Journal, StartedServer
from foretoken.lab.tune.search import Search, next_visit, sizes, spent_s, stand, visit_s
from foretoken.lab.tune.server_command import (
    ServerCommand,
    offered,
    packages_of,
    settings_of,
    that_load,
)
from foretoken.lab.tune.settings import OFF, Question, Visit
from foretoken.lab.verdict import EXIT_CODES, USE_IT, WORD_STYLES


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOrder:
    server: str
    workload: str
    loads: Sequence[int]
    named: Sequence[str]
    """Drafters to try; none: those that are there."""
    lengths: Sequence[int]
    max_tokens: int | None
    minutes: float
    out: Path
    resume: bool
    as_json: bool


def run_tune(order: TuneOrder, *, dry_run: bool) -> int:
    """Search, print the answer and give its exit code. Raises ConfigError: wrong settings;
    EndpointError: the server does not start without speculation."""
    command = ServerCommand.parse(order.server)
    drafters, loads = offered(command, order.named), tuple(sorted(set(order.loads)))
    line = partial(command.line, drafters=drafters, loads=loads)
    every = settings_of(command, tuple(drafters), sorted(set(order.lengths)))
    settings, refused = that_load(every, line, order.server)
    question = Question(loads=loads, settings=settings, schedule=command.schedule)
    search = Search(question=question, budget_s=60.0 * order.minutes)
    for name, why in refused.items():
        say(f"not started with {name}: {why}")
    at = ", ".join(map(str, loads))
    say(
        f"{len(settings)} settings against no speculation, with {at} requests in flight. "
        f"At most {order.minutes:g} minutes; sooner where the answer is clear."
    )
    for setting in (OFF, *settings):
        say(f"  {setting.name}: {line(setting)}", "dim")
    for package in packages_of(command.engine, drafters):
        say(f"{command.engine} imports {package}: pip install it first")
    if not order.named and drafters and not any(one.model for one in drafters.values()):
        say(
            "only look-up is tried: name a draft model or a head that you have with "
            "--drafter draft_model:MODEL or --drafter eagle3:HEAD"
        )
    if dry_run:
        return 0
    answer = _find(search, line, order)
    write_json(order.out / ANSWER, answer)
    _show_answer(answer, search, order.out)
    if answer.verdict == USE_IT and command.engine in WRITTEN_WITH_COSTS:
        show_costs(command.engine, answer.setting, answer.command, line(OFF), order)
    if order.as_json:
        print(json.dumps(to_plain(answer)))
    return EXIT_CODES[answer.verdict]


def show_costs(engine: str, setting: str, command: str, off: str, order: TuneOrder) -> None:
    """Write and show what a search that ended with a `setting` and its command learnt of costs, in
    the words of its engine; `off` is the command without speculation."""
    drafter, _, _ = setting.partition(" k=")
    records: dict[int, list[RequestRecord]] = {}
    for record in read_requests(order.out):
        name, _, length = record.arm.partition(" k=")
        if record.ok and (record.arm == OFF.name or (name == drafter and length.isdigit())):
            records.setdefault(int(length or 0), []).append(record)
    try:
        learnt = LearntCosts(learn(records), order.out)
        [launch] = read_source(command).launches
        found = export_launch(engine, launch, learnt)
        for name, text in found.files.items():
            write_text(order.out / name, text)
    except ConfigError as error:
        say(f"nothing is written by what steps cost: {error}", "dim")
        return
    beside = f", with {', '.join(found.files)} in {order.out}" if found.files else ""
    say(f"by what steps cost, not yet proven{beside}:\n{found.commented}")
    say(f"to prove it: {proof_by(order.workload, off, found.text, order.loads)}")


def _find(search: Search, line: "partial[str]", order: TuneOrder) -> TunedAnswer:
    file = resolve_workload(order.workload, order.out)
    items, notes = load_items(WorkloadConfig(file=file, max_tokens=order.max_tokens))
    for note in notes:
        say(note)
    asked = {"server": order.server, "workload": order.workload, "max_tokens": order.max_tokens}
    journal = Journal(order.out, {**asked, **to_plain(search)}, resume=order.resume)
    try:
        _measure(search, journal, StartedServer(
            partial(line, port="{port}"),
            items,
            order.out,
            budget_s=search.budget_s,
            most_tokens=journal.visits[0].most_tokens if journal.visits else None,
        ))  # fmt: skip
    except KeyboardInterrupt as error:
        say(f"stopped; what is measured is in {order.out}, --resume goes on")
        raise typer.Exit(EXIT_STOPPED) from error
    finally:
        journal.close()
    return make_answer(search, journal.visits, line)


def _measure(search: Search, journal: Journal, server: StartedServer) -> None:
    """Visit until the search has ended; what is in the journal is not measured again."""
    visits, of_all = journal.visits, f"of {search.budget_s / 60:g} min"
    if visits:
        say(f"goes on after {len(visits)} visits, {spent_s(visits) / 60:.1f} minutes")
    show = console()
    with show.status("") as status:
        while (wanted := next_visit(search, visits)) is not None:
            part = f"turn {wanted.turn}" if wanted.turn else "first"
            name = f"{'final A/B' if wanted.check else part}, {wanted.setting.name}"
            status.update(f"{spent_s(visits) / 60:.1f} {of_all}: {name}")
            journal.add(server.visit(wanted))
            for line in _told(search, visits, name):
                show.print(line, soft_wrap=True, markup=False)


def _told(search: Search, visits: Sequence[Visit], name: str) -> list[str]:
    visit = visits[-1]
    if visit.problem:
        return [f"{name}: given up: {visit.problem}"]
    if len(visits) == 1:
        each_s = visit_s(search, visits)
        asked = ", ".join(f"{n} at {load}" for load, n in sizes(search, visits, 1))
        said = [
            f"a start takes {visit.start_s:.0f} s, a visit about {each_s:.0f} s ({asked} in "
            f"flight): time for {int(search.budget_s / each_s)} visits"
        ]
        if visit.most_tokens:
            why = "longer ones would leave too few visits"
            said.insert(0, f"answers are cut at {visit.most_tokens} tokens: {why}")
        return said
    paces = ", ".join(f"{1000 * seen.pace_s:.2f}" for seen in visit.loads)
    line = f"{spent_s(visits) / 60:.1f} min, {name}: {paces} ms a token"
    if not visit.check:
        now = stand(search, visits)
        line += f"; best so far {now.chosen.name} ({math.exp(now.value):.2f}x), "
        line += f"{len(now.kept)} still in question"
    return [line]


def _show_answer(answer: TunedAnswer, search: Search, out: Path) -> None:
    table = Table("setting", "starts", *(f"{n} in flight" for n in search.question.loads))
    for row in answer.settings:
        if row.problem:
            table.add_row(row.setting, str(row.starts), row.problem.splitlines()[0])
        elif row.starts:
            table.add_row(row.setting, str(row.starts), *(f"{gain:.2f}x" for gain in row.gains))
    console().print(table)
    if answer.pairs:
        by_load = ", ".join(f"{one.gain:.2f}x at {one.load}" for one in answer.loads)
        say(f"final A/B of {answer.candidate}: {by_load} in flight")
    for advice in answer.advice:
        say(advice, "yellow")
    say(
        f"{answer.visits} starts, {answer.minutes:.0f} minutes; one start differs from the next by "
        f"{answer.start_spread:.1%}; all of it is in {out}",
        "dim",
    )
    say(answer.sentence, WORD_STYLES[answer.verdict])
