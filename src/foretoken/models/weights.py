"""From a matrix of a checkpoint to a linear layer, as the options of the load say."""

from torch import Tensor

from foretoken.config.quantization import QUANTIZATIONS
from foretoken.errors import ConfigError
from foretoken.kernels.linear import BFLOAT16, FLOAT32, INT4, INT8
from foretoken.models.base import LoadOptions
from foretoken.ops.linear import KernelLinear, Linear, RowProbe, make_linear
from foretoken.quant import IntWeights, Weights, quantized_linear, rounded_linear, scheme_of
from foretoken.quant.arrange import for_kernels
from foretoken.quant.triton_layer import TritonLinear
from foretoken.shape import ModelShape

_NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16", INT8: "int8", INT4: "int4"}


def linear_of(
    weights: Weights,
    options: LoadOptions,
    *,
    probe: RowProbe,
    bias_N: Tensor | None = None,
    adds_residual: bool = False,
    wide: bool = False,
) -> Linear:
    """Quantize if asked to and not done yet, and pack; integers that no kernel holds are floats.

    Args:
        weights: floats in the type of the options, or integers.
        options: of the load.
        probe: used if rows have to keep their bits and the layer does not see to it itself.
        bias_N: added to every row.
        adds_residual: whether it will be given residuals.
        wide: the output head, whose results may be float32.
    """
    kept = probe if options.batch_invariant else None
    if isinstance(weights, IntWeights) and options.quantization and for_kernels(weights) is None:
        weights = weights.dequantized(options.dtype)
    if isinstance(weights, Tensor) and options.quantization is None:
        return make_linear(
            weights, probe=kept, bias_N=bias_N, adds_residual=adds_residual, wide=wide
        )
    if isinstance(weights, IntWeights):
        return quantized_linear(
            weights,
            options.dtype,
            probe=kept,
            bias_N=bias_N,
            adds_residual=adds_residual,
            wide=wide,
        )
    assert options.quantization is not None, "asked to"
    scheme = scheme_of(options.quantization)
    return rounded_linear(
        weights,
        scheme.for_head() if wide else scheme.fitted(weights.shape[1]),
        probe=kept,
        bias_N=bias_N,
        adds_residual=adds_residual,
        wide=wide,
    )


def rounding_of(quantization: str | None, shape: ModelShape) -> str | None:
    """How to round matrices that are floats; the name of a ready-made format asks for none.

    Raises:
        ConfigError: it names another format than the checkpoint's.
    """
    if quantization is None or quantization in QUANTIZATIONS:
        return quantization
    own = None if shape.stored is None else shape.stored.method
    if quantization.removesuffix("_marlin") != own:
        what = "the checkpoint is not quantized" if own is None else f"the checkpoint is {own}"
        raise ConfigError("quantization", quantization, f"None, int8 or int4: {what}")
    return None


def label_of(linear: Linear) -> str:
    """How a layer keeps its weights, in words."""
    if isinstance(linear, TritonLinear):
        name, group = f"int{linear.packed.bits}", linear.packed.group
    elif isinstance(linear, KernelLinear):
        name, group = _NAMES[linear.packed.weight_type], linear.packed.group
    else:
        return "floats without a kernel"
    return name + f" in groups of {group}" * bool(group)
