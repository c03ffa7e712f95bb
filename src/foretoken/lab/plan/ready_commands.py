"""Ready commands for Foretoken, vLLM and llama.cpp that start what was planned.

Says what each is to be told; how it is written is the writer's of launches. `lint` accepts every
command; a test checks it.
"""

from dataclasses import replace
from typing import Any

from foretoken.lab.launch.drafting import MOST_RUNNING, DraftingSetup, Ranges
from foretoken.lab.launch.engines import refusal
from foretoken.lab.launch.write import write_command
from foretoken.lab.plan.bits import Quantization
from foretoken.lab.plan.predict import DraftSchedule
from foretoken.lab.plan.setup import DRAWN_FROM, ENGINES, Setup
from foretoken.lab.plan.sizes import PlanModel

_FLOATS = ("bf16", "fp16", "fp32")
_ONLINE = ("fp8", "int8")
_MADE = ("int4", "mxfp4", "nvfp4")
_TRAINED = "HEAD-TRAINED-FOR-THIS-TARGET"


def ready_commands(setup: Setup, schedule: DraftSchedule, *, speculates: bool) -> dict[str, str]:
    """Engine -> command line, or a sentence that begins with `#` where there is none.

    Args:
        setup: what is served.
        schedule: drafts by load; where there is no list, the number of the load that decides is
            used.
        speculates: whether to speculate at all.
    """
    if not speculates:
        setup = replace(setup, method="none")
    elif setup.method != "none" and not setup.settings.num_speculative_tokens:
        setup = replace(setup, k=max(1, schedule.decided))
    return {engine: _command(engine, setup, schedule) for engine in ENGINES}


def _command(engine: str, setup: Setup, schedule: DraftSchedule) -> str:
    if setup.drafting is not None and (why := refusal(engine, setup.drafting)):
        return f"# {why}"
    weights = setup.quantization.name
    if engine == "foretoken" and weights in ("mxfp4", "nvfp4"):
        return f"# Foretoken does not read {weights}"
    settings = {"model": setup.target.name, **_settings(engine, setup)}
    drafting = None if setup.drafting is None else _drafting(engine, setup, schedule)
    written = write_command(engine, settings, drafting).commented
    there = "quantization" in settings or weights in (setup.target.quantization, *_FLOATS)
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
        rounded = weights in _ONLINE and stored in ("bf16", "fp16")
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
    model = setup.draft.name if setup.drafts_with == "model" and setup.draft is not None else None
    if method.drafts_with == "head" and method.own_file:
        model = _TRAINED
    ranges: Ranges = ()
    if engine == "vllm" and len(schedule.steps) > 1 and schedule.falls:
        # A length of its own, such as a depth of suffixes, has no schedule.
        ranges = _ranges(schedule) if method.default_drafts_key is None else ()
    count = schedule.most if ranges else setup.k
    return DraftingSetup(setup.method, model, _keys(engine, setup), num_drafts=count, ranges=ranges)


def _keys(engine: str, setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {}
    draft = setup.draft if setup.drafts_with == "model" else None
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


def _ranges(schedule: DraftSchedule) -> Ranges:
    """(first, last, k) from 1 on, of steps that end at their last number of requests; 0: no end."""
    lasts = [last or MOST_RUNNING for _, last in schedule.steps]
    firsts = [1, *(last + 1 for last in lasts)]
    drafts = [k for k, _ in schedule.steps]
    return tuple(zip(firsts, lasts, drafts, strict=False))
