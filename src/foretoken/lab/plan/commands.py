"""Ready commands for Foretoken, vLLM and llama.cpp that start what was planned.

Syntax of vLLM 0.33 and of llama.cpp's server of late 2026. `lint` accepts every command that this
module writes; a test checks it.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretoken.lab.plan.bits import Quantization
from foretoken.lab.plan.schedule import DraftSchedule
from foretoken.lab.plan.setup import DRAWN_FROM, Setup, refusal
from foretoken.lab.plan.sizes import PlanModel

_FLOATS = ("bf16", "fp16", "fp32")
_VLLM_ONLINE = {"fp8": "fp8", "int8": "int8_per_channel_weight_only"}
"""Quantizations that vLLM applies while loading; others need a checkpoint made for them."""


def ready_commands(setup: Setup, schedule: DraftSchedule, *, speculates: bool) -> dict[str, str]:
    """Engine -> command line, or a sentence that begins with `#` where there is none.

    Args:
        setup: what is served.
        schedule: drafts by load; the number of the usual load is used, or of the next one that has
            any.
        speculates: whether to speculate at all.
    """
    if not speculates:
        setup = replace(setup, method="none")
    elif setup.method != "none" and not setup.settings.num_speculative_tokens:
        setup = replace(setup, k=max(1, schedule.usual_k))
    written = {
        "foretoken": _foretoken(setup),
        "vllm": _vllm(setup, schedule),
        "llama.cpp": _llama_cpp(setup),
    }
    if setup.drafting is None:
        return written
    refused = {engine: refusal(engine, setup.drafting) for engine in written}
    return {engine: f"# {refused[engine]}" if refused[engine] else command
            for engine, command in written.items()}  # fmt: skip


def _join(parts: list[str]) -> str:
    """One option per line, quoted for a shell."""
    lines = [shlex.quote(parts[0])]
    for part in parts[1:]:
        if part.startswith("-") and len(lines[-1]) > 0:
            lines.append(shlex.quote(part))
        else:
            lines[-1] += " " + shlex.quote(part)
    return " \\\n  ".join(lines)


def _speculative_config(setup: Setup) -> dict[str, Any]:
    config: dict[str, Any] = {"method": setup.method, "num_speculative_tokens": setup.k}
    if setup.drafts_with == "model" and setup.draft is not None:
        config["model"] = setup.draft.name
    elif setup.drafts_with == "head" and setup.drafting and setup.drafting.own_file:
        config["model"] = "HEAD-TRAINED-FOR-THIS-TARGET"
    if setup.method == "ngram":
        config |= {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
    return config


def _foretoken(setup: Setup) -> str:
    if setup.tp > 1:
        return "# Foretoken runs on one device"
    weights, stored = setup.quantization.name, setup.target.quantization
    if weights in ("mxfp4", "nvfp4"):
        return f"# Foretoken does not read {weights}"
    parts = ["foretoken", "serve", setup.target.name]
    rounded = _rounded_at_load(setup.quantization, setup.target)
    if rounded:
        parts += ["--quantization", weights]
    if setup.settings.kv_cache_dtype == "int8":
        parts += ["--kv-cache-dtype", "int8"]
    if setup.method != "none":
        config = _speculative_config(setup) | _foretoken_draft(setup)
        parts += ["--speculative-config", json.dumps(config)]
        parts += _TELL_ACCEPTANCE
    there = rounded or weights == stored or weights in _FLOATS
    return ("" if there else f"# name a checkpoint of the target in {weights}\n") + _join(parts)


def _rounded_at_load(wanted: Quantization, model: PlanModel) -> bool:
    """Whether Foretoken rounds the floats of this checkpoint so."""
    return wanted.name in ("int8", "int4") and model.quantization in _FLOATS


def _foretoken_draft(setup: Setup) -> dict[str, Any]:
    """How the drafter is kept, where that was asked for."""
    found: dict[str, Any] = {}
    if setup.drafts_with == "model" and setup.draft is not None:
        if _rounded_at_load(setup.draft_quantization, setup.draft):
            found["quantization"] = setup.draft_quantization.name
    if setup.drafting and setup.drafting.own_kv and setup.settings.draft_kv_cache_dtype == "int8":
        found["kv_cache_dtype"] = "int8"
    return found


_TELL_ACCEPTANCE = ("--per-request-spec-decode-metrics", "detailed")


def _vllm(setup: Setup, schedule: DraftSchedule) -> str:
    settings = setup.settings
    parts = ["vllm", "serve", setup.target.name, "--tensor-parallel-size", str(setup.tp)]
    parts += ["--gpu-memory-utilization", f"{setup.utilization:g}"]
    parts += ["--max-model-len", str(settings.context)]
    if setup.quantization.name in _VLLM_ONLINE and setup.target.quantization in ("bf16", "fp16"):
        parts += ["--quantization", _VLLM_ONLINE[setup.quantization.name]]
    if setup.kv_bytes <= 1:
        parts += ["--kv-cache-dtype", "fp8"]
    drafting = setup.drafting
    if drafting is None:
        return _join(parts)
    config = _speculative_config(setup)
    if drafting.drafts_with == "model":
        config["draft_tensor_parallel_size"] = setup.draft_tp
        if settings.temperature > DRAWN_FROM:
            config["draft_sample_method"] = "probabilistic"
    if len(schedule.steps) > 1 and schedule.falls and drafting.default_drafts_key is None:
        config["num_speculative_tokens"] = schedule.most
        config["num_speculative_tokens_per_batch_size"] = _ranges(schedule.steps)
    parts += ["--speculative-config", json.dumps(config)]
    parts += _TELL_ACCEPTANCE
    return _comment(setup.quantization, setup.target.quantization) + _join(parts)


def _ranges(steps: Sequence[tuple[int, int]]) -> list[list[int]]:
    """vLLM's list of (first, last, k), starting at 1; the last one reaches 4096 requests."""
    found, first = [], 1
    for k, last in steps:
        found.append([first, last or 4096, k])
        first = (last or 4096) + 1
    return found


def _comment(quantization: Quantization, stored: str) -> str:
    made = quantization.name in ("int4", "mxfp4", "nvfp4") and quantization.name != stored
    return f"# name a checkpoint of the target in {quantization.name}\n" if made else ""


def _llama_cpp(setup: Setup) -> str:
    settings = setup.settings
    slots = max(1, settings.concurrency)
    parts = ["llama-server", "-m", _gguf(setup.target.name, setup.quantization)]
    parts += ["-c", str(settings.context * slots), "-np", str(slots), "--metrics"]
    if setup.device.kind != "cpu":
        parts += ["-ngl", "99"]
    word = setup.drafting.plan.llama_cpp if setup.drafting and setup.drafting.plan else None
    if word is not None:
        parts += ["--spec-type", word]
    if setup.drafts_with == "model" and setup.draft is not None:
        parts += ["--spec-draft-model", _gguf(setup.draft.name, setup.draft_quantization)]
        if settings.temperature > DRAWN_FROM:
            parts += ["--spec-draft-sampling", "probabilistic"]
    if setup.drafting is not None and setup.drafting.plan is not None:
        parts += setup.drafting.plan.llama_cpp_drafts(setup.k)
    return _join(parts)


def _gguf(name: str, quantization: Quantization) -> str:
    kinds = {"int8": "q8_0", "fp8": "q8_0", "int4": "q4_k_m", "mxfp4": "mxfp4", "nvfp4": "q4_k_m"}
    return f"{name.rsplit('/', 1)[-1]}-{kinds.get(quantization.name, quantization.name)}.gguf"
