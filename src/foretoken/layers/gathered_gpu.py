"""Matrices of a GPU's steps whose parts are shared out among the ranks of a group.

The segments of a matrix are what is shared: their sums belong to the shape alone, and whoever reads
them adds all in order. So the bits are those of one rank, for any number of ranks that divides them
(docs/gpu.md). What is exchanged is launched like a kernel and recorded with the rest of a step.
"""

from typing import final

import torch
from torch import Tensor

from foretoken.config.reader import require
from foretoken.distributed import Group
from foretoken.kernels.gpu_kernels import Devices, GpuKernels
from foretoken.ops.linear.gpu import GpuLinear


@final
class SegmentsLinear(GpuLinear):
    """A rank has some inputs, the segments over them, and the sums of all ranks."""

    def __init__(self, whole: GpuLinear, group: Group) -> None:
        """Keep this rank's segments.

        Raises:
            ConfigError: there are not equally many for each rank.
        """
        weights, size = whole.weights, group.size
        count = weights.segments
        shares = [ranks for ranks in range(1, count + 1) if count % ranks == 0]
        shape = f"{weights.outputs} x {weights.inputs}"
        allowed = f"one of {shares}, for a matrix of {shape} has {count} segments on a GPU"
        require("tensor_parallel_size", size, size in shares, allowed)
        own = weights.cut(group.rank, size)
        super().__init__(whole.kernels, own, out_dtype=whole.out_dtype, bias_N=whole.bias_N)
        self._group = group
        first = group.rank * (count // size) * weights.segment
        self.own_inputs = range(first, first + self.weights.inputs)

    @property
    def segments(self) -> int:
        """Of all ranks."""
        return self.weights.segments * self._group.size

    def num_parts(self, rows: int) -> int:
        """All of few rows; one where ranks add parts up for each other."""
        return 1 if self._exchanges(rows) else self.segments

    def _exchanges(self, rows: int) -> bool:
        return rows > self.kernels.few_rows and rows % self._group.size == 0

    def run(self, x_TK: Tensor, parts_PTN: Tensor) -> None:
        """Gather parts; of many rows each rank adds those of an equal share of them first, so that
        fewer bytes travel."""
        kernels, group, own, rows = self.kernels, self._group, self.weights.segments, len(x_TK)
        if not self._exchanges(rows):
            own_STN = parts_PTN.new_empty(own, rows, self.outputs)
            kernels.linear_splits(x_TK, self.weights, own_STN)
            kernels.gather(group, own_STN, parts_PTN.view(-1, *own_STN.shape))
            return
        given_RStN = parts_PTN.new_empty(group.size, own, rows // group.size, self.outputs)
        for x_tK, given_StN in zip(x_TK.chunk(group.size), given_RStN, strict=True):
            kernels.linear_splits(x_tK, self.weights, given_StN)
        found_RStN = torch.empty_like(given_RStN)
        kernels.exchange(group, given_RStN, found_RStN)
        sum_tN = parts_PTN.new_empty(found_RStN.shape[2:])
        kernels.add_parts(found_RStN.flatten(0, 1), None, None, sum_tN)
        kernels.gather(group, sum_tN, parts_PTN.view(-1, *sum_tN.shape))


@final
class OutputsLinear(GpuLinear):
    """A rank has some outputs over all inputs, and the results of all; one segment."""

    def __init__(self, own: GpuLinear, group: Group) -> None:
        """Share out what `own` makes a part of, as many outputs on each rank."""
        super().__init__(own.kernels, own.weights, out_dtype=own.out_dtype)
        self._group = group

    @property
    def outputs(self) -> int:
        """Of all ranks."""
        return self.weights.outputs * self._group.size

    def run(self, x_TK: Tensor, parts_PTN: Tensor) -> None:
        """Gather them, and put them side by side."""
        own_TN = own_columns(self._group, parts_PTN[0])
        self.run_own(x_TK, own_TN[None])
        gather_columns(self.kernels, self._group, own_TN, parts_PTN[0])


def own_columns(ranks: Devices | None, every_TN: Tensor) -> Tensor:
    """Room for this rank's share of equally many; alone it is all of that."""
    if ranks is None:
        return every_TN
    return every_TN.new_empty(len(every_TN), every_TN.shape[1] // ranks.size)


def gather_columns(
    kernels: GpuKernels, ranks: Devices | None, own_TN: Tensor, every_TN: Tensor
) -> None:
    """Those of all, side by side; alone there is nothing to do."""
    if ranks is None:
        return
    found_RTN = own_TN.new_empty(ranks.size, *own_TN.shape)
    kernels.gather(ranks, own_TN, found_RTN)
    for part_TN, to_TN in zip(found_RTN, every_TN.chunk(ranks.size, 1), strict=True):
        kernels.add_parts(part_TN[None], None, None, to_TN)
