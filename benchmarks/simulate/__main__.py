"""`python -m benchmarks.simulate`: what control would do on a machine that is not at hand."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.simulate.arms import ControlArm, FixedArm, ScheduledArm, SimulatedArm
from benchmarks.simulate.compare import compare
from benchmarks.simulate.machine import SimulatedMachine, machine_of_costs, planned_machine
from benchmarks.simulate.serving import ServingLimits, SimulatedRun
from benchmarks.simulate.serving import simulate as run
from benchmarks.simulate.traffic import DraftChance, RequestClass, Traffic, recorded_requests
from foretoken.cli.lab.options import JsonOption, parse_whole
from foretoken.cli.lab.run_tables import console
from foretoken.config.speculative import LoadConfig, Schedule
from foretoken.errors import ConfigError, ForetokenError
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings

_ANSWERS, _FEWEST = 5, 24
"""Answers for each client, and the fewest of all."""


def simulate(
    target: Annotated[
        str | None, typer.Argument(help="The model to serve, as in `foretoken lab plan`.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The draft model.")] = None,
    method: Annotated[str | None, typer.Option(help="Of drafting, as in `lab plan`.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Of the target.")] = None,
    device: Annotated[str | None, typer.Option(help="A device of the table, or `this`.")] = None,
    count: Annotated[int | None, typer.Option(help="How many devices.")] = None,
    k: Annotated[int | None, typer.Option("-k", help="Most drafts per verification.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="RANGES", help="Drafts by batch size too: [[1,16,5],[17,4096,0]]."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Costs that an engine kept, in place of a target.")
    ] = None,
    clients: Annotated[str, typer.Option(help="Requests in flight, between commas.")] = "1,8,64",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 300,
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 200,
    chance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="That a draft is right if those before are.")
    ] = 0.7,
    workload: Annotated[
        Path | None, typer.Option(help="Arrivals and lengths of `lab record`, not clients.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, drafts and noise.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Serve on a virtual clock: no drafts, fixed lengths, and control, by the real scheduler.

    With --schedule also lengths by running requests: [first, last, drafts], as in
    num_speculative_tokens_per_batch_size. Steps take what the data sheet of a device says, or what
    an engine learnt. Exit code 0: simulated; 2 and 3: wrong settings or an unknown model.
    """
    given = {
        "target": target, "draft": draft, "method": method, "quantization": quantization,
        "device": device, "count": count, "num_speculative_tokens": k,
    }  # fmt: skip
    machine = _machine({key: value for key, value in given.items() if value is not None}, costs)
    most = max((one.max_drafts for one in machine.drafters), default=0)
    lengths = sorted({0, min(1, most), most // 2, most})
    arms: list[SimulatedArm] = [*(FixedArm(length) for length in lengths), ControlArm()]
    if schedule is not None:
        arms.append(ScheduledArm(_ranges(schedule)))
    seats = parse_whole(clients, "--clients")
    limits = ServingLimits(max_num_seqs=max(seats), num_pages=1 << 16, max_num_batched_tokens=8192)
    found = []
    for traffic in _traffics((prompt, output, chance), seats, workload, machine, seed):
        runs = [run(machine, arm, traffic, limits, seed=seed) for arm in arms]
        found += _rows(traffic, runs)
    if as_json:
        print(json.dumps({"runs": found}))
    else:
        _show(found)


def _ranges(text: str) -> Schedule:
    try:
        given = json.loads(text)
    except ValueError as error:
        allowed = "JSON: [[first, last, drafts], ...], such as [[1,16,5],[17,4096,0]]"
        raise ConfigError("--schedule", text, allowed) from error
    # An empty one would mean that there is none, where one was asked for.
    read = LoadConfig(num_speculative_tokens_per_batch_size=given or ())
    return read.num_speculative_tokens_per_batch_size or ()


def _machine(given: dict[str, Any], costs: Path | None) -> SimulatedMachine:
    if costs is None:
        settings = PlanSettings.from_mapping({"engine": "foretoken", **given})
        # Whatever engine has it: ours shares no model among GPUs, and its control is what is asked.
        findings = build_plan(PlanSettings.from_mapping(given)).findings
        if found := next((one for one in findings if one.level == "error"), None):
            allowed = f"models that load there: {found.message} ({found.remedy})"
            raise ConfigError("--device", f"{settings.count} x {settings.device}", allowed)
        return planned_machine(settings)
    if given:
        raise ConfigError("--costs", str(costs), "no target or device beside it")
    return machine_of_costs(costs)


def _traffics(
    kind: tuple[int, int, float],
    seats: list[int],
    workload: Path | None,
    machine: SimulatedMachine,
    seed: int,
) -> list[Traffic]:
    prompt, output, chance = kind
    chances = {one.name: DraftChance(chance=chance, spread=0.5) for one in machine.drafters}
    classes = (RequestClass(prompt=prompt, output=output, chances=chances),)
    if workload is not None:
        recorded = recorded_requests(workload)
        return [Traffic(classes=classes, requests=len(recorded), recorded=recorded, seed=seed)]
    return [
        Traffic(classes=classes, requests=max(_ANSWERS * n, _FEWEST), clients=n, seed=seed)
        for n in seats
    ]


def _rows(traffic: Traffic, runs: list[SimulatedRun]) -> list[dict[str, Any]]:
    first = 0 if traffic.recorded else traffic.in_flight(0.0)
    return [
        {
            "clients": None if traffic.recorded else first,
            "arm": one.arm,
            "tokens_per_s": one.tokens_per_s,
            "drafting": one.drafting,
            **asdict(compare(one, runs[0], skip=first)),
        }
        for one in runs
    ]


def _show(found: list[dict[str, Any]]) -> None:
    table = Table(
        "clients", "arm", "tokens/s", "speed-up", "TPOT P50", "TPOT P99", "TTFT P50", "TTFT P99",
        "steps that draft",
    )  # fmt: skip
    for one in found:
        ratios = ("throughput", "tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99")
        table.add_row(
            "recorded" if one["clients"] is None else str(one["clients"]), one["arm"],
            f"{one['tokens_per_s']:.0f}", *(f"{one[name]:.2f}" for name in ratios),
            f"{one['drafting']:.0%}",
        )  # fmt: skip
    console().print(table)


if __name__ == "__main__":
    try:
        typer.run(simulate)
    except ForetokenError as error:
        sys.exit(str(error))
