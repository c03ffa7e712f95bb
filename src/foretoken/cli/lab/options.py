"""Options that the lab's measuring commands share, and how they become settings.

Command-line options override the YAML file; `--set` reaches every field. `measuring` puts them
behind a command's own options and hands them over as one value; which of them a command leaves out,
and where its results go by default, is all that it says about them.
"""

import atexit
import functools
import importlib.util
import inspect
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from foretoken.errors import ConfigError, one_of
from foretoken.extras import EXTRA_OF

ConfigArgument = Annotated[
    Path | None, typer.Argument(help="Settings as YAML; options override them.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="The folder of the results.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as load.concurrency=8."),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(help="A file of prompts or a trace; `demo`: held-out Python."),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="A broken line of the workload is an error.")
]
LoadOption = Annotated[
    str | None,
    typer.Option(
        "--load",
        metavar="LOAD",
        help="closed:N in flight; constant:R, poisson:R, gamma:R:B requests/s, in bursts below "
        "B = 1; trace[:SPEED].",
    ),
]
BlocksOption = Annotated[int | None, typer.Option(help="Starts of each server.", min=1)]
RequestsOption = Annotated[
    int | None, typer.Option("--requests", help="Requests per block.", min=1)
]
TokensOption = Annotated[
    int | None, typer.Option("--max-tokens", help="Length of every output.", min=1)
]
TemperatureOption = Annotated[
    str | None,
    typer.Option("--temperatures", metavar="LIST", help="Such as 0,0.4,0.8; dealt out in turn."),
]
SloOption = Annotated[
    str | None,
    typer.Option("--slo", metavar="LIST", help="Service levels, such as ttft=0.2,tpot=0.05."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the run that is in the folder.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be measured, and stop.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document to stdout, the rest to stderr.")
]
BaselineOption = Annotated[
    str | None, typer.Option(help="A URL, or a command with {port}; speculation off.")
]
CandidateOption = Annotated[
    str | None, typer.Option(help="A URL, or a command with {port}; speculation on.")
]


def arms_of(baseline: str | None, candidate: str | None) -> list[str]:
    """`--baseline` and `--candidate` as `--set` would say them; the arms are `off` and `on`."""
    from foretoken.lab.measure.experiment import arm_of

    given = (("baseline", baseline, "off"), ("candidate", candidate, "on"))
    return [
        f"{n}={json.dumps(arm_of(text, label))}" for n, text, label in given if text is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcuts:
    """The options that are short for a setting."""

    workload: str | None = None
    strict: bool = False
    load: str | None = None
    blocks: int | None = None
    requests: int | None = None
    max_tokens: int | None = None
    temperatures: str | None = None
    slo: str | None = None

    def overrides(self, out: Path, *, dry_run: bool = False) -> list[str]:
        """The short options as `--set` would say them."""
        found: list[str] = []
        if self.workload is not None:
            file = resolve_workload(self.workload, out, dry_run=dry_run)
            found.append(f"workload.file={json.dumps(file)}")
        if self.strict:
            found.append("workload.strict=true")
        if self.load is not None:
            found.append(f"load={json.dumps(parse_load(self.load))}")
        if self.blocks is not None:
            found.append(f"sizes.blocks={self.blocks}")
        if self.requests is not None:
            found.append(f"sizes.requests_per_block={self.requests}")
        if self.max_tokens is not None:
            found.append(f"workload.max_tokens={self.max_tokens}")
        if self.temperatures is not None:
            values = parse_numbers(self.temperatures, "--temperatures")
            found.append(f"workload.temperatures={json.dumps(values)}")
        if self.slo is not None:
            found.append(f"slo={json.dumps(parse_levels(self.slo))}")
        return found


def parse_numbers(text: str, option: str) -> list[float]:
    """Numbers between commas.

    Raises:
        ConfigError: there is something else.
    """
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError as error:
        raise ConfigError(option, text, "numbers between commas, such as 0,0.5") from error


def parse_whole(text: str, option: str) -> list[int]:
    """Whole numbers above 0 between commas.

    Raises:
        ConfigError: there is something else, or nothing.
    """
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(option, text, "whole numbers above 0 between commas, such as 1,3,5")
    return found


def parse_load(text: str, option: str = "--load") -> dict[str, Any]:
    """The mapping of `--load`, or of another option of that form.

    Raises:
        ConfigError: it is none of the forms.
    """
    kind, *rest = text.split(":")
    try:
        numbers = [float(part) for part in rest]
        if not all(0 < number < math.inf for number in numbers):
            raise ValueError(numbers)
        if kind == "closed" and len(numbers) <= 1 and all(map(float.is_integer, numbers)):
            return {"kind": kind, "concurrency": int(numbers[0]) if numbers else 1}
        if kind in ("constant", "poisson") and len(numbers) == 1:
            return {"kind": kind, "rate": numbers[0]}
        if kind == "gamma" and len(numbers) == 2:
            return {"kind": kind, "rate": numbers[0], "burstiness": numbers[1]}
        if kind == "trace" and len(numbers) <= 1:
            return {"kind": kind, "speed": numbers[0] if numbers else 1.0}
    except ValueError:
        pass
    forms = "closed:N, constant:R, poisson:R, gamma:R:B or trace[:SPEED]"
    raise ConfigError(option, text, f"{forms}, numbers above 0, such as closed:8")


def parse_levels(text: str) -> dict[str, float]:
    """The mapping of `--slo`.

    Raises:
        ConfigError: a name or a number is wrong.
    """
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in _LEVELS:
            raise ConfigError("--slo", name, one_of(name, _LEVELS))
        try:
            found[f"{name}_s"] = float(value)
        except ValueError as error:
            allowed = f"{name}= and seconds, such as {name}=0.2"
            raise ConfigError("--slo", part, allowed) from error
    return found


_LEVELS = ("ttft", "tpot", "e2e")


def parse_prices(text: str) -> dict[str, float]:
    """The mapping of `--price`: one number for both arms, or one each by name.

    Raises:
        ConfigError: it is neither.
    """
    pairs = [part.rpartition("=") for part in text.split(",")]
    try:
        prices = {name: float(value) for name, _, value in pairs}
    except ValueError:
        prices = {}
    if not prices or min(prices.values()) <= 0 or ("" in prices and len(pairs) > 1):
        raise ConfigError("--price", text, "a number above 0, or one for each arm: off=2.5,on=3")
    return prices if "" not in prices else dict.fromkeys(("off", "on"), prices[""])


def resolve_workload(text: str, out: Path, *, dry_run: bool = False) -> str:
    """The file of `--workload`; `demo` is written into the results' folder first, and by a dry run
    into a folder that is gone when the program ends."""
    if text != "demo":
        return text
    from foretoken.lab.records.run_files import make_folder
    from foretoken.text.packaged import packaged_texts

    if dry_run:
        out = Path(tempfile.mkdtemp(prefix="foretoken-dry-run-"))
        atexit.register(shutil.rmtree, out, ignore_errors=True)
    path = out / "workload.jsonl"
    if not path.is_file():
        make_folder(out)
        prompts = packaged_texts("code", 120)
        lines = [json.dumps({"prompt": p.text, "cluster": p.name, "max_tokens": 64,
                             "category": "code"}) for p in prompts]  # fmt: skip
        path.write_text("\n".join(lines) + "\n", "utf-8")
    return str(path)


def tell_if_no_report() -> None:
    """Say before hours of measuring, not after, that the report lacks a package."""
    if importlib.util.find_spec("matplotlib") is None:
        package, extra = "matplotlib", EXTRA_OF["matplotlib"]
        typer.echo(
            f"`foretoken lab decide --html` will need {package}, which is not installed: "
            f'pip install "foretoken[{extra}]" (the measurement and its verdict do without)',
            err=True,
        )


def show_plan(segments: Sequence[Any], as_json: bool) -> None:
    """What `--dry-run` answers."""
    rows = [
        {
            "block": s.block,
            "arm": s.arm.name,
            "server": s.arm.url or s.arm.command,
            "requests": len(s.items),
            "warm_up": len(s.warm_up),
            "load": str(s.load),
        }
        for s in segments
    ]
    if as_json:
        print(json.dumps({"segments": rows}))
        return
    for row in rows:
        print(
            f"block {row['block'] + 1} {row['arm']}: {row['warm_up']} + {row['requests']} "
            f"requests, {row['load']}, {row['server']}",
            file=sys.stderr,
        )


T = TypeVar("T")
EXIT_STOPPED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What the shared options were given."""

    config: Path | None
    out: Path
    short: Shortcuts
    setting: tuple[str, ...]
    resume: bool
    dry_run: bool
    as_json: bool

    def settings(
        self, kind: type[T], arms: Sequence[str] = (), defaults: dict[str, Any] | None = None
    ) -> T:
        """Settings of `kind`: defaults, the file, the short options, `arms`, then `--set`.

        Raises:
            ConfigError: something in them is wrong.
        """
        from foretoken.lab.measure.experiment import SERVER, load_settings

        overrides = [*self.short.overrides(self.out, dry_run=self.dry_run), *arms, *self.setting]
        try:
            return load_settings(kind, self.config, overrides, defaults)
        except ConfigError as error:
            name = error.field.removeprefix("settings.").removesuffix(".file")
            if name not in _NEEDED or error.given is not None:
                raise
            allowed = SERVER if name != "workload" else "a file of prompts or a trace, or demo"
            raise ConfigError(_NEEDED[name], None, allowed) from error


_NEEDED = {name: f"--{name}" for name in ("workload", "baseline", "candidate")} | {
    "arm": "--server"
}
"""Settings without a default, and the options that give them."""


_FIRST: dict[str, Any] = {"config": ConfigArgument}
_LAST: dict[str, Any] = {
    "out": OutOption,
    "workload": WorkloadOption,
    "strict": StrictOption,
    "load": LoadOption,
    "blocks": BlocksOption,
    "requests": RequestsOption,
    "max_tokens": TokensOption,
    "temperatures": TemperatureOption,
    "slo": SloOption,
    "setting": SetOption,
    "resume": ResumeOption,
    "dry_run": DryRunOption,
    "as_json": JsonOption,
}
_SWITCHES = ("strict", "resume", "dry_run", "as_json")


def measuring(out: str, *without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameter takes a Measuring, the shared options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        defaults: dict[str, Any] = {"out": Path(out), **dict.fromkeys(_SWITCHES, False)}

        def parameter(name: str, kind: Any) -> inspect.Parameter:
            where = inspect.Parameter.POSITIONAL_OR_KEYWORD
            return inspect.Parameter(name, where, default=defaults.get(name), annotation=kind)

        own = list(inspect.signature(command).parameters.values())[1:]
        first = [parameter(name, kind) for name, kind in _FIRST.items()]
        last = [parameter(name, kind) for name, kind in _LAST.items() if name not in without]
        shared = {p.name for p in (*first, *last)}

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            taken = {name: given.pop(name) for name in shared}
            try:
                command(_gather(taken), **given)
            except KeyboardInterrupt as error:
                said = f"stopped; what is measured is in {taken['out']}, --resume goes on"
                typer.echo(said, err=True)
                raise typer.Exit(EXIT_STOPPED) from error

        parameters = [*first, *own, *last]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _gather(taken: dict[str, Any]) -> Measuring:
    short = {name: value for name, value in taken.items() if name in Shortcuts.__slots__}
    return Measuring(
        config=taken["config"],
        out=taken["out"],
        short=Shortcuts(**short),
        setting=tuple(taken["setting"] or ()),
        resume=taken["resume"],
        dry_run=taken.get("dry_run", False),
        as_json=taken["as_json"],
    )
