"""`foretoken lab lint`: options and printing of the linter.

Foretoken's own commands are judged by the command line that they are for.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.serve import served, settings_of, speculates_by_default
from foretoken.cli.serve_options import other_settings
from foretoken.errors import ConfigError, one_of

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.lab.findings import Finding
    from foretoken.lab.lint.checks import LintResult, OwnParser

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""Any mistake that the parser of a command finds."""
EPILOG = (
    "Exit code: 0: nothing that fails; 1: an error was found (with --strict also a warning); 2: "
    "nothing readable was given. Example: foretoken lab lint serve.sh compose.yaml"
)


LogOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="LOG|URL|METRICS",
        help="A server's log, its URL or metrics page, or its command: what is wrong with its "
        "drafts, with the line, what to type, and the public thread; several times.",
    ),
]


def lint(
    context: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="A server's command in one pair of quotes, a file that has it (shell, Dockerfile, "
            "compose, Kubernetes, settings, Python that calls LLM(...)), or `-` for standard input."
        ),
    ] = None,
    log: LogOption = None,
    engine: Annotated[
        str,
        typer.Option(
            help="auto, vllm, sglang, llama.cpp, tensorrt-llm or foretoken: whose rules count."
        ),
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Checks memory and ranks on this device, as in `plan`.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many devices.", min=1)] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Find what will not work, and give it back corrected: removed names, impossible
    combinations, models that do not fit."""
    from foretoken.lab.findings import worst_level
    from foretoken.lab.launch.engines import READ
    from foretoken.lab.launch.read import READABLE, read_source
    from foretoken.lab.lint.checks import lint as check
    from foretoken.lab.lint.fit import Machine

    if engine not in ("auto", *READ):
        raise ConfigError("--engine", engine, one_of(engine, ("auto", *READ)))
    own = own_parser(context.find_root().command)
    if not (inputs or log):
        raise ConfigError("INPUTS", None, f"{READABLE}; or --log with a log, a URL or a command")
    results = {}
    symptoms = {name: _symptoms(name, engine) for name in log or ()}
    for name in inputs or ():
        source = read_source(text_of(name), engine, name)
        if not (source.launches or source.findings):
            raise ConfigError("INPUTS", name, READABLE)
        results[name] = check(source, Machine(device=device, count=count), own)
    found = [finding for result in results.values() for finding in result.findings]
    found += [finding for seen in symptoms.values() for finding in seen]
    if as_json:
        print(json.dumps(_document(results, symptoms)))
    else:
        _print(results)
        for name, seen in symptoms.items():
            _print_symptoms(name, seen)
    failing = ("error", "warning") if strict else ("error",)
    raise typer.Exit(1 if worst_level(found) in failing else 0)


def _document(
    results: dict[str, "LintResult"], symptoms: "dict[str, list[Finding]]"
) -> dict[str, Any]:
    from foretoken.lab.plain import to_plain

    of_launches = {name: to_plain(result.findings) for name, result in results.items()}
    of_logs = {name: to_plain(seen) for name, seen in symptoms.items()}
    corrected = {
        name: [one.corrected for one in result.launches if one.corrected]
        for name, result in results.items()
    }
    return {
        "command": "foretoken lab lint",
        "findings": of_launches | of_logs,
        "corrected": corrected,
    }


def _symptoms(name: str, engine: str) -> "list[Finding]":
    """What a log, a server's metrics or a command shows. Raises ConfigError: nothing is there to
    read; EndpointError: no server answers."""
    from foretoken.lab.lint.symptoms import diagnose
    from foretoken.lab.measure.driving import run_to_end

    url = name.startswith(("http://", "https://"))
    text = run_to_end(_metrics_of(name)) if url else text_of(name, "--log")
    log, found = diagnose(text, engine)
    if not (found or log.facts or log.settings) and log.engine == "auto":
        raise ConfigError("--log", name, "a log, a metrics page or a command of an engine")
    return found


async def _metrics_of(url: str) -> str:
    from foretoken.errors import EndpointError
    from foretoken.lab.http.timed import HttpPool, TransportError

    pool = HttpPool(url.rstrip("/").removesuffix("/metrics"))
    try:
        answer = await pool.send("GET", "/metrics", timeout_s=10.0)
    except TransportError as error:
        raise EndpointError(f"{url}: {error}; start the server first") from error
    finally:
        await pool.close()
    if answer.status != 200:
        said = f"{url}: HTTP {answer.status} at /metrics; llama.cpp tells them with --metrics"
        raise EndpointError(said)
    return answer.body.decode("utf-8", "replace")


def own_parser(root: Any) -> "OwnParser":
    """What judges a `foretoken serve`: the parser that it is for."""

    def parse(words: tuple[str, ...]) -> "list[Finding]":
        from foretoken.lab.lint.checks import settings_finding, speculation_finding

        name, *arguments = words
        try:
            settings = settings_of_words(root, words)
            config, _ = served(settings)
        except ConfigError as error:
            return [settings_finding(error)]
        except _USAGE_ERROR as error:
            option = next(iter(getattr(error.param, "opts", ())), name)
            after = arguments[arguments.index(option) + 1 :] if option in arguments else []
            given = next(iter(after), None)
            return [settings_finding(ConfigError(option, given, error.message))]
        by_default = speculates_by_default(settings, config)
        return [speculation_finding(config, by_default=by_default)]

    return parse


def settings_of_words(root: Any, words: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a command by the parser that it is for, of the whole command line `root`.
    Raises ConfigError if a setting is not known, or a file of settings cannot be read."""
    name, *arguments = words
    made = root.commands[name].make_context(name, arguments)
    return settings_of(made.params, other_settings(made))


def text_of(name: str, field: str = "INPUTS") -> str:
    """What an argument of a command means: a file's text, standard input, or itself. Raises
    ConfigError if it looks like a file, and there is none."""
    if name == "-":
        return sys.stdin.read()
    path = Path(name)
    is_file = False
    with suppress(OSError):  # a whole script is too long for a name
        is_file = path.is_file()
    if not is_file and (name.lstrip().startswith("{") or " " in name or "\n" in name):
        return name
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"a readable text file, or a command line in one pair of quotes ({error})"
        raise ConfigError(field, name, allowed) from error


def _print(results: dict[str, "LintResult"]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for name, result in results.items():
        _print_title(console, name)
        for number, verdict in enumerate(result.launches, start=1):
            launch = verdict.launch
            if len(result.launches) > 1:
                console.print(Text(f" {number}. {launch.engine} {launch.model or ''}".rstrip()))
            _print_findings(console, verdict.findings)
            if not verdict.findings:
                console.print("  nothing to say", style="green")
            if verdict.corrected and verdict.remaining:
                left = "\n  Corrected, as far as it can be; this is left to decide:"
                console.print(left, style="bold")
                _print_findings(console, verdict.remaining)
            elif verdict.corrected:
                console.print("\n  Corrected:", style="bold")
            if verdict.corrected:  # as it is, to be pasted: no colours, no broken lines
                print(f"\n{verdict.corrected}\n")
        _print_findings(console, result.others)


def _print_symptoms(name: str, found: "list[Finding]") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_title(console, name)
    _print_findings(console, tuple(found))
    if not found:
        console.print("  no symptom that is known", style="green")


def _print_title(console: "Console", name: str) -> None:
    from rich.text import Text

    first = next(filter(str.strip, name.splitlines()), name)
    title = first if len(first) < 80 and first == name else first[:77] + "..."
    console.print(Text(title, style="bold"))


def _print_findings(console: "Console", findings: tuple["Finding", ...]) -> None:
    from rich.text import Text

    from foretoken.lab.findings import LEVELS
    from foretoken.lab.plan.page import STYLES

    for finding in sorted(findings, key=lambda one: LEVELS.index(one.level)):
        line = Text("  ")
        line.append(f"{finding.level:8}", style=STYLES[finding.level])
        named = finding.where and not finding.message.startswith(finding.where)
        line.append(f"{finding.where}: " if named else "", style="bold")
        line.append(finding.message)
        line.append(f" [{finding.check}]", style="dim")
        if finding.remedy:
            line.append(f"\n          -> {finding.remedy}", style="italic")
        console.print(line, soft_wrap=True)
