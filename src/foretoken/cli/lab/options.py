"""Options that several commands of the lab have, and how texts become settings."""

import atexit
import inspect
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from foretoken.errors import ConfigError, one_of

EXIT_STOPPED = 130
OutOption = Annotated[Path, typer.Option("--out", "-o", help="The folder of the results.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be measured, and stop.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document to stdout, the rest to stderr.")
]


class OptionHelp(NamedTuple):
    meaning: str
    kind: Any = str
    metavar: str | None = None
    flag: str | None = None
    """None: the keyword with dashes."""
    least: float | None = None


def parameters_of(rows: Mapping[str, OptionHelp]) -> Iterator[inspect.Parameter]:
    """Options as keywords of a command: None where one is not given, False of a switch."""
    for name, (meaning, kind, metavar, flag, least) in rows.items():
        switch = kind is bool
        flags = (flag or f"--{name.replace('_', '-')}",) if flag or switch else ()
        option = typer.Option(*flags, metavar=metavar, help=meaning, min=least)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if switch else None,
            annotation=Annotated[kind if switch else kind | None, option],
        )


def parse_numbers(text: str, option: str) -> list[float]:
    """Numbers between commas. Raises ConfigError at anything else."""
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError as error:
        raise ConfigError(option, text, "numbers between commas, such as 0,0.5") from error


def parse_whole(text: str, option: str) -> list[int]:
    """Whole numbers above 0 between commas. Raises ConfigError at anything else, or nothing."""
    parts = [part.strip() for part in text.split(",") if part]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(option, text, "whole numbers above 0 between commas, such as 1,3,5")
    return [int(part) for part in parts]


def parse_load(text: str) -> dict[str, Any]:
    """The mapping of `--load`. Raises ConfigError if it is none of the forms."""
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
    raise ConfigError("--load", text, f"{forms}, numbers above 0, such as closed:8")


def parse_levels(text: str) -> dict[str, float]:
    """The mapping of `--slo`. Raises ConfigError if a name or a number is wrong."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError("--slo", name, one_of(name, ("ttft", "tpot", "e2e")))
        try:
            found[f"{name}_s"] = float(value)
        except ValueError as error:
            allowed = f"{name}= and seconds, such as {name}=0.2"
            raise ConfigError("--slo", part, allowed) from error
    return found


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


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Names and values of `--grid`; values are YAML between commas, or a YAML list. Raises
    ConfigError if a text has no `=`."""
    from foretoken.lab.measure.experiment import parse_yaml

    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            allowed = "NAME=VALUES, such as temperature=0,0.8, concurrency=1,8 or k=1,3,5"
            raise ConfigError("--grid", text, allowed)
        whole = parse_yaml(values, f"--grid {name}") if values.startswith("[") else None
        axes[name] = whole if isinstance(whole, list) else [
            parse_yaml(value, f"--grid {name}") for value in values.split(",")
        ]  # fmt: skip
    return axes
