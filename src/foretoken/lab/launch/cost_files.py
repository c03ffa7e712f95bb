"""What each engine is told of a learnt cost model: flags, and the files that it reads.

Formats, each by the code that reads it:
- vLLM 0.33, `num_speculative_tokens_per_batch_size` of the speculative config:
  `vllm/v1/spec_decode/dynamic/utils.py`, validate_and_normalize_dynamic_sd_schedule. Its adaptive
  verification reads no file: AdaptiveVerificationManager (`vllm/v1/worker/gpu/spec_decode/
  adaptive_verification.py`) profiles steps at start, at the context of an environment variable.
- SGLang 0.5.23, `--speculative-adaptive-config`: `sglang/srt/speculative/adaptive_spec_params.py`,
  _load_adaptive_config and AdaptiveStepSlot; `--speculative-dspark-sps-table-path`:
  `dspark_components/dspark_sps.py`, load_sps_table_from_path and SpsAdditiveCostTable.
- TensorRT-LLM 1.4.0rc4, `draft_len_schedule`: `tensorrt_llm/llmapi/llm_args.py`,
  validate_draft_len_schedule_and_sort; the table of `confidence_cost_table_path`, before its
  release `confidence_sps_table_path`: `tensorrt_llm/_torch/speculative/dspark_planner.py`,
  SpsCostTable, which its load_runtime_sps_cost_table makes of a file without fields of schema 2.
  Builds that take nothing but schema 2 want a fingerprint of the engine, which its own profiler
  alone can give; `dspark.py` wants max_draft_len to be the block size of the drafter.
- llama.cpp b11434, `--spec-draft-n-max`, `-n-min`, `-p-min`: `common/arg.cpp`, used by the loops of
  `common/speculative.cpp`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from foretoken.errors import ConfigError
from foretoken.lab.analysis.cost_model import MeasuredCosts
from foretoken.lab.launch.engines import (
    BY_LOAD,
    ENGINES,
    MOST_RUNNING,
    NAMES,
    DraftingSetup,
    Told,
    Unsaid,
    tell,
    todays_word,
)
from foretoken.lab.launch.launch import LaunchPart

WRITTEN_WITH_COSTS = ("vllm", "sglang", "llama.cpp", "tensorrt-llm")
"""Engines that costs are written for."""
_CHAINS = ("EAGLE", "EAGLE3")
"""SGLang's words for what it drafts adaptively."""
_LEAST_GAIN = 0.01
_OPTIONS_OF_TENSORRT_LLM = {
    "host": "--host", "port": "--port", "max_num_seqs": "--max_batch_size",
    "max_num_batched_tokens": "--max_num_tokens", "max_model_len": "--max_seq_len",
    "tensor_parallel_size": "--tp_size", "pipeline_parallel_size": "--pp_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToldCosts:
    """How an engine is told to draft by a cost model."""

    told: tuple[LaunchPart | Unsaid, ...]
    files: Mapping[str, str]
    """Name -> text of what the flags name."""


def tell_costs(
    engine: str, drafting: DraftingSetup | None, costs: MeasuredCosts, folder: Path
) -> ToldCosts:
    """Flags with files that will lie in `folder`. Raises ConfigError: nothing drafts, or the engine
    has no such method."""
    if drafting is None:
        raise ConfigError("CONFIG", "nothing that drafts", "a command or a config that drafts")
    said: list[LaunchPart | Unsaid] = [Unsaid("costs", note) for note in costs.notes]
    if not (costs.schedule[0][2] or costs.one_length):
        why = "no length that was measured pays at any load: this leaves it off"
        said.append(Unsaid("speculation", why))
        said += [LaunchPart.flag(*ENGINES[engine].off)] if ENGINES[engine].off else []
        return ToldCosts(tuple(said), {})
    files: dict[str, str] = {}
    said += _WRITERS[engine](drafting, costs, folder, files)
    return ToldCosts(tuple(said), files)


def _tell_vllm(drafting: DraftingSetup, costs: MeasuredCosts, _: Path, __: Any) -> Told:
    ranges = costs.schedule
    told = replace(drafting, num_drafts=max(k for *_, k in ranges), ranges=ranges)
    yield from tell("vllm", told)
    if drafting.model and costs.context_tokens:
        length = f"VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN={costs.context_tokens}"
        why = "vLLM reads no table for it: it times its own steps at start, with 8192 tokens of "
        why += f"context each; yours have {costs.context_tokens}: set {length} if you turn it on "
        yield Unsaid("enable_adaptive_verification", f"{why}in place of {BY_LOAD}")


def _tell_sglang(
    drafting: DraftingSetup, costs: MeasuredCosts, folder: Path, files: dict[str, str]
) -> Told:
    word = todays_word("sglang", drafting.known)
    if word == "DSPARK":
        files["sglang-dspark-costs.json"] = json.dumps(_additive(costs), indent=1) + "\n"
        yield LaunchPart(value="SGLANG_RAGGED_VERIFY_MODE=compact", role="before")
        yield from tell("sglang", replace(drafting, num_drafts=costs.longest, ranges=()))
        table = str(folder / "sglang-dspark-costs.json")
        yield LaunchPart.flag("--speculative-dspark-sps-table-path", table)
    elif word in _CHAINS and costs.schedule[0][2] and drafting.keys.get("tree_top_k", 1) == 1:
        tiers = {
            str(first): {"candidate_steps": list(costs.paying(first)) if k else [0]}
            for first, _, k in costs.schedule
        }
        files["sglang-adaptive.json"] = json.dumps(tiers, indent=1) + "\n"
        first = costs.schedule[0][2]
        yield from tell("sglang", replace(drafting, num_drafts=first, ranges=()))
        yield LaunchPart.flag("--speculative-adaptive")
        config = str(folder / "sglang-adaptive.json")
        yield LaunchPart.flag("--speculative-adaptive-config", config)
    else:
        yield from tell("sglang", replace(drafting, num_drafts=_one(costs), ranges=()))
        why = f"SGLang drafts by load with {' and '.join(_CHAINS)} in a chain, and with DSPARK: one"
        yield Unsaid(BY_LOAD, f"{why} length for all loads is written")


def _tell_llama(drafting: DraftingSetup, costs: MeasuredCosts, _: Path, __: Any) -> Told:
    ours = ("min_speculative_tokens", "draft_confidence_threshold")
    keys = {name: value for name, value in drafting.keys.items() if name not in ours}
    limits = r"--(spec-)?draft-(n-|p-)?min$"
    flags = tuple(one for one in drafting.flags if not re.match(limits, one[0]))
    k = _one(costs)
    yield from tell("llama.cpp", replace(drafting, num_drafts=k, ranges=(), keys=keys, flags=flags))
    if drafting.known.drafts_with != "text":  # a look-up has no chances
        yield LaunchPart.flag("--spec-draft-n-min", "0")
        yield LaunchPart.flag("--spec-draft-p-min", f"{costs.least_chance(k):.2f}")
    why = "llama.cpp drafts equally far at every load: the length that is best over all is written"
    yield Unsaid(BY_LOAD, why)


def _tell_tensorrt_llm(
    drafting: DraftingSetup, costs: MeasuredCosts, folder: Path, files: dict[str, str]
) -> Told:
    word = todays_word("tensorrt-llm", drafting.known)
    if not word:
        allowed = "another: TensorRT-LLM does not draft so"
        raise ConfigError("speculative_config.method", drafting.method, allowed)
    ranges = costs.schedule if costs.schedule[0][2] else ((1, MOST_RUNNING, costs.one_length),)
    found: dict[str, Any] = {"decoding_type": word, "max_draft_len": ranges[0][2]}
    found |= {"speculative_model": drafting.model} if drafting.model else {}
    if word == "DSpark":
        found |= {"max_draft_len": costs.longest, "enable_confidence_scheduling": True}
        curve = _curve(costs)
        found["confidence_cost_table_path"] = str(folder / "tensorrt-llm-dspark-costs.json")
        found["confidence_min_predicted_gain"] = curve["minimum_predicted_gain"]
        files["tensorrt-llm-dspark-costs.json"] = json.dumps(curve, indent=1) + "\n"
        yield Unsaid(
            "max_draft_len", "TensorRT-LLM refuses one that is not the drafter's block size"
        )
        why = "a build that asks for schema 2 wants a table of its own profiler, with its "
        yield Unsaid("confidence_cost_table_path", f"{why}fingerprint of model, GPU and source")
    else:
        # Up to so many requests; above the last one it does not draft.
        found["draft_len_schedule"] = {last: k for _, last, k in ranges if k}
        why = "up to so many requests, as from 1.3 on; 1.2 read the keys as first requests"
        yield Unsaid("draft_len_schedule", why)
    for name in drafting.keys:
        yield Unsaid(name, f"a key that is not carried over to {NAMES['tensorrt-llm']}")
    text = yaml.safe_dump({"speculative_config": found}, sort_keys=False)
    files["tensorrt-llm.yaml"] = text
    yield LaunchPart.flag("--config", str(folder / "tensorrt-llm.yaml"))


def told_to_tensorrt_llm(settings: Mapping[str, Any]) -> Iterator[LaunchPart | Unsaid]:
    """Options of `foretoken serve` in the words of `trtllm-serve`."""
    for name, value in settings.items():
        if name in _OPTIONS_OF_TENSORRT_LLM:
            yield LaunchPart.flag(_OPTIONS_OF_TENSORRT_LLM[name], value)
        elif name != "adaptive_speculation":
            yield Unsaid(name, f"an option that is not carried over to {NAMES['tensorrt-llm']}")


_WRITERS = {
    "vllm": _tell_vllm,
    "sglang": _tell_sglang,
    "llama.cpp": _tell_llama,
    "tensorrt-llm": _tell_tensorrt_llm,
}


def _one(costs: MeasuredCosts) -> int:
    return costs.one_length or costs.schedule[0][2]


def _knots(costs: MeasuredCosts) -> tuple[list[int], list[int]]:
    """Requests and rows at which the lines are written; both planners stop at the ends."""
    if not costs.row_s:
        given = "verified rows that cost nothing at the loads of these runs"
        raise ConfigError("--costs", given, "runs at higher loads: a planner trims by their cost")
    requests = sorted({1, *costs.batches, MOST_RUNNING})
    rows = {batch * (1 + k) for batch in requests for k in (0, costs.longest)}
    return requests, sorted(rows)


def _additive(costs: MeasuredCosts) -> dict[str, Any]:
    """SGLang's SpsAdditiveCostTable; the whole block is drafted whatever is verified."""
    requests, rows = _knots(costs)
    drafting_s = costs.once_s + costs.draft_s * costs.longest
    return {
        "bias_seconds": costs.base_s + drafting_s,
        "bs_probes": requests,
        "alpha_seconds": [costs.request_s * batch for batch in requests],
        "m_probes": rows,
        "theta_seconds": [costs.row_s * count for count in rows],
    }


def _curve(costs: MeasuredCosts) -> dict[str, Any]:
    """TensorRT-LLM's SpsCostTable. A gain smaller than what the costs are off by is none."""
    found = _additive(costs)
    milliseconds = {key: [1000 * one for one in found[f"{key}_seconds"]]
                    for key in ("alpha", "theta")}  # fmt: skip
    return {
        "token_counts": found["m_probes"],
        "step_time_ms": milliseconds["theta"],
        "fixed_overhead_ms": 1000 * found["bias_seconds"],
        "batch_sizes": found["bs_probes"],
        "batch_overhead_ms": milliseconds["alpha"],
        "minimum_predicted_gain": max(_LEAST_GAIN, round(costs.misfit, 3)),
        "_meta": {"lookup": "interp"},  # between the points, as its profiler marks it
    }
