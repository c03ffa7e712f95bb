"""Runs every check over everything that a text holds."""

from collections.abc import Iterator

from foretoken.lab.findings import Finding
from foretoken.lab.lint.launches import Launch, LintSource
from foretoken.lab.lint.names import NAME_CHECKS
from foretoken.lab.lint.other_servers import OTHER_CHECKS, speculates
from foretoken.lab.lint.pairs import PAIR_CHECKS, Machine, check_pair
from foretoken.lab.lint.traffic import METRIC_CHECK, REFUSED_CHECK, check_metrics, check_requests
from foretoken.lab.lint.vllm import VLLM_CHECKS

LAUNCH_CHECKS = (*NAME_CHECKS, *VLLM_CHECKS, *OTHER_CHECKS)
TRAFFIC_CHECKS = (REFUSED_CHECK, METRIC_CHECK)
"""Checks that look at requests and dashboards."""
NAMES = (*(check.name for check in LAUNCH_CHECKS), *TRAFFIC_CHECKS, *PAIR_CHECKS)


def lint(source: LintSource, machine: Machine, engine: str = "auto") -> tuple[Finding, ...]:
    """Every finding, launches first.

    Requests are judged by `engine`, or by that of the first launch, or by vLLM's rules.
    """
    found = [finding for launch in source.launches for finding in _launch(launch, machine)]
    serving = next((launch.engine for launch in source.launches), "vllm")
    if serving == "unknown":
        serving = "vllm"
    if source.requests:
        found += check_requests(source.requests, serving if engine == "auto" else engine)
    found += check_metrics(source.metrics)
    if source.num_unread:
        found.append(
            Finding(
                check="unread", level="warning", message=f"{source.num_unread} lines are not JSON"
            )
        )
    return tuple(found)


def _launch(launch: Launch, machine: Machine) -> Iterator[Finding]:
    found = []
    for check in LAUNCH_CHECKS:
        if launch.engine in check.engines:
            found += list(check.run(launch))
    yield from found
    if not any(finding.level == "error" for finding in found) or launch.model is not None:
        yield from check_pair(launch, machine)
    if not speculates(launch) and not found:
        yield Finding(check="speculation", level="note", message="speculation is off")
