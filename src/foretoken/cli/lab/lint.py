"""`foretoken lab lint`: options and printing of the linter."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.findings import Finding

EXIT_FOUND = 1
EPILOG = (
    "Exit code: 0: nothing that fails; 1: an error was found (with --strict also a warning); 2: "
    "nothing readable was given. Example: foretoken lab lint serve.sh requests.jsonl dashboard.json"
)


def lint(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Files (shell, YAML, JSON, JSON lines), `-` for standard input, or a command "
            "line in one pair of quotes."
        ),
    ],
    engine: Annotated[
        str, typer.Option(help="auto, vllm, llama.cpp or foretoken: whose rules count.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Checks memory on this device, as in `plan`.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many devices.", min=1)] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Find what will not work: removed names, impossible combinations, refused requests."""
    from foretoken.errors import one_of
    from foretoken.lab.findings import worst_level
    from foretoken.lab.lint.checks import Machine
    from foretoken.lab.lint.checks import lint as check
    from foretoken.lab.lint.launches import ENGINES, read_source
    from foretoken.lab.plain import to_plain

    if engine not in ("auto", *ENGINES):
        raise ConfigError("--engine", engine, one_of(engine, ("auto", *ENGINES)))
    results = {}
    for name in inputs:
        source = read_source(_text(name), engine)
        if not (source.launches or source.requests or source.metrics):
            allowed = (
                "a server's command line or settings, requests, or a dashboard; such as "
                "'vllm serve MODEL', in quotes"
            )
            raise ConfigError("INPUTS", name, allowed)
        results[name] = check(source, Machine(device=device, count=count), engine)
    found = [finding for findings in results.values() for finding in findings]
    if as_json:
        print(json.dumps({"command": "foretoken lab lint", "findings": to_plain(results)}))
    else:
        _print(results)
    failing = ("error", "warning") if strict else ("error",)
    raise typer.Exit(EXIT_FOUND if worst_level(found) in failing else 0)


def _text(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    path = Path(name)
    if " " in name and not path.is_file():
        return name
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"a readable text file, or a command line in one pair of quotes ({error})"
        raise ConfigError("INPUTS", name, allowed) from error


def _print(results: dict[str, tuple["Finding", ...]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from foretoken.lab.plan.show import STYLES

    console = Console(highlight=False)
    for name, findings in results.items():
        title = name if len(name) < 80 else name[:77] + "..."
        console.print(Text(title, style="bold"))
        for finding in findings:
            line = Text("  ")
            line.append(f"{finding.level:8}", style=STYLES[finding.level])
            line.append(
                "" if finding.message.startswith(finding.where) else f"{finding.where}: ",
                style="bold",
            )
            line.append(finding.message)
            line.append(f" [{finding.check}]", style="dim")
            if finding.remedy:
                line.append(f"\n          -> {finding.remedy}", style="italic")
            console.print(line, soft_wrap=True)
        if not findings:
            console.print("  nothing to say", style="green")
