"""Rows of logits to tokens by the GPU's kernels; rows are packed as for `DrawKernel`."""

from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import Draw, GpuKernels
from foretoken.ops.drawing import PLAIN

_ROW: Final = np.dtype(
    [("key", "<u8"), ("temperature", "<f4"), ("min_p", "<f4"), ("top_p", "<f4"), ("top_k", "<i4")]
)


class Draws(NamedTuple):
    """How R rows are drawn."""

    keys_R2: npt.NDArray[np.int32]
    how_R4: npt.NDArray[np.float32]
    """As `GpuKernels.keep` wants it."""

    @property
    def filtered(self) -> bool:
        """Whether ids of some rows are left out first."""
        open_R = (self.how_R4[:, 1:] == (PLAIN.log_min_p, PLAIN.top_p, PLAIN.top_k)).all(1)
        return bool(((self.how_R4[:, 0] > 0) & ~open_R).any())

    def part(self, at: slice) -> "Draws":
        """Some of the rows."""
        return Draws(self.keys_R2[at], self.how_R4[at])

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
    keys_R2 = np.ascontiguousarray(read["key"]).view(np.int32).reshape(-1, 2)
    how = [read[name].astype(np.float32) for name in ("temperature", "min_p", "top_p", "top_k")]
    return Draws(keys_R2, np.stack(how, 1))


def choose(
    kernels: GpuKernels,
    logits_RV: Tensor,
    how: tuple[Tensor, Tensor],
    tokens_R: Tensor,
    names_V: Tensor | None = None,
    *,
    filtered: bool,
) -> None:
    """Draw a token of each row, from what filters leave; `how` is keys and `how_R4` of `draw`."""
    kept_R3 = None
    if filtered:
        kept_R3 = logits_RV.new_empty(len(logits_RV), 3)
        kernels.keep(logits_RV, how[1], kept_R3)
    kernels.draw(Draw(logits_RV, *how, tokens_R, names_V, kept_R3))


@final
class GpuDraw:
    """The call."""

    def __init__(self, kernels: GpuKernels) -> None:
        """Draw with `kernels`."""
        self._kernels = kernels

    def __call__(self, logits_RV: Tensor, rows: bytes) -> list[int]:
        """The token of each row; waits for the device once.

        Args:
            logits_RV: float32, edits applied, temperature and filters not.
            rows: R of `pack_rows`.
        """
        draws, device, count = read_rows(rows), logits_RV.device, logits_RV.shape[0]
        assert len(draws.how_R4) == count, (len(rows), logits_RV.shape)
        packed = np.concatenate((draws.how_R4.view(np.int32), draws.keys_R2), 1)
        how_R4, keys_R2 = torch.from_numpy(packed).to(device).split([4, 2], 1)
        how = keys_R2.contiguous(), how_R4.contiguous().view(torch.float32)
        tokens_R = torch.empty(count, dtype=torch.int32, device=device)
        filtered, logits_RV = draws.filtered, logits_RV.contiguous()
        choose(self._kernels, logits_RV, how, tokens_R, filtered=filtered)
        ids: list[int] = tokens_R.tolist()
        return ids
