"""`foretoken lab ab`: two arms under the same traffic."""

import json
from pathlib import Path
from typing import Annotated

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
    TemperatureOption,
    TokensOption,
    WorkloadOption,
    show_plan,
)


def ab(
    config: ConfigArgument = None,
    baseline: Annotated[
        str | None, typer.Option(help="A URL, or a command with {port}; speculation off.")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(help="A URL, or a command with {port}; speculation on.")
    ] = None,
    out: OutOption = Path("lab-ab"),
    workload: WorkloadOption = None,
    load: LoadOption = None,
    blocks: BlocksOption = None,
    requests: RequestsOption = None,
    max_tokens: TokensOption = None,
    temperatures: TemperatureOption = None,
    slo: SloOption = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Run every class alone too, to explain a P99 loss.")
    ] = False,
    setting: SetOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two servers, or two settings of one, under the same prompts and arrivals.

    Blocks alternate; a server given as a command starts anew for each. Judge the result with
    `foretoken lab decide`. Exit code 0: measured; 1: an arm answered nothing; 2: wrong settings;
    5: no server.
    """
    from foretoken.cli.lab.progress import live_view
    from foretoken.cli.lab.tables import console, print_ab
    from foretoken.lab.ab import plan_ab, run_ab
    from foretoken.lab.bench import load_items
    from foretoken.lab.experiments import AbConfig, arm_of, load_settings
    from foretoken.lab.plain import to_plain

    short = Shortcuts(workload=workload, load=load, blocks=blocks, requests=requests,
                      max_tokens=max_tokens, temperatures=temperatures, slo=slo)  # fmt: skip
    overrides = short.overrides(out)
    for name, given, label in (("baseline", baseline, "off"), ("candidate", candidate, "on")):
        if given is not None:
            overrides.append(f"{name}={json.dumps(arm_of(given, label))}")
    if diagnose:
        overrides.append("diagnose=true")
    settings = load_settings(AbConfig, config, [*overrides, *(setting or ())])
    if dry_run:
        show_plan(plan_ab(settings, load_items(settings.workload)[0]), as_json)
        return
    with live_view() as watch:
        summary = run_ab(settings, out, resume=resume, watch=watch)
    print_ab(console(), summary)
    if as_json:
        print(json.dumps(to_plain(summary)))
    dead = any(arm.num_errors == arm.num_requests for arm in summary.arms)
    raise typer.Exit(1 if dead else 0)
