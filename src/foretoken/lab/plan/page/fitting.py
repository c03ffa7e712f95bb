"""What would fit: the same plan on other numbers of devices and with other weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foretoken.lab.plan.bits import find_quantization
from foretoken.lab.plan.memory_plan import draft_load, plan_memory
from foretoken.lab.plan.setup import Setup

COUNTS = (1, 2, 4, 8)
_GPU_WEIGHTS = ("bf16", "fp8", "int4")
_GGUF_WEIGHTS = ("bf16", "q8_0", "q4_k_m")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingRow:
    """One quantization of the target on a number of devices."""

    quantization: str
    count: int
    plain: int
    """Typical requests that fit at once."""
    speculating: int
    """The same beside the drafter; 0: it does not load."""


def what_fits(setup: Setup) -> Iterator[FittingRow]:
    """Rows for the asked quantization and the usual ones, on one GPU to eight; on CPUs as asked."""
    usual = _GGUF_WEIGHTS if setup.settings.engine == "llama.cpp" else _GPU_WEIGHTS
    on_gpus = setup.device.kind == "gpu"
    counts = sorted({*COUNTS, setup.tp}) if on_gpus else [setup.devices]
    for name in dict.fromkeys((setup.quantization.name, *usual)):
        for count in counts:
            if on_gpus and not _divides(setup, count):
                continue
            other = replace(setup, quantization=find_quantization(name, "quantization"))
            other = _on(other, count) if on_gpus else other
            yield FittingRow(
                quantization=name,
                count=count,
                plain=plan_memory(other, None).requests,
                speculating=plan_memory(other, draft_load(other)).requests,
            )


def _on(setup: Setup, count: int) -> Setup:
    """With so many devices, a rank on each."""
    draft = min(setup.draft_tp, count) if setup.draft_tp != setup.tp else count
    return replace(setup, tp=count, draft_tp=draft, devices=count)


def most_context(setup: Setup, tokens: int, lookahead: int) -> int:
    """Tokens that each request may have when the usual number of them share so many."""
    return max(0, tokens // setup.usual - lookahead)


def _divides(setup: Setup, count: int) -> bool:
    models = [setup.target]
    if setup.drafts_with == "model" and setup.draft is not None and setup.draft_tp == setup.tp:
        models.append(setup.draft)
    return all(model.num_heads % count == 0 for model in models)
