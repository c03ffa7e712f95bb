"""Ready commands for Foretoken, vLLM and llama.cpp that start what was planned.

Says what each is to be told; how it is written is the writer's of commands. `lint` accepts every
command; a test checks it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from foretoken.lab.launch.engines import refusal
from foretoken.lab.launch.drafting import MOST_RUNNING, DraftingSetup, Ranges
from foretoken.lab.launch.command import write_command
from foretoken.lab.plan.bits import Quantization
from foretoken.lab.plan.schedule import DraftSchedule
from foretoken.lab.plan.setup import DRAWN_FROM, ENGINES, Setup
from foretoken.lab.plan.sizes import PlanModel

_FLOATS = ("bf16", "fp16", "fp32")
_ONLINE = ("fp8", "int8")
"""Quantizations that vLLM applies while loading 16-bit floats."""
_MADE = ("int4", "mxfp4", "nvfp4")
"""Those that need a checkpoint made for them."""


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
    refused = {engine: _refused(engine, setup) for engine in ENGINES}
    return {
        engine: f"# {refused[engine]}" if refused[engine] else _command(engine, setup, schedule)
        for engine in ENGINES
    }


def _refused(engine: str, setup: Setup) -> str:
    """Why there is no command for an engine; empty if there is."""
    if setup.drafting is not None and (why := refusal(engine, setup.drafting)):
        return why
    if engine != "foretoken":
        return ""
    weights = setup.quantization.name
    return f"Foretoken does not read {weights}" if weights in ("mxfp4", "nvfp4") else ""


def _command(engine: str, setup: Setup, schedule: DraftSchedule) -> str:
    settings = {"model": setup.target.name, **_SETTINGS[engine](setup)}
    speculation = None if setup.drafting is None else _speculation(engine, setup, schedule)
    written = write_command(engine, settings, speculation).commented
    weights, stored = setup.quantization.name, setup.target.quantization
    there = "quantization" in settings or weights == stored or weights in _FLOATS
    if engine == "foretoken" and not there:
        return f"# name a checkpoint of the target in {weights}\n{written}"
    return written


def _vllm(setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tensor_parallel_size": setup.tp,
        "gpu_memory_utilization": f"{setup.utilization:g}",
        "max_model_len": setup.settings.context,
    }
    weights, stored = setup.quantization.name, setup.target.quantization
    if weights in _ONLINE and stored in ("bf16", "fp16"):
        found["quantization"] = weights
    elif weights in _MADE and weights != stored:
        found["quantization"] = weights  # which is answered with what is needed for it
    if setup.kv_bytes <= 1:
        found["kv_cache_dtype"] = "fp8"
    return found | _telling(setup)


def _telling(setup: Setup) -> dict[str, Any]:
    """That answers tell how their drafts fared, where there are any."""
    return {"per_request_spec_decode_metrics": "detailed"} if setup.drafting is not None else {}


def _llama_cpp(setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {
        "quantization": setup.quantization.name,
        "max_model_len": setup.settings.context,
        "max_num_seqs": max(1, setup.settings.concurrency),
    }
    return found | ({"device": "cuda"} if setup.device.kind != "cpu" else {})


def _foretoken(setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {"tensor_parallel_size": setup.tp} if setup.tp > 1 else {}
    if _rounded_at_load(setup.quantization, setup.target):
        found["quantization"] = setup.quantization.name
    if setup.settings.kv_cache_dtype == "int8":
        found["kv_cache_dtype"] = "int8"
    return found | _telling(setup)


_SETTINGS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "foretoken": _foretoken,
}


def _rounded_at_load(wanted: Quantization, model: PlanModel) -> bool:
    """Whether Foretoken rounds the floats of this checkpoint so."""
    return wanted.name in ("int8", "int4") and model.quantization in _FLOATS


def _speculation(engine: str, setup: Setup, schedule: DraftSchedule) -> DraftingSetup:
    drafting = setup.drafting
    assert drafting is not None, "something drafts"
    model = setup.draft.name if setup.drafts_with == "model" and setup.draft is not None else None
    if drafting.drafts_with == "head" and drafting.own_file:
        model = "HEAD-TRAINED-FOR-THIS-TARGET"
    ranges: Ranges = ()
    if engine == "vllm" and len(schedule.steps) > 1 and schedule.falls:
        # A length of its own, such as a depth of suffixes, has no schedule.
        ranges = _ranges(schedule.steps) if drafting.default_drafts_key is None else ()
    return DraftingSetup(
        method=setup.method,
        model=model,
        num_drafts=schedule.most if ranges else setup.k,
        ranges=ranges,
        keys=_keys(engine, setup),
    )


def _keys(engine: str, setup: Setup) -> dict[str, Any]:
    """How the drafter is kept and drawn from."""
    found: dict[str, Any] = {}
    by_model = setup.drafts_with == "model" and setup.draft is not None
    said = setup.settings.draft_tensor_parallel_size
    if engine == "foretoken":
        drafting = setup.drafting
        assert drafting is not None, "something drafts"
        if by_model and setup.draft and _rounded_at_load(setup.draft_quantization, setup.draft):
            found["quantization"] = setup.draft_quantization.name
        kept = setup.head_quantization.name
        if drafting.drafts_with == "head" and kept in drafting.quantizations:
            found["quantization"] = kept
        if drafting.own_kv and setup.settings.draft_kv_cache_dtype == "int8":
            found["kv_cache_dtype"] = "int8"
        if by_model and setup.tp > 1 and said == setup.tp:
            found["draft_tensor_parallel_size"] = said  # else one process drafts
        return found
    if by_model and engine == "vllm":
        found["draft_tensor_parallel_size"] = said or setup.tp
    if by_model and engine == "llama.cpp":
        found["quantization"] = setup.draft_quantization.name
    if by_model and setup.settings.temperature > DRAWN_FROM:
        found["draft_sample_method"] = "probabilistic"
    return found


def _ranges(steps: Sequence[tuple[int, int]]) -> Ranges:
    """(first, last, k) from 1 on, of steps that end at their last number of requests; 0: no end."""
    found, first = [], 1
    for k, last in steps:
        found.append((first, last or MOST_RUNNING, k))
        first = (last or MOST_RUNNING) + 1
    return tuple(found)
