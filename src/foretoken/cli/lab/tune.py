"""`foretoken lab tune`: from a server's command to its best proven setting."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab.options import EXIT_STOPPED, JsonOption, parse_whole
from foretoken.lab.verdict import EXIT_CODES

if TYPE_CHECKING:
    from foretoken.lab.measure.workload import Item
    from foretoken.lab.tune.answer import TunedAnswer
    from foretoken.lab.tune.journal import Journal
    from foretoken.lab.tune.real import StartedServer
    from foretoken.lab.tune.search import Search
    from foretoken.lab.tune.server_command import Commands

EPILOG = """
foretoken lab tune "foretoken serve demo" --workload demo --loads 1,4 --minutes 10

foretoken lab tune "vllm serve MODEL" --drafter draft_model:DRAFT --drafter ngram
--workload recorded.jsonl
"""

NAME_ONE = (
    "only look-up is tried: name a draft model or a head that you have with "
    "--drafter draft_model:MODEL or --drafter eagle3:HEAD"
)


def tune(
    server: Annotated[
        str, typer.Argument(help="The command that starts it, as you would type it.")
    ],
    workload: Annotated[
        str, typer.Option(help="A file of prompts or a trace; `demo`: held-out Python.")
    ],
    loads: Annotated[str, typer.Option(help="Requests in flight that matter.")] = "1,8",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD[:MODEL]", help="What to try, or JSON with vLLM's keys; several times."
        ),
    ] = None,
    lengths: Annotated[str, typer.Option("-k", help="Draft lengths to try.")] = "1,2,3,5,8",
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer; default: the workload's.", min=1)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where it runs, as in `lab plan`: what that expects is tried first."),
    ] = None,
    count: Annotated[int, typer.Option(help="How many devices.", min=1)] = 1,
    minutes: Annotated[
        float, typer.Option(help="That all of it may take, starts of servers included.", min=0.1)
    ] = 60.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the results.")] = Path(
        "lab-tune"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the search that is in the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the commands that would be tried, and stop.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the best speculation for a server and your traffic, and prove it, or say: leave it off.

    The server is started with each setting in turn and asked the same requests; settings that
    cannot be best any more are dropped; the best has to win a last A/B against no speculation.
    Known are vLLM, SGLang, llama.cpp and Foretoken; of any other server a command with {k} for the
    draft length (0: none) and {port}. Exit code 0: USE IT; 1: LEAVE IT OFF; 4: MEASURE MORE; 2:
    wrong settings; 5: the server does not start.
    """
    from foretoken.cli.lab.tune_view import show_answer
    from foretoken.lab.plain import to_plain

    tried = (drafter or [], parse_whole(lengths, "-k"))
    machine = (device, count) if device else None
    search, commands = _plan(server, tried, parse_whole(loads, "--loads"), minutes, machine)
    _say(search, commands, named=bool(drafter))
    if dry_run:
        return
    asked = {"server": server, "workload": workload, "max_tokens": max_tokens}
    answer = _find(search, commands, asked, out, resume=resume)
    show_answer(answer, search, out)
    if as_json:
        print(json.dumps(to_plain(answer)))
    raise typer.Exit(EXIT_CODES[answer.verdict])


def _say(search: "Search", commands: "Commands", *, named: bool) -> None:
    from foretoken.cli.lab.tune_view import announce
    from foretoken.lab.tune.candidates import only_looks_up

    announce(search, commands)
    if not named and only_looks_up(commands.drafters):
        typer.echo(NAME_ONE, err=True)


def _plan(
    server: str,
    tried: tuple[list[str], list[int]],
    loads: list[int],
    minutes: float,
    machine: tuple[str, int] | None = None,
) -> "tuple[Search, Commands]":
    """What is searched, and how the server is told; `machine`: a device and how many of it."""
    from foretoken.cli.lab.tune_view import show_expected
    from foretoken.lab.lint.fit import Machine
    from foretoken.lab.tune.candidates import (
        Expectation,
        expect,
        offered,
        only_those,
        settings_of,
        that_load,
    )
    from foretoken.lab.tune.search import Search
    from foretoken.lab.tune.server_command import Commands, ServerCommand
    from foretoken.lab.tune.settings import Question

    command = ServerCommand.parse(server)
    at, lengths = tuple(sorted(set(loads))), sorted(set(tried[1]))
    hoped = Expectation(drafters=offered(command, tried[0]))
    where = Machine(device=machine[0], count=machine[1]) if machine else Machine()
    if machine is not None:
        hoped = expect(
            command, hoped.drafters, where, loads=at, lengths=lengths, may_add=not tried[0]
        )
    commands = Commands(command, dict(hoped.drafters), at)
    settings = settings_of(command, tuple(hoped.drafters), lengths, hoped.best)
    loading = that_load(settings, commands, where, server)
    hoped = only_those(hoped, loading)
    show_expected(hoped, at)
    question = Question(
        loads=at, settings=loading.settings, schedule=command.schedule, expected=hoped.gains
    )
    search = Search(question=question, budget_s=60.0 * minutes)
    return search, Commands(command, dict(hoped.drafters), at)


def _find(
    search: "Search", commands: "Commands", asked: dict[str, Any], out: Path, *, resume: bool
) -> "TunedAnswer":
    from foretoken.lab.plain import to_plain
    from foretoken.lab.records.run_files import write_json
    from foretoken.lab.tune.answer import make_answer
    from foretoken.lab.tune.journal import ANSWER, Journal
    from foretoken.lab.tune.real import StartedServer

    items = _items(asked, out)
    journal = Journal(out, {**asked, **to_plain(search)}, resume=resume)
    try:
        server = StartedServer(
            commands.to_measure,
            items,
            out,
            budget_s=search.budget_s,
            most_tokens=journal.visits[0].most_tokens if journal.visits else None,
        )
        _measure(search, journal, server)
    except KeyboardInterrupt as error:
        typer.echo(f"stopped; what is measured is in {out}, --resume goes on", err=True)
        raise typer.Exit(EXIT_STOPPED) from error
    finally:
        journal.close()
    answer = make_answer(search, journal.visits, commands.to_type)
    write_json(out / ANSWER, answer)
    return answer


def _items(asked: dict[str, Any], out: Path) -> "list[Item]":
    from foretoken.cli.lab.options import resolve_workload
    from foretoken.lab.measure.workload import WorkloadConfig, load_items

    file = resolve_workload(asked["workload"], out)
    items, notes = load_items(WorkloadConfig(file=file, max_tokens=asked["max_tokens"]))
    for note in notes:
        typer.echo(note, err=True)
    return items


def _measure(search: "Search", journal: "Journal", server: "StartedServer") -> None:
    from foretoken.cli.lab.tune_view import tuning_view
    from foretoken.lab.tune.journal import run_search

    with tuning_view(search, journal.visits) as view:
        server.watch = view.asked
        run_search(search, server, journal, view.begins, view.ended)
