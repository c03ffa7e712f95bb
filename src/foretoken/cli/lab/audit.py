"""`foretoken lab audit`: options and printing of the checks of a server's answers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab import options as o
from foretoken.cli.lab.options import OptionHelp, parameters_of
from foretoken.cli.options import with_parameters
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.audit.judging import CheckResult
    from foretoken.lab.audit.run import Audited, AuditPlan
    from foretoken.lab.measure.experiment import ArmConfig

EXIT_FAULT, EXIT_TOO_LITTLE = 1, 4
_STYLES = {"ok": "green", "fault": "bold red", "both": "yellow", "open": "yellow", "unasked": "dim"}
_ROWS = {
    "baseline": OptionHelp("The same without speculation; not needed for `foretoken serve`."),
    "workload": OptionHelp("A file of prompts or a trace; `demo`: held-out Python."),
    "prompts": OptionHelp("Prompts of each check; default 32.", int, least=1),
    "max_tokens": OptionHelp("Length of every output.", int, least=1),
    "samples": OptionHelp("Draws of a prompt for `sampling`; default 200.", int, least=1),
    "parameters": OptionHelp(
        'A set of parameters for `sampling`, such as {"top_p": 0.9}; several times.',
        list[str],
        "JSON",
    ),
    "temperature": OptionHelp("Of drawn copies, 0.01 to 1; default 0.7.", float),
    "minutes": OptionHelp("For `load`, `depths`, `zero` and `drift`; default 1.", float),
    "depths": OptionHelp("Draft lengths for `depths`; default 1,2,3,4,5,6,7.", metavar="LIST"),
    "only": OptionHelp("Checks to make, such as stops,tools.", metavar="LIST"),
    "method": OptionHelp("What drafts, such as eagle3:ORG/NAME; a command tells it by itself."),
    "card": OptionHelp("The device, for the page."),
    "submit": OptionHelp("Add a row to this Markdown table of audits.", Path, "FILE"),
}


@with_parameters(parameters_of(_ROWS))
def audit(
    candidate: Annotated[
        str,
        typer.Argument(
            metavar="SERVER",
            help="A URL, or a command with {port}, and {k} where the draft length stands.",
        ),
    ],
    *,
    out: o.OutOption = Path("lab-audit"),
    dry_run: o.DryRunOption = False,
    as_json: o.JsonOption = False,
    **given: Any,
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

    plan, baseline, submit = _plan(given), given["baseline"], given["submit"]
    workload = o.resolve_workload(given["workload"] or "demo", out, dry_run=dry_run)
    config = AuditConfig(
        candidate=_arm(candidate, "on", "SERVER"),
        baseline=None if baseline is None else _arm(baseline, "off", "--baseline"),
        workload=WorkloadConfig(file=workload),
        plan=plan,
        card=given["card"] or "",
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


def _plan(given: Mapping[str, Any]) -> "AuditPlan":
    """What is given, and the defaults of the rest."""
    from foretoken.lab.audit.run import AuditPlan

    names = ("prompts", "max_tokens", "samples", "parameters", "temperature", "minutes", "depths",
             "only")  # fmt: skip
    told = {name: given[name] for name in names} | {"drafter": given["method"]}
    read: dict[str, Callable[[Any], Any]] = {
        "parameters": lambda texts: tuple(map(_parameters, texts)),
        "depths": _lengths,
        "only": _words,
    }
    return AuditPlan(**{
        name: read[name](value) if name in read else value
        for name, value in told.items() if value not in (None, [])
    })  # fmt: skip


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _lengths(text: str) -> tuple[int, ...]:
    """Draft lengths. Raises ConfigError: it is no list of such."""
    words = _words(text)
    if not words or not all(word.isdigit() and 1 <= int(word) <= 64 for word in words):
        raise ConfigError("--depths", text, "lengths from 1 to 64, such as 3,4,5")
    return tuple(map(int, words))


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
