"""`foretoken lab ab`: two arms under the same traffic."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.lab.options import (
    BaselineOption,
    CandidateOption,
    Measuring,
    arms_of,
    measuring,
    parse_prices,
    show_plan,
)

if TYPE_CHECKING:
    from foretoken.cli.lab.live_view import LiveView
    from foretoken.lab.measure.experiment import AbConfig
    from foretoken.lab.records.results import AbSummary

ENOUGH = {"sizes": {"blocks": 9, "requests_per_block": 120}}
"""Unless told otherwise: the thousand requests that a P99 takes, and starts enough to compare."""


@measuring("lab-ab")
def ab(
    shared: Measuring,
    baseline: BaselineOption = None,
    candidate: CandidateOption = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Run every class alone too, to explain a P99 loss.")
    ] = False,
    price: Annotated[
        str | None,
        typer.Option(help="Of an hour of a server: 2.5, or off=2.5,on=3; gives costs."),
    ] = None,
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="Add blocks until `decide` knows.")
    ] = False,
    most_minutes: Annotated[
        float, typer.Option(help="Of --until-decided; what is measured stays.", min=0)
    ] = 30.0,
    policy: Annotated[
        Path | None, typer.Option(help="Of --until-decided; default: as `decide`.")
    ] = None,
) -> None:
    """Compare two servers, or two settings of one, under the same prompts and arrivals.

    Blocks alternate; a server given as a command starts anew for each. Unless told otherwise 9
    blocks of 120 requests: a P99 takes a thousand. Judge the result with `foretoken lab decide`.
    Exit code 0: measured; 1: an arm answered nothing; 2: wrong settings; 5: no server.
    """
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import console, print_ab
    from foretoken.lab.measure.ab import plan_ab, run_ab
    from foretoken.lab.measure.bench import load_items
    from foretoken.lab.measure.experiment import AbConfig
    from foretoken.lab.plain import to_plain

    arms = arms_of(baseline, candidate)
    if diagnose:
        arms.append("diagnose=true")
    if price is not None:
        arms.append(f"price_per_hour={json.dumps(parse_prices(price))}")
    settings = shared.settings(AbConfig, arms, ENOUGH)
    if shared.dry_run:
        show_plan(plan_ab(settings, load_items(settings.workload)[0]), shared.as_json)
        return
    with live_view() as watch:
        if until_decided:
            summary = _until_decided(settings, shared, watch, (policy, most_minutes))
        else:
            watch.expect(settings.sizes.blocks, shared.out, 2)
            summary = run_ab(settings, shared.out, resume=shared.resume, watch=watch)
    print_ab(console(), summary)
    if shared.as_json:
        print(json.dumps(to_plain(summary)))
    dead = any(arm.num_errors == arm.num_requests for arm in summary.arms)
    raise typer.Exit(1 if dead else 0)


def _until_decided(
    settings: "AbConfig", shared: Measuring, watch: "LiveView", given: tuple[Path | None, float]
) -> "AbSummary":
    from foretoken.lab.decide.ship_policy import load_policy
    from foretoken.lab.decide.until import UntilLimits, run_until_decided
    from foretoken.lab.decide.verdict import Decision

    policy = load_policy(str(given[0]) if given[0] else None)

    def tell(blocks: int, decision: Decision | None) -> None:
        if decision is not None:
            watch.say(f"{decision.verdict} after {decision.num_blocks} blocks: {decision.sentence}")
        watch.expect(blocks, shared.out, 2)

    limits = UntilLimits(most_s=60 * given[1], tell=tell)
    return run_until_decided(
        settings, shared.out, policy, limits, resume=shared.resume, watch=watch
    )
