"""Names of the ways to quantize weights, activations, keys and values, of targets and drafts. No
torch."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.config.reader import Allowed, words
from foretoken.errors import ConfigError, NotYetError

QUANTIZATIONS = ("int8", "int4")
AUTO = "auto"
"""Of a draft model: as measured at load."""
_KV_NOT_YET = ("bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")
KVCacheDtype = Annotated[str, words("auto", "int8", later=_KV_NOT_YET)]
"""How keys and values are kept; for vLLM's other types NotYetError."""
Activations = Annotated[str, words("auto", "int16", "int8")]
"""How rows are rounded that integer weights are multiplied with."""
Quantization = Annotated[str | None, Allowed("None, " + ", ".join(QUANTIZATIONS), lambda _: True)]
"""How weights are rounded; `check_quantization` says which words may be given."""
AUTO_X_BITS, DRAFT_MODEL_X_BITS = 16, 8
"""Bits of the activations that integer weights are multiplied with where nothing is named: 8 for
draft models, whose tokens are checked either way."""
_READY_MADE = (
    "compressed-tensors", "fp8", "gguf", "gptq", "gptq_marlin", "awq", "awq_marlin", "mxfp4",
)  # fmt: skip
_SUCCESSORS = {
    word: instead
    for instead, listed in {
        "int8 or int4 at load": "bitsandbytes quanto torchao deepspeedfp",
        "int8 or int4 at load, which is that": "rtn",
        "int4 at load": "hqq",
        "int8 at load": "experts_int8 tpu_int8 ptpc_fp8 fbgemm_fp8",
        "gptq without sparsity, or int4 at load": "gptq_marlin_24",
        "int8 or int4 at load, of the 16-bit checkpoint": "marlin aqlm squeezellm bitblas "
        "gptq_bitblas modelopt modelopt_fp4 nvfp4 petit_nvfp4 quark auto-round inc ipex "
        "moe_wna16",
    }.items()
    for word in listed.split()
}
"""What vLLM reads and Foretoken does not -> what to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """How a model keeps and multiplies its numbers, by names of this module."""

    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    activations: str = "auto"
    of_draft: bool = False
    auto_x_bits: int = AUTO_X_BITS
    """Bits of activations where `activations` is auto."""

    @property
    def x_bits(self) -> int:
        """Bits of the activations that integer weights are multiplied with."""
        return {"int8": 8, "int16": 16}.get(self.activations, self.auto_x_bits)

    @property
    def x_bits_asked_by(self) -> str | None:
        """Name of the setting that asks for them; None: nobody does."""
        if self.activations == "auto":
            return None
        return "speculative_config.activations" if self.of_draft else "activations"


def check_quantization(field: str, given: object) -> None:
    """Raise unless `given` is None, a name of QUANTIZATIONS, or that of a ready-made format.

    Raises:
        NotYetError: a format that vLLM reads and Foretoken does not, with what to use instead.
        ConfigError: anything else.
    """
    allowed = "None, " + ", ".join(QUANTIZATIONS)
    if isinstance(given, str) and given in _SUCCESSORS:
        raise NotYetError(field, given, f"{_SUCCESSORS[given]}: {allowed}")
    known = (*QUANTIZATIONS, *_READY_MADE)
    if given is not None and given not in known:
        raise ConfigError(field, given, ", ".join(("None", *QUANTIZATIONS)))
