"""`foretoken lab bench`: load against one server, or the results of another load generator."""

import json
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.lab.options import Measuring, measuring, show_plan


@measuring("lab-bench")
def bench(
    shared: Measuring,
    server: Annotated[
        str | None, typer.Option(help="A URL, or a command with {port} to start.")
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--read", help="AIPerf's profile_export.jsonl or guidellm's JSON instead."),
    ] = None,
) -> None:
    """Measure one server under load: latencies, throughput, goodput, acceptance.

    Exit code 0: measured; 1: every request failed; 2: wrong settings; 5: no server.
    """
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import console, print_arms
    from foretoken.lab.measure.bench import load_items, plan_run, run_bench
    from foretoken.lab.measure.experiment import RunConfig, arm_of
    from foretoken.lab.plain import to_plain

    if read is not None:
        _refuse_beside_read(shared, server)
        _read_instead(read, shared)
        return
    arm_text = [] if server is None else [f"arm={json.dumps(arm_of(server, 'server'))}"]
    settings = shared.settings(RunConfig, arm_text)
    if shared.dry_run:
        show_plan(plan_run(settings, load_items(settings.workload)[0]), shared.as_json)
        return
    with live_view() as watch:
        watch.expect(settings.sizes.blocks, shared.out, 1)
        summary = run_bench(settings, shared.out, resume=shared.resume, watch=watch)
    print_arms(console(), (summary.arm,))
    if shared.as_json:
        print(json.dumps(to_plain(summary)))
    arm = summary.arm
    raise typer.Exit(1 if arm.num_requests and arm.num_errors == arm.num_requests else 0)


def _refuse_beside_read(shared: Measuring, server: str | None) -> None:
    """Nothing is measured, so what says how to measure would be ignored."""
    from dataclasses import asdict

    from foretoken.errors import ConfigError

    given = {**asdict(shared.short), "server": server, "config": shared.config}
    given |= {"set": shared.setting, "resume": shared.resume, "dry-run": shared.dry_run}
    for name, value in given.items():
        if value and name not in ("slo", "strict"):
            option = "CONFIG" if name == "config" else f"--{name.replace('_', '-')}"
            raise ConfigError(option, value, "nothing beside --read, which measures nothing")


def _read_instead(path: Path, shared: Measuring) -> None:
    """The summary of what another load generator measured."""
    from foretoken.cli.lab.options import parse_levels
    from foretoken.cli.lab.run_tables import console, print_arms
    from foretoken.lab.measure.experiment import ServiceLevels
    from foretoken.lab.plain import to_plain
    from foretoken.lab.records.other_tools import (
        read_other_tool,
        summarize_imported,
        write_imported,
    )

    levels = ServiceLevels(**parse_levels(shared.short.slo)) if shared.short.slo else None
    found = read_other_tool(path, "server", strict=shared.short.strict)
    summary = summarize_imported(found, path, levels)
    write_imported(found, summary, shared.out)
    print_arms(console(), (summary.arm,))
    if shared.as_json:
        print(json.dumps(to_plain(summary)))
