"""Puts a plan together: memory both ways, predictions, findings, and ready commands for Foretoken,
vLLM and llama.cpp that start what was planned.

The only module that knows all parts of planning. Of commands it says what each is to be told; how
that is written is the writer's of launches. `lint` accepts every command; a test checks it.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import MOST_RUNNING, DraftingSetup, Ranges, refusal
from foretoken.lab.launch.write import write_command
from foretoken.lab.plan.checks import (
    OF_SETTINGS,
    STATIC_CHECKS,
    PlanContext,
    PlanVerdict,
    findings_of,
    judge,
)
from foretoken.lab.plan.memory_plan import MemoryPlan, draft_load, overhead_bytes, plan_memory
from foretoken.lab.plan.method_plans import plan_of
from foretoken.lab.plan.predict import (
    DraftSchedule,
    MethodOutlook,
    PlannedLatency,
    PlannedSpeed,
    draft_schedule,
    latency,
    method_outlooks,
    predict,
)
from foretoken.lab.plan.setup import (
    DRAWN_FROM,
    ENGINES,
    PlanSettings,
    Setup,
    resolve_setup,
)
from foretoken.lab.plan.sizes import PlanModel, Quantization

CLEARLY = 1.05
"""How much more another method has to gain to be named instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutlook:
    draft: str
    params: int
    requests: int
    problem: str
    prediction: PlannedSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """The answer to one set of settings; its first fields are those of the context."""

    setup: Setup
    plain: MemoryPlan
    speculating: MemoryPlan
    prediction: PlannedSpeed
    outlooks: tuple[MethodOutlook, ...]
    schedule: DraftSchedule
    verdict: PlanVerdict
    latencies: tuple[PlannedLatency, ...]
    """At the usual load and at the peak, with the drafts that the engine can be told."""
    drafts: tuple[DraftOutlook, ...]
    overhead_bytes: float
    instead: str
    """A method that is expected to gain clearly more; empty: there is none."""
    findings: tuple[Finding, ...]
    commands: dict[str, str]


def build_plan(settings: PlanSettings) -> SpeculationPlan:
    """Compute everything. Raises as `resolve_setup`, and ConfigError at several drafts for a method
    that takes none."""
    names = dict.fromkeys(filter(None, map(str.strip, (settings.draft or "").split(","))))
    setups = [resolve_setup(replace(settings, draft=name)) for name in names or (None,)]
    if len(setups) > 1 and not all(setup.drafts_with == "model" for setup in setups):
        raise ConfigError("plan.draft", settings.draft, f"one name for method {setups[0].method}")
    contexts = [_context(setup) for setup in setups]
    drafts = tuple(_draft_outlook(one) for one in contexts if one.setup.draft is not None)
    usual = contexts[0].setup.usual
    order = [(not one.problem, one.prediction.at(usual).best) for one in drafts]
    context = contexts[order.index(max(order)) if order else 0]
    setup = context.setup
    findings, latencies, verdict = _judged(context)
    return SpeculationPlan(
        **{field.name: getattr(context, field.name) for field in fields(context)},
        verdict=verdict,
        latencies=latencies,
        drafts=drafts,
        overhead_bytes=overhead_bytes(setup),
        instead=_instead(context, findings, verdict),
        findings=findings,
        commands=ready_commands(setup, context.schedule, speculates=verdict.speculates),
    )


def _context(setup: Setup) -> PlanContext:
    plain = plan_memory(setup, None)
    if plain.fits:  # with no more requests in flight than fit at once without drafts
        usual, peak = (min(asked, plain.requests) for asked in (setup.usual, setup.peak))
        setup = replace(setup, usual=usual, peak=peak)
    prediction = predict(setup)
    return PlanContext(
        setup=setup,
        plain=plain,
        speculating=plan_memory(setup, draft_load(setup)),
        prediction=prediction,
        outlooks=method_outlooks(setup),
        schedule=draft_schedule(setup, prediction),
    )


def _judged(
    context: PlanContext,
) -> tuple[tuple[Finding, ...], tuple[PlannedLatency, ...], PlanVerdict]:
    """What the checks find, times at the usual load and at the peak, and the verdict."""
    setup = context.setup
    findings = tuple(findings_of(context))
    loads = map(context.prediction.at, (setup.usual, setup.peak))
    latencies = tuple(latency(setup, load, context.schedule.told(load.requests)) for load in loads)
    deciding = latencies[1 if setup.settings.slo == "throughput" else 0]
    return findings, latencies, judge(context, findings, deciding)


def _instead(context: PlanContext, findings: tuple[Finding, ...], verdict: PlanVerdict) -> str:
    """A method that can be had and is expected to gain clearly more; empty: there is none."""
    setup, usual = context.setup, context.setup.usual
    refused = next((one for one in findings if one.level == "error"), None)
    of_settings = refused is not None and refused.check in OF_SETTINGS
    k = context.schedule.told(usual) if verdict.speculates else 0
    least = CLEARLY * context.prediction.at(usual).gain(k).middle
    gains = {
        one.method: one.prediction.at(usual).best
        for one in context.outlooks
        if one.available and one.method != setup.method
    }
    best = max(gains, key=lambda method: gains[method], default="")
    asked = setup.method != "none" and setup.settings.slo != "ttft"
    able = asked and context.plain.fits and not of_settings
    return best if able and gains.get(best, 0.0) >= least else ""


def package_of(setup: Setup) -> str:
    """What has to be installed beside the engine for the method, in words; empty: nothing."""
    package = setup.method_plan.package(setup.settings.engine) if setup.method_plan else ""
    return package and f"the package {package}, which {setup.settings.engine} imports for it"


def _draft_outlook(context: PlanContext) -> DraftOutlook:
    draft = context.setup.draft
    assert draft is not None
    found = findings_of(context, STATIC_CHECKS)
    errors = (finding.message for finding in found if finding.level == "error")
    return DraftOutlook(
        draft=draft.name,
        params=draft.params,
        requests=context.speculating.requests,
        problem=next(errors, ""),
        prediction=context.prediction,
    )


_FLOATS = ("bf16", "fp16", "fp32")
_MADE = ("int4", "mxfp4", "nvfp4")


def ready_commands(setup: Setup, schedule: DraftSchedule, *, speculates: bool) -> dict[str, str]:
    """Engine -> command line, or a sentence that begins with `#` where there is none. Of an engine
    that takes no list by load, the number of the load that decides is used."""
    if not speculates:
        setup = replace(setup, method="none")
    elif setup.method != "none" and not setup.settings.num_speculative_tokens:
        setup = replace(setup, k=max(1, schedule.decided))
    return {engine: _command(engine, setup, schedule) for engine in ENGINES}


def _command(engine: str, setup: Setup, schedule: DraftSchedule) -> str:
    if setup.drafting is not None and (why := refusal(engine, setup.drafting)):
        return f"# {why}"
    weights, stored = setup.quantization.name, setup.target.quantization
    # Of four-bit floats it reads a checkpoint that is published in them.
    reads = weights not in ("mxfp4", "nvfp4") or weights == stored == "mxfp4"
    if engine == "foretoken" and not reads:
        return f"# Foretoken does not read {weights}"
    settings = {"model": setup.target.name, **_settings(engine, setup)}
    drafting = None if setup.drafting is None else _drafting(engine, setup, schedule)
    written = write_command(engine, settings, drafting).commented
    there = "quantization" in settings or weights in (stored, *_FLOATS)
    if engine == "foretoken" and not there:
        return f"# name a checkpoint of the target in {weights}\n{written}"
    return written


def _settings(engine: str, setup: Setup) -> dict[str, Any]:
    weights, stored = setup.quantization.name, setup.target.quantization
    found: dict[str, Any] = {}
    if engine == "llama.cpp":
        running = max(1, setup.settings.concurrency)
        found = {"max_model_len": setup.settings.context, "max_num_seqs": running}
        found |= {"device": "cuda"} if setup.device.kind != "cpu" else {}
        return {"quantization": weights, **found}
    if engine == "vllm":
        share = f"{setup.utilization:g}"
        found = {"tensor_parallel_size": setup.tp, "gpu_memory_utilization": share}
        found["max_model_len"] = setup.settings.context
        rounded = weights in ("fp8", "int8") and stored in ("bf16", "fp16")
        if rounded or (weights in _MADE and weights != stored):  # which says what is needed
            found["quantization"] = weights
        found |= {"kv_cache_dtype": "fp8"} if setup.kv_bytes <= 1 else {}
    else:
        found = {"tensor_parallel_size": setup.tp} if setup.tp > 1 else {}
        if _rounded_at_load(setup.quantization, setup.target):
            found["quantization"] = weights
        found |= {"kv_cache_dtype": "int8"} if setup.settings.kv_cache_dtype == "int8" else {}
    if setup.drafting is not None:
        found["per_request_spec_decode_metrics"] = "detailed"
    return found


def _rounded_at_load(wanted: Quantization, model: PlanModel) -> bool:
    """Whether Foretoken rounds the floats of this checkpoint so."""
    return wanted.name in ("int8", "int4") and model.quantization in _FLOATS


def _drafting(engine: str, setup: Setup, schedule: DraftSchedule) -> DraftingSetup:
    method = setup.drafting
    assert method is not None, "something drafts"
    model = setup.draft_model.name if setup.draft_model is not None else None
    if method.drafts_with == "head" and plan_of(method).own_file:
        model = "HEAD-TRAINED-FOR-THIS-TARGET"
    ranges: Ranges = ()
    count = setup.k
    if len(schedule.steps) > 1 and schedule.listed(engine, method):
        drafts = [k for k, _ in schedule.steps]
        lasts = [last or MOST_RUNNING for _, last in schedule.steps]
        ranges = tuple(zip([1, *(last + 1 for last in lasts)], lasts, drafts, strict=False))
        count = max(drafts)
    return DraftingSetup(setup.method, model, _keys(engine, setup), num_drafts=count, ranges=ranges)


def _keys(engine: str, setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {}
    draft = setup.draft_model
    said, weights = setup.settings.draft_tensor_parallel_size, setup.draft_quantization
    if engine == "foretoken":
        method = setup.drafting
        assert method is not None, "something drafts"
        if draft is not None and _rounded_at_load(weights, draft):
            found["quantization"] = weights.name
        kept = setup.head_quantization.name
        if method.drafts_with == "head" and kept in method.quantizations:
            found["quantization"] = kept
        if method.own_kv and setup.settings.draft_kv_cache_dtype == "int8":
            found["kv_cache_dtype"] = "int8"
    elif draft is not None:
        found = {"quantization": weights.name} if engine == "llama.cpp" else {}
        found |= {"draft_tensor_parallel_size": said or setup.tp} if engine == "vllm" else {}
        if setup.settings.temperature > DRAWN_FROM:
            found["draft_sample_method"] = "probabilistic"
    return found
