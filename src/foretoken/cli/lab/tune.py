"""`foretoken lab tune`: from a server's command to its best proven setting."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.lab.options import JsonOption, parse_whole

EPILOG = """
foretoken lab tune "foretoken serve demo" --workload demo --loads 1,4 --minutes 10

foretoken lab tune "vllm serve MODEL" --drafter draft_model:DRAFT --drafter ngram
--workload recorded.jsonl
"""


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
    from foretoken.cli.lab.tune_view import TuneOrder, run_tune

    order = TuneOrder(
        server=server, workload=workload, loads=parse_whole(loads, "--loads"),
        named=drafter or [], lengths=parse_whole(lengths, "-k"), max_tokens=max_tokens,
        minutes=minutes, out=out, resume=resume, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(run_tune(order, dry_run=dry_run))
