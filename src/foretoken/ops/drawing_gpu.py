"""Rows of logits to tokens by the GPU's kernels; how rows are drawn is packed as for `DrawKernel`.

Greedy rows and rows without filters are chosen; a row with top-k, top-p or min-p is left to
`foretoken.ops.sampling`, as the kernel for the CPU leaves what it cannot decide.
"""

from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import GpuKernels
from foretoken.ops.drawing import PLAIN, UNDECIDED

_ROW: Final = np.dtype(
    [("key", "<u8"), ("temperature", "<f4"), ("min_p", "<f4"), ("top_p", "<f4"), ("top_k", "<i4")]
)


class Draws(NamedTuple):
    """How R rows are drawn."""

    keys_R2: npt.NDArray[np.int32]
    temperature_R: npt.NDArray[np.float32]
    filtered_R: npt.NDArray[np.bool_]
    """Whether ids are left out first."""

    def part(self, at: slice) -> "Draws":
        """Some of the rows."""
        return Draws(self.keys_R2[at], self.temperature_R[at], self.filtered_R[at])

    def padded(self, steps: int, width: int) -> "Draws":
        """The same rows of each of `steps` steps, and greedy ones behind them, `width` in all."""

        def wider(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
            rows = x.reshape(steps, -1, *x.shape[1:])
            more = [(0, 0), (0, width - rows.shape[1]), *[(0, 0)] * (rows.ndim - 2)]
            return np.pad(rows, more).reshape(steps * width, *x.shape[1:])

        return Draws(*map(wider, self))


def read_rows(rows: bytes) -> Draws:
    """What `pack_rows` packed."""
    read = np.frombuffer(rows, _ROW)
    open_R = (read["top_p"] == PLAIN.top_p) & (read["top_k"] == 0) & np.isneginf(read["min_p"])
    keys_R2 = np.ascontiguousarray(read["key"]).view(np.int32).reshape(-1, 2)
    return Draws(keys_R2, read["temperature"], (read["temperature"] > 0) & ~open_R)


@final
class GpuDraw:
    """The call."""

    def __init__(self, kernels: GpuKernels) -> None:
        """Draw with `kernels`."""
        self._kernels = kernels

    def __call__(self, logits_RV: Tensor, rows: bytes) -> list[int]:
        """The token of each row, or UNDECIDED; waits for the device once.

        Args:
            logits_RV: float32, edits applied, temperature and filters not.
            rows: R of `pack_rows`.
        """
        draws, device, count = read_rows(rows), logits_RV.device, logits_RV.shape[0]
        assert len(draws.temperature_R) == count, (len(rows), logits_RV.shape)
        how = np.concatenate((draws.keys_R2.ravel(), draws.temperature_R.view(np.int32)))
        keys, temperature = torch.from_numpy(how).to(device).split([2 * count, count])
        tokens_R = torch.empty(count, dtype=torch.int32, device=device)
        self._kernels.draw(
            logits_RV.contiguous(), keys.view(-1, 2), temperature.view(torch.float32), tokens_R
        )
        ids: list[int] = tokens_R.tolist()
        for row in draws.filtered_R.nonzero()[0]:
            ids[row] = UNDECIDED
        return ids
