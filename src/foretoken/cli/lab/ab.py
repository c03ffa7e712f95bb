"""`foretoken lab ab`: two servers under the same traffic, or one; a grid of them; and a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab import options as o
from foretoken.cli.lab.options import OptionHelp
from foretoken.cli.options import with_parameters
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.measure.experiment import AbConfig

ENOUGH = {"sizes": {"blocks": 9, "requests_per_block": 120}}
"""Of a comparison, unless told otherwise: starts enough to compare, requests enough for a P95."""
_LIST = "LIST"
_ROWS = {
    "baseline": OptionHelp("A URL, or a command with {port}; speculation off."),
    "candidate": OptionHelp(
        "As the baseline, with speculation on; may have {k}, {method} ... of the grid."
    ),
    "workload": OptionHelp("A file of prompts or a trace; `demo`: held-out Python."),
    "strict": OptionHelp("A broken line of the workload is an error.", bool),
    "load": OptionHelp(
        "closed:N in flight; constant:R, poisson:R, gamma:R:B requests/s, in bursts below B = 1; "
        "trace[:SPEED].",
        metavar="LOAD",
    ),
    "grid": OptionHelp(
        "Compare in every cell: temperature=0,0.8, concurrency=1,8, class=A,B, k=1,3,5; several "
        "times.",
        list[str],
        "NAME=VALUES",
    ),
    "force_acceptance": OptionHelp(
        "Chances of a draft token, such as 0,0.3,0.6,0.9: which acceptance breaks even?",
        metavar=_LIST,
    ),
    "blocks": OptionHelp("Exactly so many starts of each server.", int, least=1),
    "requests": OptionHelp("Requests per block.", int, least=1),
    "minutes": OptionHelp(
        "As much as fits into so many; 10 give a first answer.", float, least=0.1
    ),
    "max_tokens": OptionHelp("Length of every output.", int, least=1),
    "temperatures": OptionHelp("Such as 0,0.4,0.8; dealt out in turn.", metavar=_LIST),
    "slo": OptionHelp("Service levels, such as ttft=0.2,tpot=0.05.", metavar=_LIST),
    "restart_command": OptionHelp(
        "Restarts a server given as a URL before each of its blocks; {arm} is off or on.",
        metavar="SHELL",
    ),
    "policy": OptionHelp("Rules, as in `decide`.", Path),
    "set": OptionHelp(
        "Any setting, such as load.concurrency=8, or rule, such as speedup.least=1.15.",
        list[str],
        "KEY=VALUE",
    ),
}
_SETTINGS = {
    "workload": "workload.file",
    "strict": "workload.strict",
    "blocks": "sizes.blocks",
    "requests": "sizes.requests_per_block",
    "max_tokens": "workload.max_tokens",
    "temperatures": "workload.temperatures",
    **{name: name for name in ("baseline", "candidate", "load", "slo")},
}
"""Options that are settings of the measurement."""


@with_parameters(o.parameters_of(_ROWS))
def ab(
    config: Annotated[
        Path | None, typer.Argument(help="Settings as YAML; options override them.")
    ] = None,
    *,
    out: o.OutOption = Path("lab-ab"),
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page of plots.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that is in the folder.")
    ] = False,
    dry_run: o.DryRunOption = False,
    as_json: o.JsonOption = False,
    **given: Any,
) -> None:
    """Compare two servers, or two settings of one, under the same prompts and arrivals.

    Blocks alternate; a server given as a command starts anew for each. One given as a URL is one
    start, whose luck widens all intervals, unless --restart-command restarts it. 9 blocks of 120
    requests, then more until the verdict is known or half an hour is over; --blocks takes exactly
    so many. One server alone is measured without a verdict. A grid, and forced acceptance ({rate},
    {rates:K}, {length:K} or {percent} in the candidate's command), take 8 blocks of 30 a cell.

    Says how long it takes before it begins; the verdict is the last line, `lab decide` judges
    again. Exit code 0: USE IT, or measured without a verdict; 1: LEAVE IT OFF; 4: MEASURE MORE, or
    nothing was answered; 2: wrong settings; 5: no server.
    """
    from foretoken.cli.lab.ab_run import AbOrder, run
    from foretoken.lab.decide.ship_policy import load_policy

    minutes, blocks, force = given["minutes"], given["blocks"], given["force_acceptance"]
    if minutes is not None and not resume and (given["grid"] or force or blocks):
        raise ConfigError("--minutes", minutes, "none beside --blocks, or with cells of a grid")
    if given["workload"]:
        given["workload"] = o.resolve_workload(given["workload"], out, dry_run=dry_run)
    options = _options({_SETTINGS[name]: given[name] for name in _SETTINGS})
    axes, policy = _axes(given["grid"] or [], force), given["policy"]
    settings, rules = _settings(config, options, given["set"] or [], axes)
    order = AbOrder(settings=_restarted(settings, given["restart_command"]), axes=axes,
                    policy=load_policy(str(policy) if policy else None, tuple(rules)),
                    out=out, minutes=minutes, page=page, fixed=blocks is not None,
                    resume=resume, as_json=as_json)  # fmt: skip
    raise typer.Exit(run(order, dry_run=dry_run))


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted name from those options that are given."""
    from foretoken.lab.measure.experiment import arm_of

    read: dict[str, Callable[[str], Any]] = {
        "load": o.parse_load,
        "workload.temperatures": lambda text: o.parse_numbers(text, "--temperatures"),
        "slo": o.parse_levels,
        "baseline": lambda text: arm_of(text, "off"),
        "candidate": lambda text: arm_of(text, "on"),
    }
    return {
        name: read[name](value) if name in read else value
        for name, value in given.items()
        if value not in (None, False)
    }


def _axes(grid: list[str], force: str | None) -> dict[str, list[Any]]:
    """The axes of `--grid`, and that of forced acceptance, which turns fastest."""
    from foretoken.lab.measure.grid import FORCED

    axes = o.parse_grid(grid)
    return axes if force is None else {**axes, FORCED: o.parse_numbers(force, "--force-acceptance")}


def _settings(
    file: Path | None, options: dict[str, Any], given: list[str], axes: Mapping[str, Sequence[Any]]
) -> "tuple[AbConfig, list[str]]":
    """The settings of the measurement, and those of `--set` that are rules of the policy. Raises
    ConfigError: something in them is wrong, or there is one server where two are needed."""
    from foretoken.lab.decide.rules import RULES
    from foretoken.lab.measure.experiment import AbConfig, load_settings
    from foretoken.lab.measure.grid import FORCED, apply, cells_of

    rules = [change for change in given if change.split("=")[0].split(".")[0] in RULES]
    changes = [change for change in given if change not in rules]
    try:
        found = load_settings(AbConfig, file, changes, {} if axes else ENOUGH, options)
        if not found.compared:
            found = load_settings(AbConfig, file, changes, {}, options)
    except ConfigError as error:
        name = error.field.removeprefix("settings.").removesuffix(".file")
        if name != "workload" or error.given is not None:
            raise
        raise ConfigError("--workload", None, "a file of prompts or a trace, or demo") from error
    if axes or rules:
        found.require_two()
    if rules and FORCED in axes:
        raise ConfigError("--set", rules[0], "no rule: forced acceptance gets no verdict")
    for values in cells_of(axes) if axes else ():
        apply(found, values)
    return found, rules


def _restarted(settings: "AbConfig", command: str | None) -> "AbConfig":
    """The settings with `--restart-command` for every server that is given as a URL. Raises
    ConfigError: there is none."""
    if command is None:
        return settings
    arms = {"baseline": settings.baseline, "candidate": settings.candidate}
    changed: dict[str, Any] = {
        name: replace(arm, restart_command=command)
        for name, arm in arms.items()
        if arm is not None and arm.url is not None
    }
    if not changed:
        allowed = "none beside commands with {port}, which are started anew for every block"
        raise ConfigError("--restart-command", command, allowed)
    return replace(settings, **changed)
