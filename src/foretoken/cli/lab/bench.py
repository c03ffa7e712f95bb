"""`foretoken lab bench`: load against one server."""

import json
from typing import Annotated

import typer

from foretoken.cli.lab.options import Measuring, measuring, show_plan
from foretoken.errors import ConfigError


@measuring("lab-bench")
def bench(
    shared: Measuring,
    server: Annotated[
        str | None, typer.Option(help="A URL, or a command with {port} to start.")
    ] = None,
    read: Annotated[
        str | None, typer.Option("--read", hidden=True, help="Of an earlier version.")
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
        allowed = "another option: `python examples/read_load_generator.py FILE`, in the sources"
        raise ConfigError("--read", read, allowed)
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
