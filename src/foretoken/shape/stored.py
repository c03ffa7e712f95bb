"""How the matrices of a checkpoint were quantized before: what its quantization_config says.

Torch-free. Names of methods are those of Hugging Face configs and of vLLM. What cannot be read is
refused here by name; sizes of single matrices follow from their tensors (quant/formats).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.block_kinds import BLOCK_KINDS
from foretoken.shape.fields import Config
from foretoken.shape.memory_formula import Held

READY_MADE = ("compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "gguf")
GROUPS = (128, 64, 32)
"""Inputs that share a scale, as kernels have them."""
FLOATS = Held(1.0, 0)
_INSTEAD = "or the 16-bit checkpoint with quantization='int8' or 'int4'"
_SCHEMES = ("dense", "int-quantized", "pack-quantized", "float-quantized", "naive-quantized")
_SCHEMES_ALLOWED = ", ".join((*_SCHEMES[1:], "mixed-precision"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """What all or most matrices of a checkpoint are; single ones may be stored otherwise."""

    method: str
    """One of READY_MADE."""
    weights: str
    """In words, such as `int4, groups of 128, asymmetric`."""
    held: tuple[Held, ...] = (FLOATS,)
    """What kernels make of the matrices of the layers, for the memory they take."""
    of_experts: tuple[Held, ...] = ()
    """The same of the experts of a mixture alone; empty: as of all."""
    head: Held = FLOATS
    """What kernels make of the output head, which most checkpoints leave alone."""
    table: Held = FLOATS
    """What they make of the embedding table; a head that shares it is the same memory, unless it
    is floats."""
    zeros_less_one: bool = False
    """GPTQ's first format stores zero points less 1."""
    block: tuple[int, int] = (128, 128)
    """fp8 with a scale per block: its outputs and inputs."""
    rounds_activations: bool = False
    """Made for activations of 8 bits too; here they keep their type."""

    def experts_alone(self, share: float) -> Self:
        """The same where only experts are stored so, which are such a share of all numbers."""
        return replace(
            self,
            held=(self.held[0]._replace(share=share), FLOATS._replace(share=1 - share)),
            of_experts=(self.held[0]._replace(share=1.0),),
        )

    def describe(self) -> str:
        """`gptq: int4, groups of 128`."""
        return f"{self.method}: {self.weights}"


def stored_scheme(config: Config) -> CheckpointQuantization | None:
    """What config.json says about quantized weights; None: they are floats.

    Raises:
        UnsupportedModelError: a method or variant that is not read; it names what to use instead.
        CheckpointError: the field is no object.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise CheckpointError("config.json quantization_config", given, "an object")
    method = given.get("quant_method", "compressed-tensors" if "config_groups" in given else None)
    if method not in _READERS:
        allowed = f"{', '.join(_READERS)}, {_INSTEAD}"
        raise UnsupportedModelError("quantization_config.quant_method", method, allowed)
    return _READERS[method](given)


def _compressed_tensors(given: Config) -> CheckpointQuantization:
    layout = given.get("format", "dense")
    if layout not in (*_SCHEMES, "mixed-precision"):
        allowed = f"{_SCHEMES_ALLOWED}, {_INSTEAD}"
        raise UnsupportedModelError("quantization_config.format", layout, allowed)
    for name in ("sparsity_config", "transform_config"):
        content = given.get(name) or {}
        if content and content.get("format") != "dense":
            raise UnsupportedModelError(f"quantization_config.{name}", content, "none")
    if given.get("kv_cache_scheme") is not None:
        scheme = given["kv_cache_scheme"]
        raise UnsupportedModelError("quantization_config.kv_cache_scheme", scheme, "none")
    found, held, rounds, block = [], [], False, _block(None)
    for group in (given.get("config_groups") or {}).values():
        weights = (group or {}).get("weights")
        if weights is None:
            continue
        if group.get("format", layout) not in (*_SCHEMES, "mixed-precision"):
            allowed = f"{_SCHEMES_ALLOWED}, {_INSTEAD}"
            raise UnsupportedModelError("quantization_config.format", group["format"], allowed)
        rounds |= group.get("input_activations") is not None
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            allowed = f"int of 4 or 8 bits, float of 8 bits, {_INSTEAD}"
            raise UnsupportedModelError("quantization_config weights", f"{kind}{bits}", allowed)
        if weights.get("strategy") == "block":
            block = _block(weights.get("block_structure"))
        name = f"fp{bits}" if kind == "float" else f"int{bits}"
        group_size = weights.get("group_size") if weights.get("strategy") == "group" else None
        symmetric = weights.get("symmetric", True)
        found.append(_words(name, group_size, symmetric=symmetric))
        held.append(FLOATS if kind == "float" else _held(bits, group_size, symmetric=symmetric))
    words = "; ".join(dict.fromkeys(found)) or "floats"
    return CheckpointQuantization(
        method="compressed-tensors",
        weights=words,
        held=(max(held, key=lambda one: one.bits or 16, default=FLOATS),),
        block=block,
        rounds_activations=rounds,
    )


def _gptq(given: Config) -> CheckpointQuantization:
    bits = given.get("bits")
    if bits not in (4, 8):
        raise UnsupportedModelError("quantization_config.bits", bits, f"4 or 8, {_INSTEAD}")
    layout = given.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        allowed = f"gptq or gptq_v2, {_INSTEAD}"
        raise UnsupportedModelError("quantization_config.checkpoint_format", layout, allowed)
    group, symmetric = given.get("group_size"), given.get("sym", True)
    words, held = _words(f"int{bits}", group, symmetric=symmetric), FLOATS
    if given.get("desc_act"):
        words += ", in order of activations"
    if not given.get("desc_act") or not _whole(group):
        held = _held(bits, group, symmetric=symmetric)
    return CheckpointQuantization(
        method="gptq", weights=words, held=(held,), zeros_less_one=layout == "gptq"
    )


def _awq(given: Config) -> CheckpointQuantization:
    bits = given.get("bits", given.get("w_bit", 4))
    if bits != 4:
        raise UnsupportedModelError("quantization_config.bits", bits, f"4, {_INSTEAD}")
    layout = str(given.get("version") or given.get("format") or "gemm").lower()
    if layout != "gemm":
        raise UnsupportedModelError("quantization_config.version", layout, f"gemm, {_INSTEAD}")
    group = given.get("group_size", given.get("q_group_size"))
    symmetric = not given.get("zero_point", True)
    words, held = _words("int4", group, symmetric=symmetric), _held(4, group, symmetric=symmetric)
    return CheckpointQuantization(method="awq", weights=words, held=(held,))


def _fp8(given: Config) -> CheckpointQuantization:
    kind = given.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError("quantization_config.fmt", kind, "e4m3 or float8_e4m3fn")
    rounds = given.get("activation_scheme") is not None
    block = _block(given.get("weight_block_size"))
    return CheckpointQuantization(
        method="fp8", weights="fp8", block=block, rounds_activations=rounds
    )


def _mxfp4(given: Config) -> CheckpointQuantization:
    """Experts alone; how much of the model they are follows from its shape."""
    each = BLOCK_KINDS["MXFP4"].bytes_each
    return CheckpointQuantization(
        method="mxfp4", weights="experts in mxfp4", held=(Held(1.0, 4, bytes_each=each),)
    )


_READERS: dict[str, Callable[[Config], CheckpointQuantization]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _block(given: object) -> tuple[int, int]:
    if given is None:
        return (128, 128)
    if not (isinstance(given, list) and len(given) == 2 and all(_whole(side) for side in given)):
        raise CheckpointError("config.json weight_block_size", given, "two positive integers")
    return (given[0], given[1])


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _held(bits: int, group: object, *, symmetric: bool) -> Held:
    """Integers as kernels hold them: larger groups are cut, and what they do not have is floats."""
    wide = group if isinstance(group, int) and group > 0 else 0
    if bits == 8 and not symmetric:
        return FLOATS
    if bits == 8 and not wide:
        return Held(1.0, 8)
    fitting = [smaller for smaller in GROUPS if wide % smaller == 0]
    return Held(1.0, bits, fitting[0], not symmetric) if fitting else FLOATS


def _words(name: str, group: object, *, symmetric: bool) -> str:
    wide = isinstance(group, int) and group > 0
    parts = [name, f"groups of {group}" if wide else "per output"]
    return ", ".join(parts if symmetric else [*parts, "asymmetric"])
