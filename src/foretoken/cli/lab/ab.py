"""`foretoken lab ab`: two arms under the same traffic."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab.options import (
    BaselineOption,
    CandidateOption,
    Measuring,
    arms_of,
    measuring,
    parse_prices,
    show_plan,
    tell_if_no_report,
)
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.cli.lab.live_view import LiveView
    from foretoken.lab.decide.decision import Decision
    from foretoken.lab.measure.experiment import AbConfig
    from foretoken.lab.records.results import AbSummary

ENOUGH = {"sizes": {"blocks": 9, "requests_per_block": 120}}
"""Unless told otherwise: starts enough to compare, and requests enough for a P95."""
RestartOption = Annotated[
    str | None,
    typer.Option(
        metavar="SHELL",
        help="Restarts a server given as a URL before each of its blocks; {arm} is off or on.",
    ),
]
PolicyOption = Annotated[
    Path | None, typer.Option(help="Of --until-decided; default: as `decide`.")
]
MinutesOption = Annotated[
    float | None,
    typer.Option(help="As much as fits into so many; 10 give a first answer.", min=0.1),
]


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
    policy: PolicyOption = None,
    restart_command: RestartOption = None,
    minutes: MinutesOption = None,
) -> None:
    """Compare two servers, or two settings of one, under the same prompts and arrivals.

    Blocks alternate; a server given as a command starts anew for each. One given as a URL is one
    start, whose luck widens all intervals, unless --restart-command restarts it: such as 'docker
    restart vllm-{arm}'. Unless told otherwise 9 blocks of 120 requests. Says how long it takes
    before it begins. Judge the result with `foretoken lab decide`, whose --set RULE.KEY=VALUE
    --until-decided takes too. Exit code 0: measured; 1: an arm answered nothing; 2: wrong settings;
    5: no server. With --until-decided the last line is the verdict, and the exit code is that of
    `decide`: 0: USE IT; 1: LEAVE IT OFF; 4: MEASURE MORE.
    """
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import console, print_ab
    from foretoken.lab.measure.ab import plan_ab, run_ab
    from foretoken.lab.measure.bench import load_items
    from foretoken.lab.measure.experiment import AbConfig

    changes = [*arms_of(baseline, candidate), *_more(price, diagnose=diagnose)]
    changes += _restarts((baseline, candidate), restart_command)
    shared, rules = split_rules(shared, until_decided=until_decided)
    settings = shared.settings(AbConfig, changes, ENOUGH)
    if shared.dry_run:
        show_plan(plan_ab(settings, load_items(settings.workload)[0]), shared.as_json)
        _say_time(settings, shared)
        return
    tell_if_no_report()
    settings = _timed(settings, shared, minutes)
    with live_view() as watch:
        decision = None
        if until_decided:
            summary, decision = _until_decided(
                settings, shared, watch, (policy, most_minutes, rules)
            )
        else:
            watch.expect(settings.sizes.blocks, shared.out, 2)
            summary = run_ab(settings, shared.out, resume=shared.resume, watch=watch)
    print_ab(console(), summary)
    if shared.as_json:
        print(json.dumps(_document(summary, decision)))
    raise typer.Exit(_exit_code(summary, decision))


def _document(summary: "AbSummary", decision: "Decision | None") -> dict[str, Any]:
    """What --json prints: the measurement, and with --until-decided what was decided."""
    from foretoken.lab.plain import to_plain

    found: dict[str, Any] = to_plain(summary)
    if decision is None:
        return found
    found |= {"verdict": decision.verdict, "sentence": decision.sentence}
    return {**found, "decision": to_plain(decision), "exit_code": decision.conclusion.exit_code}


def _exit_code(summary: "AbSummary", decision: "Decision | None") -> int:
    """That of the verdict, which is said last; without one, whether there is anything to judge."""
    from foretoken.cli.lab.run_tables import console

    if decision is None:
        return int(any(arm.num_errors == arm.num_requests for arm in summary.arms))
    found = decision.conclusion
    console().print(found.sentence, style=f"bold {found.colour}", soft_wrap=True, markup=False)
    return found.exit_code


def _said(decision: "Decision") -> str:
    return f"{decision.verdict} after {decision.num_blocks} blocks: {decision.sentence}"


def _more(price: str | None, *, diagnose: bool) -> list[str]:
    """The command's own options as `--set` would say them."""
    changes = ["diagnose=true"] if diagnose else []
    if price is not None:
        changes.append(f"price_per_hour={json.dumps(parse_prices(price))}")
    return changes


def _restarts(arms: tuple[str | None, str | None], command: str | None) -> list[str]:
    """`--restart-command` as `--set` would say it, for every arm that is a URL or in the file.

    Raises:
        ConfigError: both arms are commands, which are started anew anyway.
    """
    if command is None:
        return []
    given = zip(("baseline", "candidate"), arms, strict=True)
    names = [name for name, text in given if text is None or text.startswith("http")]
    if not names:
        allowed = "none beside two commands with {port}, which are started anew for every block"
        raise ConfigError("--restart-command", command, allowed)
    return [f"{name}.restart_command={json.dumps(command)}" for name in names]


def split_rules(shared: Measuring, *, until_decided: bool) -> tuple[Measuring, tuple[str, ...]]:
    """`--set` of the measurement, and those of the policy, told apart by the name of a rule.

    Raises:
        ConfigError: there are some of the policy, and nothing is decided.
    """
    from foretoken.lab.decide.rules import RULE_KINDS

    def is_rule(change: str) -> bool:
        return change.split("=")[0].split(".")[0] in RULE_KINDS

    rules = tuple(change for change in shared.setting if is_rule(change))
    if rules and not until_decided:
        allowed = "with --until-decided, or of `foretoken lab decide` after it"
        raise ConfigError("--set", rules[0], f"a setting of the measurement; rules: {allowed}")
    return replace(shared, setting=tuple(c for c in shared.setting if not is_rule(c))), rules


def _timed(settings: "AbConfig", shared: Measuring, minutes: float | None) -> "AbConfig":
    """Ask each server once, say how long it will take, and with `minutes` measure what fits."""
    from foretoken.cli.lab.run_tables import console
    from foretoken.lab.measure.bench import load_items
    from foretoken.lab.measure.estimate import announce, fit_into, probe
    from foretoken.lab.measure.segments import require_new

    if shared.resume:
        return settings
    require_new(shared.out)
    paces = probe(settings, load_items(settings.workload)[0], shared.out / "logs")
    if minutes is not None:
        settings = fit_into(settings, paces, 60 * minutes)
    console().print(announce(settings, paces), soft_wrap=True)
    return settings


def _say_time(settings: "AbConfig", shared: Measuring) -> None:
    """The estimate of `--dry-run`: servers that run already are asked, none is started."""
    from foretoken.cli.lab.run_tables import console
    from foretoken.errors import EndpointError
    from foretoken.lab.measure.bench import load_items
    from foretoken.lab.measure.estimate import announce, probe, without_asking

    text = without_asking(settings)
    if not (settings.baseline.starts_anew or settings.candidate.starts_anew):
        try:
            paces = probe(settings, load_items(settings.workload)[0], shared.out / "logs")
            text = announce(settings, paces)
        except EndpointError as error:
            text += f" ({error})"
    console().print(text, soft_wrap=True)


def _until_decided(
    settings: "AbConfig",
    shared: Measuring,
    watch: "LiveView",
    given: tuple[Path | None, float, tuple[str, ...]],
) -> "tuple[AbSummary, Decision]":
    """What was measured, and the verdict on it; those before it are said as they come."""
    from foretoken.lab.decide.decision import Decision
    from foretoken.lab.decide.ship_policy import load_policy
    from foretoken.lab.decide.until import UntilLimits, run_until_decided

    policy = load_policy(str(given[0]) if given[0] else None, given[2])
    decisions: list[Decision] = []

    def tell(blocks: int, decision: Decision | None) -> None:
        if decisions:
            watch.say(_said(decisions[-1]))
        decisions.extend([decision] if decision is not None else [])
        watch.expect(blocks, shared.out, 2)

    limits = UntilLimits(most_s=60 * given[1], tell=tell)
    summary = run_until_decided(
        settings, shared.out, policy, limits, resume=shared.resume, watch=watch
    )
    return summary, decisions[-1]
