"""`foretoken lab bench`: load against one server, or the results of another load generator."""

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


def bench(
    config: ConfigArgument = None,
    server: Annotated[
        str | None, typer.Option(help="A URL, or a command with {port} to start.")
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--read", help="AIPerf's profile_export.jsonl or guidellm's JSON instead."),
    ] = None,
    out: OutOption = Path("lab-bench"),
    workload: WorkloadOption = None,
    load: LoadOption = None,
    blocks: BlocksOption = None,
    requests: RequestsOption = None,
    max_tokens: TokensOption = None,
    temperatures: TemperatureOption = None,
    slo: SloOption = None,
    setting: SetOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure one server under load: latencies, throughput, goodput, acceptance.

    Exit code 0: measured; 1: every request failed; 2: wrong settings; 5: no server.
    """
    from foretoken.cli.lab.progress import live_view
    from foretoken.cli.lab.tables import console, print_arms
    from foretoken.lab.bench import load_items, plan_run, run_bench
    from foretoken.lab.experiments import RunConfig, arm_of, load_settings
    from foretoken.lab.plain import to_plain

    if read is not None:
        _read_instead(read, out, as_json)
        return
    short = Shortcuts(workload=workload, load=load, blocks=blocks, requests=requests,
                      max_tokens=max_tokens, temperatures=temperatures, slo=slo)  # fmt: skip
    overrides = short.overrides(out)
    if server is not None:
        overrides.insert(0, f"arm={json.dumps(arm_of(server, 'server'))}")
    settings = load_settings(RunConfig, config, [*overrides, *(setting or ())])
    if dry_run:
        show_plan(plan_run(settings, load_items(settings.workload)[0]), as_json)
        return
    with live_view() as watch:
        summary = run_bench(settings, out, resume=resume, watch=watch)
    print_arms(console(), (summary.arm,))
    if as_json:
        print(json.dumps(to_plain(summary)))
    arm = summary.arm
    raise typer.Exit(1 if arm.num_requests and arm.num_errors == arm.num_requests else 0)


def _read_instead(path: Path, out: Path, as_json: bool) -> None:
    """The summary of what another load generator measured."""
    from foretoken.cli.lab.tables import console, print_arms
    from foretoken.lab.plain import to_plain
    from foretoken.lab.readers import read_foreign, summarize_foreign
    from foretoken.lab.results_io import REQUESTS, SUMMARY, LineWriter, write_json

    found = read_foreign(path, "server")
    summary = summarize_foreign(found, path)
    with LineWriter(out / REQUESTS) as writer:
        for record in found.records:
            writer.write(record)
    write_json(out / SUMMARY, summary)
    print_arms(console(), (summary.arm,))
    if as_json:
        print(json.dumps(to_plain(summary)))
