"""`foretoken lab verify`: options and printing of the losslessness checks of two servers."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab.options import (
    BaselineOption,
    CandidateOption,
    Measuring,
    arms_of,
    measuring,
    resolve_workload,
)

if TYPE_CHECKING:
    from foretoken.lab.measure.lossless import DistributionCheck, TextCheck, Verified, VerifyPlan

EXIT_NOTHING, EXIT_DIFFERENT = 1, 4


@measuring("lab-verify", "blocks", "requests", "load", "temperatures", "slo")
def verify(
    shared: Measuring,
    baseline: BaselineOption = None,
    candidate: CandidateOption = None,
    prompts: Annotated[
        int | None, typer.Option(help="Whose texts are compared; default 20.", min=1)
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Per prompt, arm and set of parameters; default 200.", min=1),
    ] = None,
) -> None:
    """Compare two servers' outputs: equal texts, and equal distributions when sampling.

    Without a workload it asks for held-out Python; `--set plan.parameters=` takes other sets of
    sampling parameters. Exit code 0: nothing differs; 4: outputs differ; 1: nothing could be
    compared; 2: wrong settings; 5: no server.
    """
    from foretoken.cli.lab.live_view import answers_view
    from foretoken.lab.measure.verify import VerifyConfig, run_verify
    from foretoken.lab.plain import to_plain

    defaults: dict[str, Any] = {}
    if shared.short.workload is None and shared.config is None:
        file = resolve_workload("demo", shared.out, dry_run=shared.dry_run)
        defaults["workload"] = {"file": file}
    given = {"plan.prompts": prompts, "plan.samples": samples}
    own = [f"{name}={value}" for name, value in given.items() if value is not None]
    settings = shared.settings(VerifyConfig, [*arms_of(baseline, candidate), *own], defaults)
    if shared.dry_run:
        _show_plan(settings.whole_plan, shared.as_json)
        return
    with answers_view(_show_last) as follow:
        found = run_verify(settings, shared.out, resume=shared.resume, follow=follow)
    _show(found)
    if shared.as_json:
        print(json.dumps({**to_plain(found), "lossless": found.lossless}))
    if not found.compared:
        raise typer.Exit(EXIT_NOTHING)
    raise typer.Exit(0 if found.lossless else EXIT_DIFFERENT)


def _show_plan(plan: "VerifyPlan", as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checks": [{"check": n, "answers": a} for n, a in plan.checks()]}))
        return
    for name, answers in plan.checks():
        typer.echo(f"{name}: {answers} answers", err=True)


def _show_last(found: "Verified") -> str:
    """The check that has just ended."""
    return _sampled(found.distributions[-1]) if found.distributions else _text(found.texts[-1])


def _text(check: "TextCheck") -> str:
    lines = [
        f"{check.kind}: {check.equal} of {check.compared} equal, {check.excused} at near-ties, "
        f"{check.different} different, {check.failed} without an answer"
    ]
    if check.different and not check.promised:
        lines.append("these servers do not promise the same seeded texts: no fault")
    return "\n  ".join([*lines, *check.examples])


def _sampled(check: "DistributionCheck") -> str:
    from foretoken.lab.measure.lossless import describe

    name = describe(check.parameters)
    if check.refused is not None:
        return f"{name}: not tested: {check.refused}"
    failed = f", {check.failed} without an answer" if check.failed else ""
    return (
        f"{name}: {'same' if check.passed else 'DIFFERENT'} distribution, distance "
        f"{check.distance:.3f} (chance {check.expected:.3f}), p {check.p_value:.4f}, "
        f"{check.samples} samples per arm{failed}"
    )


def _show(found: "Verified") -> None:
    """What it comes to; a test that fails only beside the others is said here too."""
    from foretoken.cli.lab.run_tables import console
    from foretoken.lab.measure.lossless import describe

    show = console()
    for check in found.distributions:
        if check.refused is None and not check.passed:
            show.print(f"differs: {describe(check.parameters)}", style="bold red")
    if not found.compared:
        show.print("nothing could be compared", style="bold red")
    else:
        show.print("lossless as far as tested" if found.lossless else "NOT LOSSLESS", style="bold")
