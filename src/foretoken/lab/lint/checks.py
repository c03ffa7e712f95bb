"""Runs every check over everything that a text holds, and asks the planner about its models.

Models are checked for whether they fit together and fit the devices, where the planner knows them
without a network.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.checkpoint import PACKAGED
from foretoken.lab.findings import Finding
from foretoken.lab.lint.launches import Launch, LintSource, number
from foretoken.lab.lint.names import NAME_CHECKS
from foretoken.lab.lint.other_servers import OTHER_CHECKS, speculates
from foretoken.lab.lint.traffic import METRIC_CHECK, REFUSED_CHECK, check_metrics, check_requests
from foretoken.lab.lint.vllm import VLLM_CHECKS
from foretoken.lab.plan.bits import QUANTIZATIONS
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings, planned_methods
from foretoken.lab.plan.sizes import known_models

PAIR_CHECKS = ("same_tokenizer", "kv_budget", "tp_symmetry", "ranks_divide", "long_context")
"""Checks of the plan that a launch can fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the launch runs; without a device only the models are compared."""

    device: str | None = None
    count: int = 1


def check_pair(launch: Launch, machine: Machine) -> Iterator[Finding]:
    """The plan's errors and warnings for this launch."""
    settings = _settings(launch, machine)
    if settings is None:
        return
    wanted = PAIR_CHECKS if machine.device else ("same_tokenizer", "ranks_divide")
    for finding in build_plan(settings).findings:
        if finding.check in wanted and finding.level in ("error", "warning"):
            yield finding


def _settings(launch: Launch, machine: Machine) -> PlanSettings | None:
    """The launch as settings of a plan; None where the planner does not know the models."""
    speculation = launch.speculation or {}
    draft = speculation.get("model") or launch.options.get("spec-draft-model")
    method = str(speculation.get("method") or ("draft_model" if draft else "ngram"))
    if launch.model is None or not _is_known(launch.model) or method not in planned_methods():
        return None
    if method == "draft_model" and not (isinstance(draft, str) and _is_known(draft)):
        return None
    ranks = number(launch.options.get("tensor-parallel-size", launch.options.get("tp"))) or 1
    settings = PlanSettings(
        target=launch.model,
        draft=str(draft) if method == "draft_model" else None,
        method=method,
        engine=launch.engine if launch.engine != "unknown" else "vllm",
        device=machine.device or "h100-sxm",
        count=max(machine.count, ranks),
        tensor_parallel_size=ranks,
        draft_tensor_parallel_size=number(speculation.get("draft_tensor_parallel_size")) or 0,
        num_speculative_tokens=number(speculation.get("num_speculative_tokens")) or 0,
        peak_concurrency=1,
    )
    return _with_options(settings, launch)


def _with_options(settings: PlanSettings, launch: Launch) -> PlanSettings:
    options = launch.options
    length = number(options.get("max-model-len"))
    if length:
        settings = replace(settings, context=length)
    share = options.get("gpu-memory-utilization")
    if isinstance(share, str) and share.replace(".", "", 1).isdigit():
        settings = replace(settings, utilization=min(1.0, float(share)))
    quantization = str(options.get("quantization", "")).lower().split("_per_")[0]
    if quantization in QUANTIZATIONS:
        settings = replace(settings, quantization=quantization)
    if str(options.get("kv-cache-dtype", "")).startswith("fp8"):
        settings = replace(settings, kv_cache_dtype="fp8")
    return settings


def _is_known(name: str) -> bool:
    if name in PACKAGED or (Path(name) / "config.json").is_file():
        return True
    return any(name.lower() in (hub, row["short"]) for hub, row in _lower())


def _lower() -> Iterator[tuple[str, dict[str, str]]]:
    for hub_id, row in known_models().items():
        yield hub_id.lower(), row


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
