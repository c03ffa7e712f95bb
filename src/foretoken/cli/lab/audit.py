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
_STYLES = {"ok": "green", "fault": "bold red", "both": "yellow", "open": "yellow", "unasked": "dim"}
ServerArgument = Annotated[
    str,
    typer.Argument(
        metavar="SERVER",
        help="A URL, or a command with {port}, and {k} where the draft length stands.",
    ),
]
BaselineOption = Annotated[
    str | None,
    typer.Option(help="The same without speculation; not needed for `foretoken serve`."),
]
PromptsOption = Annotated[
    int | None, typer.Option(help="Prompts of each check; default 32.", min=1)
]
SamplesOption = Annotated[
    int | None, typer.Option(help="Draws of a prompt for `sampling`; default 200.", min=1)
]
ParametersOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JSON",
        help='A set of parameters for `sampling`, such as {"top_p": 0.9}; several times.',
    ),
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="Of drawn copies; default 0.7.", min=0.01, max=1.0)
]
MinutesOption = Annotated[
    float | None, typer.Option(help="For `load`, `depths`, `zero` and `drift`; default 1.")
]
DepthsOption = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Draft lengths for `depths`; default 1,2,3,4,5,6,7."),
]
OnlyOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Checks to make, such as stops,tools.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(help="What drafts, such as eagle3:ORG/NAME; a command tells it by itself."),
]
SubmitOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Add a row to this Markdown table of audits."),
]


def audit(
    candidate: ServerArgument,
    baseline: BaselineOption = None,
    workload: o.WorkloadOption = None,
    prompts: PromptsOption = None,
    max_tokens: o.TokensOption = None,
    samples: SamplesOption = None,
    parameters: ParametersOption = None,
    temperature: TemperatureOption = None,
    minutes: MinutesOption = None,
    depths: DepthsOption = None,
    only: OnlyOption = None,
    method: MethodOption = None,
    card: Annotated[str | None, typer.Option(help="The device, for the page.")] = None,
    submit: SubmitOption = None,
    out: o.OutOption = Path("lab-audit"),
    dry_run: o.DryRunOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Check a server's answers: does speculation leave them as they are?

    Greedy texts, unverified drafts, draws by set of parameters, log-probabilities, seeds, streams,
    stop strings, grammars, tool calls, prefix hits, copies of identifiers (greedy and drawn), usage
    and placeholders; then, as far as the minutes go, the same at 12 to 64 in flight, every draft
    length, stretches of acceptance at 0 or 1, and drift with the context. All is asked of the
    server without speculation too; what rounding explains is no fault. Exit code 0: no fault; 1: a
    fault; 4: too little could be compared; 2: wrong settings; 5: no server.
    """
    from foretoken.lab.audit.page import check_table, write_page
    from foretoken.lab.audit.page import submit as submit_row
    from foretoken.lab.audit.run import AuditConfig, Hooks, run_audit
    from foretoken.lab.measure.workload import WorkloadConfig
    from foretoken.lab.plain import to_plain

    sets = tuple(map(_parameters, parameters)) if parameters else None
    plan = _plan(prompts=prompts, max_tokens=max_tokens, samples=samples, parameters=sets,
                 temperature=temperature, minutes=minutes, depths=_lengths(depths),
                 only=_words(only), drafter=method)  # fmt: skip
    config = AuditConfig(
        candidate=_arm(candidate, "on", "SERVER"),
        baseline=None if baseline is None else _arm(baseline, "off", "--baseline"),
        workload=WorkloadConfig(file=o.resolve_workload(workload or "demo", out, dry_run=dry_run)),
        plan=plan,
        card=card or "",
    )
    if submit is not None:
        check_table(submit)
    if dry_run:
        _show_plan(plan, as_json)
        return
    hooks = Hooks(say=lambda text: typer.echo(text, err=True), ended=_show_check)
    found = run_audit(config, out, hooks)
    write_page(found, out)
    _show_end(found, out)
    if submit is not None:
        submit_row(found, submit)
    if as_json:
        print(json.dumps(to_plain(found)))
    too_little = EXIT_TOO_LITTLE if found.missing else 0
    raise typer.Exit(EXIT_FAULT if found.faults else too_little)


def _plan(**given: Any) -> "AuditPlan":
    """What is given, and the defaults of the rest."""
    from foretoken.lab.audit.run import AuditPlan

    return AuditPlan(**{name: value for name, value in given.items() if value is not None})


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _lengths(text: str | None) -> tuple[int, ...] | None:
    """Draft lengths. Raises ConfigError: it is no list of such."""
    if text is None:
        return None
    words = _words(text)
    if not words or not all(word.isdigit() and 1 <= int(word) <= 64 for word in words):
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
    from foretoken.lab.audit.page import STATUS, lines_of

    say(f"{STATUS[result.status]:>18}  {result.name}: {result.sentence}", _STYLES[result.status])
    for more in lines_of(result):
        say(f"{'':>20}{more}")


def _show_end(found: "Audited", out: Path) -> None:
    from foretoken.cli.lab.run_tables import console
    from foretoken.lab.audit.page import PAGE, verdict_of

    show = console()
    took = f"{found.requests} requests in {found.seconds:.0f} s; {out}/{PAGE}, audit.json"
    who = f"{found.engine} at {found.url}, compared with {found.baseline}"
    show.print(f"{who}: {took}", markup=False, soft_wrap=True)
    for missed in found.missed:
        show.print(f"not reached: {missed}", style="yellow", markup=False, soft_wrap=True)
    style = "bold red" if found.faults else "bold yellow" if found.missing else "bold green"
    show.print(verdict_of(found), style=style, soft_wrap=True, markup=False)
