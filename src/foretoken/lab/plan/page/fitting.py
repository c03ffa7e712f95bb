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
    """Rows for the asked quantization and the usual ones, on one device to eight."""
    usual = _GGUF_WEIGHTS if setup.settings.engine == "llama.cpp" else _GPU_WEIGHTS
    counts = (1,) if setup.device.kind != "gpu" else sorted({*COUNTS, setup.tp})
    for name in dict.fromkeys((setup.quantization.name, *usual)):
        for count in counts:
            if not _divides(setup, count):
                continue
            other = replace(
                setup, quantization=find_quantization(name, "quantization"), tp=count,
                draft_tp=min(setup.draft_tp, count) if setup.draft_tp != setup.tp else count,
            )  # fmt: skip
            yield FittingRow(
                quantization=name,
                count=count,
                plain=plan_memory(other, None).requests,
                speculating=plan_memory(other, draft_load(other)).requests,
            )


def most_context(setup: Setup, tokens: int, lookahead: int) -> int:
    """Tokens that each request may have when the usual number of them share so many."""
    return max(0, tokens // setup.settings.concurrency - lookahead)


def _divides(setup: Setup, count: int) -> bool:
    models = [setup.target]
    if setup.drafts_with == "model" and setup.draft is not None and setup.draft_tp == setup.tp:
        models.append(setup.draft)
    return all(model.num_heads % count == 0 for model in models)
