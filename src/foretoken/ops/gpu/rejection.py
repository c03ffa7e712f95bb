"""Chains of drafts weighed by the GPU's kernels, and distributions of single rows.

Numbers of all chains are one copy to the device, and what was decided is one copy back. Trees are
left to `ops.tree_rejection`, as are chains with a test that rounding could turn.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import Drafted, GpuKernels
from foretoken.ops.drawing import UNDECIDED, pack_rows
from foretoken.ops.gpu.drawing import read_rows
from foretoken.ops.native_rejection import RejectionInput, RejectionResult
from foretoken.ops.noise import Stream, row_key, uniform


@final
class GpuReject:
    """The calls; twin of `RejectKernel`."""

    def __init__(self, kernels: GpuKernels) -> None:
        """Weigh with `kernels`."""
        self._kernels = kernels

    def distributions(self, logits_RV: Tensor, rows: bytes) -> Tensor:
        """softmax after temperature and filters, float32 [R, V]; NaN of a row without any id.

        Args:
            logits_RV: float32, edits applied, temperature and filters not.
            rows: R of `pack_rows`, none greedy; their keys do not matter.
        """
        how_R4 = torch.from_numpy(read_rows(rows).how_R4).to(logits_RV.device)
        kept_R3, logits_RV = torch.empty_like(how_R4[:, :3]), logits_RV.contiguous()
        self._kernels.keep(logits_RV, how_R4, kept_R3)
        scaled_RV = logits_RV / how_R4[:, :1]
        best_R1, mass_R1, least_R1 = kept_R3.split(1, 1)
        probs_RV: Tensor = (scaled_RV - best_R1).exp() / mass_R1
        return probs_RV.masked_fill_(scaled_RV < least_R1, 0.0)

    def decide(
        self,
        logits_RV: Tensor,
        spans: Sequence[RejectionInput],
        probs_KV: Tensor | None,
        *,
        block: bool,
    ) -> list[RejectionResult]:
        """Test the drafts of each request: see `RejectKernel.decide`."""
        if any(span.parents is not None for span in spans):
            return [RejectionResult((), UNDECIDED)] * len(spans)
        packed, uniforms, ids = list[bytes](), list[float](), list[int]()
        places = list[tuple[int, int, int, int]]()
        for span in spans:
            key, start, count = span.key, span.position, len(span.ids)
            # What is tested as a block looks at uniforms behind the draft that it rejects.
            anchor = start if block else 0
            places.append((len(ids), count, span.row, span.drafted_row))
            uniforms += (
                uniform(row_key(key, start + at, Stream.ACCEPT, anchor)) for at in range(count)
            )
            ids += span.ids
            keys = [row_key(key, start + at, Stream.RECOVER) for at in range(count)]
            keys.append(row_key(key, start + count, Stream.TARGET))
            packed.append(pack_rows(keys, span.how))
        draws = read_rows(b"".join(packed))
        assert len(draws.how_R4) == len(logits_RV), (len(draws.how_R4), logits_RV.shape)
        parts = (
            np.array(uniforms).view(np.int32),
            draws.how_R4.view(np.int32),
            draws.keys_R2,
            np.array(places, np.int32),
            np.array(ids, np.int32),
        )
        # Each begins at a multiple of 16 bytes, so that kernels need no variants.
        flat = [np.pad(part.ravel(), (0, -part.size % 4)) for part in parts]
        numbers = torch.from_numpy(np.concatenate(flat)).to(logits_RV.device)
        pieces = zip(numbers.split([part.size for part in flat]), parts, strict=True)
        uniforms_K, how, keys_P, spans_S, ids_K = (piece[: part.size] for piece, part in pieces)
        drafted = Drafted(
            logits_PV=logits_RV.contiguous(),
            how_P4=how.view(torch.float32).view(-1, 4),
            keys_P2=keys_P.view(-1, 2),
            probs_XV=None if probs_KV is None else probs_KV.contiguous(),
            spans_S4=spans_S.view(-1, 4),
            ids_K=ids_K,
            uniforms_K=uniforms_K.view(torch.float64),
            most=max(len(span.ids) for span in spans),
        )
        found_S2 = spans_S.new_empty(len(spans), 2)
        self._kernels.accept(drafted, found_S2, block=block)
        found: list[list[int]] = found_S2.tolist()
        return [
            RejectionResult(tuple(range(stays)) if last != UNDECIDED else (), last)
            for stays, last in found
        ]
