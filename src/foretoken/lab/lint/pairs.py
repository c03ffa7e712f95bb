"""Checks of a launch's models: do they fit together, and do they fit the devices.

Asks the planner, and only about models that it knows without a network.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.checkpoint import PACKAGED
from foretoken.lab.findings import Finding
from foretoken.lab.lint.launches import Launch, number
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
