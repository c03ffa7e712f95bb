"""Chains and trees of drafts weighed in one call into C (native/reject.h).

Of single rows it gives the distribution after temperature and filters.

The reference twins are `ops.rejection`, `ops.block_verification` and `ops.tree_rejection`.
Invariant: where the kernel decides, it decides what the twin decides with the same uniforms and
noise; a span with a test that rounding could turn it leaves to the twin.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from foretoken.kernels.library import Library
from foretoken.kernels.structures import REJECT_SPAN, FtRejectCall, address_of
from foretoken.ops.drawing import UNDECIDED, Drawing

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class RejectionInput(NamedTuple):
    """The drafts of one request: ft_reject_span without its place among the drafts."""

    key: int
    """`request_key` of its noise."""
    how: Drawing
    """Temperature and filters of all its rows."""
    position: int
    """How many tokens are committed."""
    row: int
    """First of its rows of logits."""
    drafted_row: int
    """First of its rows of draft distributions."""
    ids: Sequence[int]
    """Draft tokens; -1 is never accepted."""
    parents: Sequence[int] | None
    """For each node of a tree the one before it, as in `Tree.parents`; None: a chain."""


class RejectionResult(NamedTuple):
    """What became of one request's drafts."""

    path: tuple[int, ...]
    """The drafts that stay, by number from the root down; of a chain the first ones."""
    last: int
    """The token after them; UNDECIDED: nothing was decided."""


@final
class RejectKernel:
    """The calls; tensors lie on the CPU."""

    def __init__(self, library: Library) -> None:
        self._reject = library.function("ft_reject", (_PTR,))
        self._weigh = library.function(
            "ft_distributions", (ctypes.c_char_p, _I64, _PTR, _I64, _PTR), ctypes.c_int32
        )

    def distributions(self, logits_RV: Tensor, rows: bytes) -> Tensor | None:
        """softmax after temperature and filters, float32 [R, V]; None: a row cannot be weighed.

        Args:
            logits_RV: float32, edits applied, temperature and filters not.
            rows: R of `pack_rows`; their keys do not matter.
        """
        count, vocabulary = logits_RV.shape
        logits_RV = logits_RV.contiguous()
        probs_RV = torch.empty_like(logits_RV)
        done = self._weigh(rows, count, logits_RV.data_ptr(), vocabulary, probs_RV.data_ptr())
        return probs_RV if done else None

    def decide(
        self,
        logits_RV: Tensor,
        spans: Sequence[RejectionInput],
        probs_KV: Tensor | None,
        *,
        block: bool,
    ) -> list[RejectionResult]:
        """Test the drafts of each request; all are chains or all are trees.

        Args:
            logits_RV: float32, edits applied, temperature and filters not.
            spans: the requests.
            probs_KV: float32, what drafts were drawn from; None: they are one-hot.
            block: block verification, of trees traversal; else draft by draft.
        """
        packed, ids, parents = bytearray(), array("q"), array("q")
        for span in spans:
            packed += REJECT_SPAN.pack(
                span.key,
                *span.how,
                span.position,
                span.row,
                span.drafted_row,
                len(ids),
                len(span.ids),
            )
            ids.extend(span.ids)
            parents.extend(span.parents or ())
        logits_RV = logits_RV.contiguous()
        probs_KV = None if probs_KV is None else probs_KV.contiguous()
        count, drafts = len(spans), len(ids)
        found = array("q", bytes(8 * (2 * count + len(parents))))
        start = address_of(found)
        call = FtRejectCall(
            spans=bytes(packed),
            ids=address_of(ids),
            parents=address_of(parents) if parents else None,
            logits=logits_RV.data_ptr(),
            drafted=None if probs_KV is None else probs_KV.data_ptr(),
            kept=start,
            last=start + 8 * count,
            paths=start + 16 * count if parents else None,
            num_spans=count,
            vocabulary=logits_RV.shape[1],
            rule=int(block),
        )
        assert len(parents) in (0, drafts), (len(parents), drafts)
        self._reject(ctypes.addressof(call))
        results, first = [], 0
        for span, kept, last in zip(spans, found, found[count:], strict=False):
            at = 2 * count + first
            path = tuple(found[at : at + kept]) if parents else tuple(range(kept))
            results.append(RejectionResult(path if last != UNDECIDED else (), last))
            first += len(span.ids)
        return results
