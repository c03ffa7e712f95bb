"""Linear layers, and mixtures of experts, whose outputs are shared out among the ranks of a group.

Every output is one sum, in the order of its inputs, on one rank; what ranks exchange are finished
numbers. So the bits are those of one rank, for any number of ranks (docs/serving.md).
"""

from typing import final

import torch
from torch import Tensor

from foretoken.distributed import Group
from foretoken.ops.linear import Linear
from foretoken.ops.mixture_kernel import ExpertCounter, MixtureKernel


@final
class GatheredLinear(Linear):
    """y = x W^T (+ bias) (+ residual), the same on every rank; all of them must call it."""

    def __init__(
        self, group: Group, own: Linear, outputs: range, blocks: int = 0, copies: int = 1
    ) -> None:
        """Share a layer out.

        Args:
            group: the ranks.
            own: this rank's outputs, over all inputs.
            outputs: which those are.
            blocks: x is [T, K] in equal blocks of columns; a rank has so many of them, and of each
                its share. 0: every rank has all of x.
            copies: neighbouring ranks that have the same share of blocks, and different blocks.
        """
        self._group, self._own, self._outputs = group, own, outputs
        self._blocks, self._copies = blocks, copies

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """Gather x if ranks have shares of it, multiply, gather y."""
        if self._blocks:
            x_TK = self._gathered(x_TK.unflatten(1, (self._blocks, -1)))
        if residual_TN is not None:
            residual_TN = residual_TN[:, self._outputs.start : self._outputs.stop]
        return self._group.all_gather(self._own(x_TK, residual_TN), 1)

    def _gathered(self, x_TBk: Tensor) -> Tensor:
        parts, copies = self._group.parts(x_TBk), self._copies
        if copies > 1:
            groups = (parts[at : at + copies] for at in range(0, len(parts), copies))
            parts = [torch.cat(group, 1) for group in groups]
        return torch.cat(parts, 2).flatten(1)

    @property
    def own(self) -> Linear:
        """This rank's part."""
        return self._own

    @property
    def kept(self) -> str:
        """As its own part does."""
        return self._own.kept

    @property
    def fixed_bits(self) -> int:
        """As its own part."""
        return self._own.fixed_bits


@final
class GatheredMixture:
    """A mixture whose matrices are shared out among ranks, all of which must call it."""

    def __init__(self, group: Group, own: MixtureKernel, outputs: range) -> None:
        """Share a mixture out.

        Args:
            group: the ranks.
            own: of this rank's outputs.
            outputs: which of the stream those are.
        """
        self._group, self._own, self._outputs = group, own, outputs

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        *,
        by_TD: Tensor | None = None,
        counter: ExpertCounter | None = None,
    ) -> Tensor:
        """As `MixtureKernel`: gather what is gated, then the results."""
        routes, *own = self._own.gate(x_TD, by_TD, counter)
        gated, shared = (self._group.all_gather(one, 1) if one.shape[1] else one for one in own)
        if residual_TD is not None:
            residual_TD = residual_TD[:, self._outputs.start : self._outputs.stop]
        return self._group.all_gather(self._own.finish(routes, gated, shared, residual_TD), 1)
