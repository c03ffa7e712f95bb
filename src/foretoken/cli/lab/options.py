"""Options of the lab's commands, and how they become settings.

Command-line options override the YAML file; `--set` reaches every field.
"""

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.errors import ConfigError, one_of

EXIT_STOPPED = 130
ConfigArgument = Annotated[
    Path | None, typer.Argument(help="Settings as YAML; options override them.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="The folder of the results.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting, such as load.concurrency=8, or rule, such as speedup.least=1.15.",
    ),
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
BlocksOption = Annotated[
    int | None, typer.Option(help="Exactly so many starts of each server.", min=1)
]
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
    str | None,
    typer.Option(
        help="As the baseline, with speculation on; may have {k}, {method} ... of the grid."
    ),
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


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Names and values of `--grid`; values are YAML between commas, or a YAML list.

    Raises:
        ConfigError: a text has no `=`.
    """
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
