"""The linears of a head network, put on the project's kernels.

Owns the exchange, and how weights are rounded where that was asked for; a network that runs after
it is for serving, not for training. Drafts need no promise about bits, so nothing is probed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from foretoken.backend import LinearSpec, backend_for
from foretoken.ops.linear import KernelLinear, Linear


@final
@dataclass(frozen=True, slots=True)
class HeadLinears:
    """Makes the linears of a head."""

    quantization: str | None = None
    """A name of `config.quantization.QUANTIZATIONS`; None: weights stay as they are."""
    x_bits: int = 16
    """As of `LinearSpec`."""

    def __call__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        adds_residual: bool = False,
        top: bool = False,
    ) -> Linear:
        """The fastest for these weights; of a `top`, which makes logits, results are float32 where
        that costs nothing, and weights never below 8 bits."""
        return backend_for(weight_NK.device).linear(
            LinearSpec(
                weights=weight_NK,
                dtype=weight_NK.dtype,
                bias_N=bias_N,
                adds_residual=adds_residual,
                is_head=top,
                quantization=self.quantization,
                x_bits=self.x_bits,
            )
        )


@final
class ServedLinear(nn.Module):
    """x W^T + b by a linear made of a trained one's weights, which it packs and does not keep."""

    def __init__(self, trained: nn.Linear, make: HeadLinears, *, top: bool) -> None:
        """Take over the weights of `trained`; the rest as for `HeadLinears`."""
        super().__init__()
        bias_N = None if trained.bias is None else trained.bias.detach()
        self.linear: Linear = make(trained.weight.detach(), bias_N, top=top)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        flat_TK = x.reshape(-1, x.shape[-1])
        return self.linear(flat_TK).view(*x.shape[:-1], -1)


def serve_linears(
    net: nn.Module, tops: Iterable[nn.Module] = (), make: HeadLinears | None = None
) -> None:
    """Exchange every linear of `net` for one that serves; those of `tops` make logits."""
    make = make or HeadLinears()
    highest = {id(module) for top in tops for module in top.modules()}
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, ServedLinear(child, make, top=id(child) in highest))


def kernel_of(
    served: nn.Module | None, dtype: torch.dtype, out: torch.dtype
) -> KernelLinear | None:
    """The kernel behind a linear that serves, from `dtype` to `out`; None: it is another."""
    linear = served.linear if isinstance(served, ServedLinear) else None
    if isinstance(linear, KernelLinear) and (linear.dtype, linear.out_dtype) == (dtype, out):
        return linear
    return None
