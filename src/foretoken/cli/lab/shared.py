"""The options that all measuring commands have, declared once and handed over as one value.

`measuring` puts them behind a command's own options; which of them a command leaves out, and where
its results go by default, is all that it says about them.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer

from foretoken.cli.lab.options import (
    BlocksOption,
    ConfigArgument,
    DryRunOption,
    JsonOption,
    LoadOption,
    OutOption,
    RequestsOption,
    ResumeOption,
    SetOption,
    Shortcuts,
    SloOption,
    StrictOption,
    TemperatureOption,
    TokensOption,
    WorkloadOption,
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
        from foretoken.lab.measure.experiment import load_settings

        overrides = [*self.short.overrides(self.out), *arms, *self.setting]
        return load_settings(kind, self.config, overrides, defaults)


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
