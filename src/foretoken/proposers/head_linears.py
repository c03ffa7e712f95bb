"""The linears of a head network, put on the project's kernels.

Owns the exchange only; a network that runs after it is for serving, not for training. Drafts need
no promise about bits, so nothing is probed.
"""

from typing import final

from torch import Tensor, nn

from foretoken.ops.linear import make_linear


@final
class ServedLinear(nn.Module):
    """x W^T + b by the fastest linear for these weights, which it packs and does not keep."""

    def __init__(self, trained: nn.Linear) -> None:
        """Take over the weights of `trained`."""
        super().__init__()
        bias_N = None if trained.bias is None else trained.bias.detach()
        self._linear = make_linear(trained.weight.detach(), probe=None, bias_N=bias_N)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        flat_TK = x.reshape(-1, x.shape[-1])
        return self._linear(flat_TK).view(*x.shape[:-1], -1)


def serve_linears(net: nn.Module) -> None:
    """Exchange every linear of `net` for one that serves."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, ServedLinear(child))
