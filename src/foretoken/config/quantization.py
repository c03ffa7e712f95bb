"""Names of the ways to quantize weights at load, for targets and drafts alike. No torch."""

from foretoken.config.keys import require
from foretoken.errors import NotYetError

QUANTIZATIONS = ("int8", "int4")
AUTO = "auto"
"""Of a draft model: as measured at load."""
_READY_MADE = ("compressed-tensors", "fp8", "gguf", "gptq", "gptq_marlin", "awq", "awq_marlin")
_SUCCESSORS = {
    "bitsandbytes": "int8 or int4 at load",
    "quanto": "int8 or int4 at load",
    "hqq": "int4 at load",
    "torchao": "int8 or int4 at load",
}


def check_draft_quantization(method: str, given: object) -> None:
    """Raise unless `given` can be done to the drafters of `method`.

    Raises:
        NotYetError: as for `check_quantization`, and for heads.
        ConfigError: a drafter without weights, or an unknown name.
    """
    field = "speculative_config.quantization"
    if given != AUTO:
        check_quantization(field, given)
    if given is not None and method not in ("draft_model", "parallel"):
        allowed = f"None: only draft models are quantized so far, not {method}"
        raise NotYetError(field, given, allowed)


def check_quantization(field: str, given: object) -> None:
    """Raise unless `given` is None, a name of QUANTIZATIONS, or that of a ready-made format.

    Raises:
        NotYetError: a format that vLLM reads and Foretoken does not, with what to use instead.
        ConfigError: anything else.
    """
    allowed = "None, " + ", ".join(QUANTIZATIONS)
    if isinstance(given, str) and given in _SUCCESSORS:
        raise NotYetError(field, given, f"{_SUCCESSORS[given]}: {allowed}")
    require(field, given, given is None or given in (*QUANTIZATIONS, *_READY_MADE), allowed)
