"""Bytes per weight of each quantization, nominal and with its scales.

The nominal number is the one people multiply by; the stored one is what is on the device. Knows
nothing about which layers a scheme leaves alone beyond one flag.
"""

from dataclasses import dataclass

from foretoken.errors import ConfigError, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the weights of a model are stored."""

    name: str
    nominal_bytes: float
    """Per weight, scales and zero points ignored."""
    stored_bytes: float
    """Per weight of a quantized matrix, scales and zero points included."""
    tables_too: bool
    """Whether embedding and output head are quantized as well."""
    compute: str


def _row(
    name: str, nominal: float, stored: float, compute: str, *, tables_too: bool = False
) -> Quantization:
    return Quantization(
        name=name,
        nominal_bytes=nominal,
        stored_bytes=stored,
        tables_too=tables_too,
        compute=compute,
    )


QUANTIZATIONS = {
    row.name: row
    for row in (
        _row("fp32", 4, 4, "bf16", tables_too=True),
        _row("bf16", 2, 2, "bf16", tables_too=True),
        _row("fp16", 2, 2, "bf16", tables_too=True),
        _row("fp8", 1, 1, "fp8"),
        _row("int8", 1, 1, "int8"),
        # 4 bits, and per 128 weights a 16-bit scale and a 4-bit zero point
        _row("int4", 0.5, 0.5 + 20 / 8 / 128, "bf16"),
        _row("mxfp4", 0.5, 0.5 + 1 / 32, "fp4"),
        _row("nvfp4", 0.5, 0.5 + 1 / 16, "fp4"),
        # GGUF: average bits per weight of the mix that llama.cpp writes for Llama-like models
        _row("q8_0", 1, 8.5 / 8, "int8", tables_too=True),
        _row("q6_k", 0.75, 6.5625 / 8, "int8", tables_too=True),
        _row("q5_k_m", 0.625, 5.69 / 8, "int8", tables_too=True),
        _row("q4_k_m", 0.5, 4.85 / 8, "int8", tables_too=True),
        _row("q4_0", 0.5, 4.5 / 8, "int8", tables_too=True),
    )
}
_ALIASES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    **dict.fromkeys(("fp8_e4m3", "w8a8_fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"), "fp8"),
    **dict.fromkeys(("w8a8", "w8a8_int8", "experts_int8"), "int8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "w4a16", "moe_wna16"), "int4"),
    **dict.fromkeys(("bitsandbytes", "bnb", "auto_round", "auto_awq", "hqq"), "int4"),
    **dict.fromkeys(("modelopt_fp4", "petit_nvfp4"), "nvfp4"),
}
"""What engines and people call them; of schemes that have several widths, the usual one."""
KV_BYTES = {"auto": 2.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "q8_0": 8.5 / 8}
"""Bytes of one key or value element; `auto` is 16 bit."""


def find_quantization(name: str, field: str) -> Quantization:
    """The quantization that people call `name`.

    Raises:
        ConfigError: nothing of that name.
    """
    known = name.lower().replace("-", "_").split("_per_")[0]  # as in `fp8_per_tensor`
    known = _ALIASES.get(known, known)
    if known not in QUANTIZATIONS:
        raise ConfigError(field, name, one_of(name, (*QUANTIZATIONS, *_ALIASES)))
    return QUANTIZATIONS[known]


def kv_element_bytes(name: str, field: str) -> float:
    """Bytes of one key or value element, in any engine but Foretoken.

    Raises:
        ConfigError: nothing of that name.
    """
    known = _ALIASES.get(name.lower(), name.lower())
    if known not in KV_BYTES:
        only = "; int8 with --engine foretoken" if known == "int8" else ""
        raise ConfigError(field, name, one_of(name, KV_BYTES) + only)
    return KV_BYTES[known]
