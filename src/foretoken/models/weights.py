"""From a matrix of a checkpoint to a linear layer, as the options of the load say."""

from torch import Tensor

from foretoken.models.base import LoadOptions
from foretoken.ops.linear import Linear, RowProbe, make_linear
from foretoken.quant import quantized_linear, round_weights, scheme_of


def linear_of(
    weight_NK: Tensor,
    options: LoadOptions,
    *,
    probe: RowProbe,
    bias_N: Tensor | None = None,
    adds_residual: bool = False,
    wide: bool = False,
) -> Linear:
    """Quantize if asked to, and pack.

    Args:
        weight_NK: in the type of the options.
        options: of the load.
        probe: used if rows have to keep their bits and the layer does not see to it itself.
        bias_N: added to every row.
        adds_residual: whether it will be given residuals.
        wide: the output head, whose results may be float32.
    """
    kept = probe if options.batch_invariant else None
    if options.quantization is None:
        return make_linear(
            weight_NK, probe=kept, bias_N=bias_N, adds_residual=adds_residual, wide=wide
        )
    scheme = scheme_of(options.quantization)
    scheme = scheme.for_head() if wide else scheme.fitted(weight_NK.shape[1])
    return quantized_linear(
        round_weights(weight_NK, scheme),
        weight_NK.dtype,
        probe=kept,
        bias_N=bias_N,
        adds_residual=adds_residual,
        wide=wide,
    )
