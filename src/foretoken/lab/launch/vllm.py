"""vLLM: told in one JSON object."""

from typing import Any

from foretoken.config.method_registry import DraftingMethod, NgramSettings
from foretoken.config.other_engines import find_other
from foretoken.config.reader import defaults_of
from foretoken.lab.launch.drafting import DraftingSetup, LaunchEngine, Told, Unsaid, told_keys
from foretoken.lab.launch.launch import LaunchPart

_IN_PARALLEL = "parallel"
JSON_FLAGS = r"speculative-|speculative-config\.|spec-|num-speculative|sc($|\.)"


def _word(method: DraftingMethod) -> str:
    name = "draft_model" if method.name == _IN_PARALLEL else method.name
    row = find_other("methods", name, "vllm")
    return name if row is not None and not row.gone else ""


def _tell(drafting: DraftingSetup) -> Told:
    found: dict[str, Any] = {"method": _word(drafting.known)}
    found |= {"model": drafting.model} if drafting.model else {}
    found["num_speculative_tokens"] = drafting.num_drafts
    keys = dict(drafting.keys)
    if drafting.method == _IN_PARALLEL:
        keys["parallel_drafting"] = True
    if drafting.known.settings is NgramSettings:
        keys = defaults_of(NgramSettings) | keys  # vLLM's own look for five tokens in a row
    told = list(told_keys("vllm", keys))
    found |= {part.name: part.value for part in told if isinstance(part, LaunchPart)}
    drafts = [count for _, _, count in drafting.ranges]
    falls = drafts == sorted(drafts, reverse=True)
    if drafts and falls:
        found["num_speculative_tokens_per_batch_size"] = [list(one) for one in drafting.ranges]
    yield LaunchPart.flag("--speculative-config", found)
    yield from (one for one in told if isinstance(one, Unsaid))
    if not falls:
        why = "vLLM's lengths may only fall as the load rises; its longest is written"
        yield Unsaid(drafting.ranges_key, why)


VLLM = LaunchEngine(
    name="vllm",
    program=("vllm", "serve"),
    programs=("vllm serve",),
    module="vllm.entrypoints",
    images=("vllm/vllm-openai", "vllm-openai"),
    variables="VLLM_",
    completed={
        "tensor-parallel": "tensor-parallel-size",
        "gpu-memory-util": "gpu-memory-utilization",
        "speculative-conf": "speculative-config",
    },
    drafting=JSON_FLAGS,
    schedule="falling",
    word=_word,
    tell=_tell,
)
