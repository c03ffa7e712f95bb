"""A linear layer whose outputs are shared out among the ranks of a group.

Every output is one sum, in the order of its inputs, on one rank; what ranks exchange are finished
numbers. So the bits are those of one rank, for any number of ranks (docs/distributed.md).
"""

from typing import final

from torch import Tensor

from foretoken.distributed import Group
from foretoken.ops.linear import Linear


@final
class GatheredLinear(Linear):
    """y = x W^T (+ bias) (+ residual), the same on every rank; all of them must call it."""

    def __init__(self, group: Group, own: Linear, outputs: range, blocks: int = 0) -> None:
        """Share a layer out.

        Args:
            group: the ranks.
            own: this rank's outputs, over all inputs.
            outputs: which those are.
            blocks: x [T, K] is K columns in so many equal blocks, of each of which a rank has its
                share; 0: every rank has all of x.
        """
        self._group, self._own, self._outputs, self._blocks = group, own, outputs, blocks

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """Gather x if ranks have shares of it, multiply, gather y."""
        if self._blocks:
            shares = x_TK.unflatten(1, (self._blocks, -1))
            x_TK = self._group.all_gather(shares, 2).flatten(1)
        if residual_TN is not None:
            residual_TN = residual_TN[:, self._outputs.start : self._outputs.stop]
        return self._group.all_gather(self._own(x_TK, residual_TN), 1)

    @property
    def kept(self) -> str:
        """As its own part does."""
        return self._own.kept

    @property
    def fixed_bits(self) -> int:
        """As its own part."""
        return self._own.fixed_bits
