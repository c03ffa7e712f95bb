"""`foretoken lab ab`: two servers under the same traffic, or one; a grid of them; and a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab import options as o
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.measure.experiment import AbConfig

ENOUGH = {"sizes": {"blocks": 9, "requests_per_block": 120}}
"""Of a comparison, unless told otherwise: starts enough to compare, requests enough for a P95."""


ConfigArgument = Annotated[
    Path | None, typer.Argument(help="Settings as YAML; options override them.")
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
StrictOption = Annotated[
    bool, typer.Option("--strict", help="A broken line of the workload is an error.")
]
LoadOption = Annotated[
    str | None,
    typer.Option(
        metavar="LOAD",
        help="closed:N in flight; constant:R, poisson:R, gamma:R:B requests/s, in bursts below "
        "B = 1; trace[:SPEED].",
    ),
]
GridOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUES",
        help="Compare in every cell: temperature=0,0.8, concurrency=1,8, k=1,3,5; several times.",
    ),
]
ForceOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Chances of a draft token, such as 0,0.3,0.6,0.9: which acceptance breaks even?",
    ),
]
BlocksOption = Annotated[
    int | None, typer.Option(help="Exactly so many starts of each server.", min=1)
]
MinutesOption = Annotated[
    float | None,
    typer.Option(help="As much as fits into so many; 10 give a first answer.", min=0.1),
]
TemperatureOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Such as 0,0.4,0.8; dealt out in turn.")
]
SloOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Service levels, such as ttft=0.2,tpot=0.05.")
]
PriceOption = Annotated[
    str | None, typer.Option(help="Of an hour of a server: 2.5, or off=2.5,on=3; gives costs.")
]
DiagnoseOption = Annotated[
    bool, typer.Option("--diagnose", help="Run every class alone too, to explain a P99 loss.")
]
RestartOption = Annotated[
    str | None,
    typer.Option(
        metavar="SHELL",
        help="Restarts a server given as a URL before each of its blocks; {arm} is off or on.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting, such as load.concurrency=8, or rule, such as speedup.least=1.15.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the run that is in the folder.")
]


def ab(
    config: ConfigArgument = None,
    baseline: BaselineOption = None,
    candidate: CandidateOption = None,
    workload: o.WorkloadOption = None,
    strict: StrictOption = False,
    load: LoadOption = None,
    grid: GridOption = None,
    force_acceptance: ForceOption = None,
    blocks: BlocksOption = None,
    requests: Annotated[int | None, typer.Option(help="Requests per block.", min=1)] = None,
    minutes: MinutesOption = None,
    max_tokens: o.TokensOption = None,
    temperatures: TemperatureOption = None,
    slo: SloOption = None,
    price: PriceOption = None,
    diagnose: DiagnoseOption = False,
    restart_command: RestartOption = None,
    policy: Annotated[Path | None, typer.Option(help="Rules, as in `decide`.")] = None,
    setting: SetOption = None,
    out: o.OutOption = Path("lab-ab"),
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page of plots.")] = True,
    resume: ResumeOption = False,
    dry_run: o.DryRunOption = False,
    as_json: o.JsonOption = False,
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

    if minutes is not None and not resume and (grid or force_acceptance or blocks):
        raise ConfigError("--minutes", minutes, "none beside --blocks, or with cells of a grid")
    options = _options({
        "workload.file": workload and o.resolve_workload(workload, out, dry_run=dry_run),
        "workload.strict": strict or None, "load": load, "sizes.blocks": blocks,
        "sizes.requests_per_block": requests, "workload.max_tokens": max_tokens,
        "workload.temperatures": temperatures, "slo": slo, "baseline": baseline,
        "candidate": candidate, "diagnose": diagnose or None, "price_per_hour": price,
    })  # fmt: skip
    axes = _axes(grid or [], force_acceptance)
    settings, rules = _settings(config, options, setting or [], axes)
    order = AbOrder(settings=_restarted(settings, restart_command), axes=axes,
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
        "price_per_hour": o.parse_prices,
    }
    return {
        name: read[name](value) if name in read else value
        for name, value in given.items()
        if value is not None
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
