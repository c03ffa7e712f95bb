"""`foretoken lab audit`: options and printing of the checks of a server's answers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab import options as o
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.audit.judging import CheckResult
    from foretoken.lab.audit.run import Audited, AuditPlan
    from foretoken.lab.measure.experiment import ArmConfig

EXIT_FAULT, EXIT_TOO_LITTLE = 1, 4
_WORDS = {
    "ok": ("ok", "green"),
    "fault": ("FAULT", "bold red"),
    "both": ("not by speculation", "yellow"),
    "open": ("open", "yellow"),
    "unasked": ("not asked", "dim"),
}
"""How a status is said, and in which style."""
ParametersOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JSON",
        help='A set of parameters for `sampling`, such as {"top_p": 0.9}; several times.',
    ),
]


def audit(
    candidate: Annotated[
        str,
        typer.Argument(
            metavar="SERVER",
            help="A URL, or a command with {port}, and {k} where the draft length stands.",
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(help="The same without speculation; not needed for `foretoken serve`."),
    ] = None,
    workload: o.WorkloadOption = None,
    prompts: Annotated[
        int | None, typer.Option(help="Prompts of each check; default 32.", min=1)
    ] = None,
    max_tokens: o.TokensOption = None,
    samples: Annotated[
        int | None, typer.Option(help="Draws of a prompt for `sampling`; default 200.", min=1)
    ] = None,
    parameters: ParametersOption = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of drawn copies; default 0.7.", min=0.01, max=1.0)
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Of `load` and `depths`, whose sizes follow; default 1.")
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Draft lengths for `depths`; default 1,2,3,4,5,6,7."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="LIST", help="Checks to make, such as stops,tools.")
    ] = None,
    out: o.OutOption = Path("lab-audit"),
    dry_run: o.DryRunOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Check a server's answers: does speculation leave them as they are?

    Checks: greedy texts, unverified drafts, draws by set of parameters, log-probabilities,
    seeds, streams, stop strings, grammars, tool calls, prefix hits, copies of identifiers, greedy
    and drawn, usage, placeholders. Each is
    made of the server without speculation too, and what rounding explains is no fault. Exit code 0:
    no fault; 1: a fault; 4: too little could be compared; 2: wrong settings; 5: no server.
    """
    from foretoken.lab.audit.run import AuditConfig, AuditPlan, Hooks, run_audit
    from foretoken.lab.measure.workload import WorkloadConfig
    from foretoken.lab.plain import to_plain

    given: dict[str, Any] = {"prompts": prompts, "max_tokens": max_tokens, "samples": samples}
    given |= {"temperature": temperature, "minutes": minutes, "depths": _lengths(depths)}
    given["parameters"] = tuple(map(_parameters, parameters)) if parameters else None
    names = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    plan = AuditPlan(**{k: v for k, v in given.items() if v is not None}, only=names)
    config = AuditConfig(
        candidate=_arm(candidate, "on", "SERVER"),
        baseline=None if baseline is None else _arm(baseline, "off", "--baseline"),
        workload=WorkloadConfig(file=o.resolve_workload(workload or "demo", out, dry_run=dry_run)),
        plan=plan,
    )
    if dry_run:
        _show_plan(plan, as_json)
        return
    hooks = Hooks(say=lambda text: typer.echo(text, err=True), ended=_show_check)
    found = run_audit(config, out, hooks)
    _show_end(found, out)
    if as_json:
        print(json.dumps(to_plain(found)))
    too_little = EXIT_TOO_LITTLE if found.missing else 0
    raise typer.Exit(EXIT_FAULT if found.faults else too_little)


def _lengths(text: str | None) -> tuple[int, ...] | None:
    """Draft lengths. Raises ConfigError: it is no list of such."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and 1 <= int(word) <= 64 for word in words):
        raise ConfigError("--depths", text, "lengths from 1 to 64, such as 3,4,5")
    return tuple(int(word) for word in words)


def _parameters(text: str) -> dict[str, Any]:
    """A set of sampling parameters. Raises ConfigError: it is no JSON object."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        allowed = 'a JSON object, such as {"temperature": 0.7, "top_p": 0.9}'
        raise ConfigError("--parameters", text, allowed) from error


def _arm(text: str, name: str, option: str) -> "ArmConfig":
    from foretoken.lab.measure.experiment import SERVER, ArmConfig, arm_of
    from foretoken.lab.plain import from_plain

    if not text.strip():
        raise ConfigError(option, text, SERVER)
    return from_plain(ArmConfig, arm_of(text, name), f"arm {name!r}")


def _show_plan(plan: "AuditPlan", as_json: bool) -> None:
    requests, work = plan.work(compared=True)
    if as_json:
        checks = [{"check": name, "looks_at": said} for name, said in plan.sentences.items()]
        print(json.dumps({"checks": checks, "requests": requests, "as_whole_answers": work}))
        return
    for name, said in plan.sentences.items():
        typer.echo(f"{name:>13}  {said}", err=True)
    said = f"about {requests} requests, as long as {work:.0f} answers of {plan.max_tokens} tokens"
    more = (
        f"; up to {plan.minutes:g} min more of {', '.join(plan.pressing)}" if plan.pressing else ""
    )
    typer.echo(f"{said}; more if a check looks twice{more}", err=True)


def _show_check(result: "CheckResult") -> None:
    from foretoken.cli.lab.run_tables import say

    word, style = _WORDS[result.status]
    say(f"{word:>18}  {result.name}: {result.sentence}", style)
    found = [result.why] if result.status == "unasked" else _lines_of(result)
    for more in found:
        say(f"{'':>20}{more}")


def _lines_of(result: "CheckResult") -> list[str]:
    """What stands below a check's own line."""
    found = []
    bad = result.wrong + result.differs
    if bad or result.plain_wrong or result.plain_differs:
        usual = f"; without speculation {result.plain_wrong + result.plain_differs} of "
        usual = usual + str(result.plain_answers) if result.plain_answers else ""
        verb = "are wrong" if result.wrong + result.plain_wrong else "differ"
        looked_at = "sets of parameters" if result.name == "sampling" else "answers"
        found.append(f"{bad} of {result.answers} {looked_at} {verb}{usual}")
    if result.altered:
        found.append(f"{_rate(result.altered, result.identifiers)} came altered")
    if result.plain_altered:
        usual = _rate(result.plain_altered, result.plain_identifiers)
        found.append(f"without speculation {usual}")
    if result.near_ties:
        found.append(f"{result.near_ties} of {result.answers} part at near-ties: rounding")
    if result.failed:
        found.append(f"{result.failed} requests failed")
    found += [f"not asked: {why}" for why in result.untested]
    if result.status != "ok":
        found += [f"such as: {example}" for example in result.examples]
        found += [result.why] if result.why not in result.examples else []
    return found


def _rate(count: int, total: int) -> str:
    from foretoken.lab.stats.intervals import share_interval

    share = share_interval(count, total)
    between = f"{share.low:.1%} to {share.high:.1%}"
    return f"{count} of {total} identifiers ({share.estimate:.1%}, {between})"


def _show_end(found: "Audited", out: Path) -> None:
    from foretoken.cli.lab.run_tables import console

    show = console()
    took = f"{found.requests} requests in {found.seconds:.0f} s; {out}/audit.json"
    show.print(f"{found.candidate}, compared with {found.baseline}: {took}", markup=False,
               soft_wrap=True)  # fmt: skip
    for missed in found.missed:
        show.print(f"not reached: {missed}", style="yellow", markup=False, soft_wrap=True)
    if found.faults:
        show.print(f"FAULTY: {', '.join(found.faults)}", style="bold red")
    elif found.missing:
        said = f"not enough compared: {found.missing}"
        show.print(said, style="bold yellow", soft_wrap=True, markup=False)
    else:
        show.print(f"no fault in {found.num_asked} checks", style="bold green")
