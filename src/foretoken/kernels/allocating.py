"""The search for a step's plan, in one call into C (native/allocate.h).

The reference twin is `foretoken.control.adaptive.allocation.allocate`. Invariant: both find the
same lengths, and the same numbers to the last bit. Owns the call's buffers; one object is for one
thread.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from foretoken.control.adaptive.allocation import Allocation, Counts, DraftOption, StepOptions
from foretoken.control.learned.regression import Floats
from foretoken.kernels.library import Library
from foretoken.kernels.structures import FtAllocateCall, FtDraftOption


@final
class AllocationKernel:
    """The call. A `foretoken.control.adaptive.allocation.Search`."""

    __slots__ = ("_address", "_call", "_counts_N", "_drafter_N", "_options", "_run")

    def __init__(self, library: Library) -> None:
        self._run = library.function("ft_allocate", (ctypes.c_void_p,), ctypes.c_int32)
        self._call = FtAllocateCall()
        self._address = ctypes.addressof(self._call)
        self._make_room(0, 0)

    def __call__(self, step: StepOptions, options: Sequence[DraftOption]) -> Allocation:
        """The plan with most expected tokens per second; all options are equally wide."""
        count = len(step.bound_s)
        most = options[0].survival_NK.shape[1] if options else 0
        assert all(one.survival_NK.shape == (count, most) for one in options), "unequal options"
        if count > len(self._counts_N):
            self._make_room(2 * count, len(options))
        if len(options) > len(self._options):
            self._make_room(len(self._counts_N), len(options))
        call = self._call
        # Copies, where an array is no row of doubles, have to live until the call is over.
        kept = [_floats(one) for one in (step.rows_s, step.bound_s, step.token_s)]
        call.rows_s, call.bound_s, call.token_s = (one.ctypes.data for one in kept)
        call.rows, call.sequences = len(step.rows_s), count
        call.drafts, call.num_options = most, len(options)
        call.plain_s, call.margin = step.plain_s, step.margin
        for record, option in zip(self._options, options, strict=False):
            kept += _fill(record, option)
        done = self._run(self._address)
        assert done, f"{count} x {most} slots of {len(options)} options, {len(step.rows_s)} rows"
        return Allocation(
            lengths_N=self._counts_N[:count].copy(),
            drafter_N=self._drafter_N[:count].copy(),
            seconds=call.seconds,
            tokens=call.tokens,
            unguarded=call.unguarded,
            depth=call.depth,
        )

    def _make_room(self, sequences: int, options: int) -> None:
        """Buffers for so many."""
        self._options = (FtDraftOption * options)()
        self._counts_N: Counts = np.empty(sequences, np.int64)
        self._drafter_N: Counts = np.empty(sequences, np.int64)
        call = self._call
        call.options = ctypes.addressof(self._options)
        call.counts, call.drafter = self._counts_N.ctypes.data, self._drafter_N.ctypes.data


def _fill(record: FtDraftOption, option: DraftOption) -> list[NDArray[Any]]:
    """Write the option down; returns what has to be kept as long as that is used."""
    kept: list[NDArray[Any]] = [
        _floats(one) for one in (option.survival_NK, option.depth_s, option.start_s)
    ]
    record.survival, record.depth_s, record.start_s = (one.ctypes.data for one in kept)
    record.slot_s = option.slot_s
    return kept


def _floats(array: Floats) -> Floats:
    """As C has rows of doubles."""
    return np.ascontiguousarray(array, np.float64)
