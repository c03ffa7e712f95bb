"""The linears of a head network, put on the project's kernels.

Owns the exchange, and how weights are rounded where that was asked for; a network that runs after
it is for serving, not for training. Drafts need no promise about bits, so nothing is probed. What
lies in blocks in the head's file is packed as it lies there, beside its floats, which serve
wherever there is no kernel.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from foretoken.backend import LinearSpec, backend_for
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.quant import Weights
from foretoken.quant.arrange import change_columns, change_rows, join_rows

_STORED = "stored_weights"
"""Attribute of a linear map with its weights as they lie in the file."""
Change = Callable[[Tensor], Tensor]


def keep_stored(net: nn.Module, stored: Mapping[str, Weights]) -> None:
    """Let the linear maps of `net` know how the file has their weights.

    Args:
        net: with their floats in place.
        stored: by the name of the floats.
    """
    for name, weights in stored.items():
        module = net.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, nn.Linear):
            setattr(module, _STORED, weights)


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
        weights: Weights,
        bias_N: Tensor | None = None,
        *,
        like: Tensor | None = None,
        adds_residual: bool = False,
        top: bool = False,
    ) -> Linear:
        """The fastest for these weights; of a `top`, which makes logits, results are float32 where
        that costs nothing, and weights never below 8 bits.

        Args:
            weights: [N, K].
            bias_N: in the type of rows.
            like: in the type and on the device of rows; None: the weights, which are floats.
            adds_residual: whether it will be given residuals.
            top: whether it makes logits.
        """
        if like is None:
            assert isinstance(weights, Tensor), type(weights)
            like = weights
        return backend_for(like.device).linear(
            LinearSpec(
                weights=weights,
                dtype=like.dtype,
                bias_N=bias_N,
                adds_residual=adds_residual,
                is_head=top,
                quantization=self.quantization,
                x_bits=self.x_bits,
            )
        )

    def of(
        self,
        maps: Sequence[nn.Linear],
        bias_N: Tensor | None = None,
        *,
        first: Change | None = None,
        adds_residual: bool = False,
        top: bool = False,
    ) -> Linear:
        """One for several maps of the same rows, one over the other.

        Args:
            maps: as they were trained or read.
            bias_N: of all of them.
            first: reorders the outputs of the first.
            adds_residual, top: as of a call.
        """
        like = maps[0].weight.detach()
        parts = [self._stored(one) for one in maps]
        if first is not None:
            parts[0] = change_rows(parts[0], first)
        joined = join_rows(parts)
        if len(joined) > 1:
            floats = [one.weight.detach() for one in maps]
            floats[0] = floats[0] if first is None else first(floats[0])
            joined = [torch.cat(floats)]
        return self(joined[0], bias_N, like=like, adds_residual=adds_residual, top=top)

    def back(self, one: nn.Linear, change: Change, width: int) -> Linear:
        """One that adds to a residual, its inputs reordered in blocks of `width`."""
        floats, bias_N = one.weight.detach(), None if one.bias is None else one.bias.detach()
        weights = change_columns(self._stored(one), change, width)
        if weights is None:
            weights = change_columns(floats, change, width)
        assert weights is not None, "floats have no groups"
        return self(weights, bias_N, like=floats, adds_residual=True)

    def _stored(self, one: nn.Linear) -> Weights:
        """Its weights as the file has them where kernels do, and nobody wants them otherwise."""
        floats: Tensor = one.weight.detach()
        stored: Weights | None = getattr(one, _STORED, None)
        wanted = self.quantization is None and backend_for(floats.device).library is not None
        return stored if stored is not None and wanted else floats


@final
class ServedLinear(nn.Module):
    """x W^T + b by a linear made of a trained one's weights, which it packs and does not keep."""

    def __init__(self, trained: nn.Linear, make: HeadLinears, *, top: bool) -> None:
        """Take over the weights of `trained`; the rest as for `HeadLinears`."""
        super().__init__()
        bias_N = None if trained.bias is None else trained.bias.detach()
        self.linear: Linear = make.of([trained], bias_N, top=top)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        flat_TK = x.reshape(-1, x.shape[-1])
        return self.linear(flat_TK).view(*x.shape[:-1], -1)


def serve_linears(
    net: nn.Module,
    tops: Iterable[nn.Module] = (),
    make: HeadLinears | None = None,
    *,
    tops_only: bool = False,
) -> None:
    """Exchange every linear of `net`, or only `tops`, which make logits, for one that serves."""
    make = make or HeadLinears()
    highest = {id(module) for top in tops for module in top.modules()}
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            top = id(child) in highest
            if isinstance(child, nn.Linear) and (top or not tops_only):
                setattr(parent, name, ServedLinear(child, make, top=top))


def served_by(module: nn.Module | None) -> Linear | None:
    """The linear that serves in the place of a trained one; None: none does."""
    return module.linear if isinstance(module, ServedLinear) else None


def kernel_of(
    served: nn.Module | None, dtype: torch.dtype, out: torch.dtype
) -> KernelLinear | None:
    """The kernel behind a linear that serves, from `dtype` to `out`; None: it is another."""
    linear = served_by(served)
    if isinstance(linear, KernelLinear) and (linear.dtype, linear.out_dtype) == (dtype, out):
        return linear
    return None
