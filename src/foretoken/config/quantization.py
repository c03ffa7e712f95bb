"""Names of the ways to quantize weights and keys and values, of targets and drafts. No torch."""

from foretoken.config.keys import require
from foretoken.config.methods import find_method
from foretoken.errors import ConfigError, NotYetError

QUANTIZATIONS = ("int8", "int4")
AUTO = "auto"
"""Of a draft model: as measured at load."""
KV_CACHE_DTYPES = ("auto", "int8")
_KV_NOT_YET = ("bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")
_READY_MADE = ("compressed-tensors", "fp8", "gguf", "gptq", "gptq_marlin", "awq", "awq_marlin")
_FROM_16_BIT = (
    "marlin aqlm squeezellm bitblas gptq_bitblas modelopt modelopt_fp4 mxfp4 nvfp4 petit_nvfp4 "
    "quark auto-round inc ipex moe_wna16"
)
_SUCCESSORS = {
    "bitsandbytes": "int8 or int4 at load",
    "quanto": "int8 or int4 at load",
    "hqq": "int4 at load",
    "torchao": "int8 or int4 at load",
    "rtn": "int8 or int4 at load, which is that",
    "experts_int8": "int8 at load",
    "tpu_int8": "int8 at load",
    "ptpc_fp8": "int8 at load",
    "fbgemm_fp8": "int8 at load",
    "deepspeedfp": "int8 or int4 at load",
    "gptq_marlin_24": "gptq without sparsity, or int4 at load",
    **dict.fromkeys(
        _FROM_16_BIT.split(),
        "int8 or int4 at load, of the 16-bit checkpoint",
    ),
}
"""What vLLM reads and Foretoken does not -> what to use instead."""


def check_draft_quantization(method: str, given: object) -> None:
    """Raise unless `given` can be done to the drafters of `method`.

    Raises:
        NotYetError: as for `check_quantization`.
        ConfigError: a drafter without weights, or what cannot be done to its weights.
    """
    field = "speculative_config.quantization"
    if given is None:
        return
    found = find_method(method)
    require(field, given, found.has_weights, f"None: {method} has no weights")
    if given in found.quantizations:
        return
    if found.drafts_with == "model":
        check_quantization(field, given)
    else:
        schemes = ", ".join(("None", *found.quantizations))
        raise ConfigError(field, given, f"{schemes}: {method} heads are rounded at load")


def check_draft_kv_cache(method: str, given: object) -> None:
    """Raise unless the drafters of `method` can keep keys and values so.

    Raises:
        NotYetError: as for `check_kv_cache`.
        ConfigError: a drafter without keys and values of its own, or an unknown name.
    """
    field = "speculative_config.kv_cache_dtype"
    check_kv_cache(field, given)
    ok = given == "auto" or find_method(method).own_kv
    require(field, given, ok, f"auto: {method} keeps no keys and values of its own")


def check_kv_cache(field: str, given: object) -> None:
    """Raise unless `given` is a name of KV_CACHE_DTYPES.

    Raises:
        NotYetError: a type that vLLM has and Foretoken does not.
        ConfigError: anything else.
    """
    allowed = ", ".join(KV_CACHE_DTYPES)
    if isinstance(given, str) and given in _KV_NOT_YET:
        raise NotYetError(field, given, f"{allowed} ({given} is not yet built)")
    require(field, given, given in KV_CACHE_DTYPES, allowed)


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
