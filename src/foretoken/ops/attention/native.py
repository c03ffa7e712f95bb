"""Attention by the compiled kernel: spans and prompt chunks over pages read where they lie.

A row's bits depend on its position, keys and values alone, by the kernel's order of arithmetic
(native/attention.h), so nothing is probed or padded. `ReferenceAttention` is its twin.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import final

from torch import Tensor

from foretoken.kernels.library import Library
from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import (
    UNIT_INTS,
    FtAttentionCall,
    FtAttentionShape,
    address_of,
)
from foretoken.ops.attention.base import Attend, Attention, Geometry, SpanWindow
from foretoken.ops.row_operations import STORED_TYPES

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def _shape_of(geometry: Geometry) -> FtAttentionShape:
    """The C view of `geometry`."""
    return FtAttentionShape(
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.page_size,
        TYPES[geometry.dtype],
        STORED_TYPES[geometry.store_dtype],
        geometry.window or 0,
        geometry.score_scale,
        geometry.softcap or 0.0,
    )


@final
class NativeAttention(Attention):
    """The kernel of native/attention.c."""

    def __init__(self, geometry: Geometry, library: Library) -> None:
        """Serve `geometry`, whose type is one of `kernels.linear.TYPES`."""
        self.library = library
        self._geometry = geometry
        self._shape = _shape_of(geometry)
        pointers = (_PTR, _PTR, _I32, _PTR, _I64)
        self._plan = library.function("ft_attention_plan", pointers, _I64)
        self._run = library.function("ft_attention_run", (_PTR, _PTR, _I64))

    @property
    def address(self) -> int:
        """Address of its ft_attention_shape; valid while this object lives."""
        return ctypes.addressof(self._shape)

    @property
    def units_a_row(self) -> int:
        """Most units of work that a row is cut into."""
        return self._geometry.num_kv_heads

    def plan(self, spans: Sequence[SpanWindow]) -> Attend:
        """Cut the spans into units of work for the threads that PyTorch may use now."""
        plan, store_dtype = self.layout(spans), self._geometry.store_dtype

        def attend(q_THh: Tensor, layer_SKh: Tensor, sinks_H: Tensor | None = None, /) -> Tensor:
            heads, size = q_THh.shape[1:]
            if q_THh.stride()[1:] != (size, 1):
                q_THh = q_THh.contiguous()
            assert layer_SKh.dtype == store_dtype, (layer_SKh.dtype, store_dtype)
            assert layer_SKh.stride()[1:] == (layer_SKh.shape[2], 1), layer_SKh.stride()
            out_TD = q_THh.new_empty(q_THh.shape[0], heads * size)
            call = plan.call
            call.q, call.q_stride = q_THh.data_ptr(), q_THh.stride(0)
            call.kv, call.kv_stride = layer_SKh.data_ptr(), layer_SKh.stride(0)
            call.out, call.out_stride = out_TD.data_ptr(), heads * size
            call.sinks = None if sinks_H is None else sinks_H.data_ptr()
            self._run(ctypes.addressof(call), plan.units, plan.num_units)
            return out_TD

        return attend

    def layout(self, spans: Sequence[SpanWindow]) -> "AttentionPlan":
        """The step as the kernel wants it; q, kv and out are still to be set."""
        rows, pages, paths = array("i"), array("i"), array("i")
        at = most_units = 0
        for span in spans:
            tree = len(paths) if span.paths is not None else -1
            rows.extend((at, span.num_tokens, span.start, len(pages), tree, span.known))
            pages.extend(span.page_table)
            for path in span.paths or ():
                filling = span.known + span.num_tokens - len(path)
                paths.extend((len(path) - 1, *path, *(0,) * filling))
            at += span.num_tokens
            most_units += span.num_tokens
        capacity = most_units * self.units_a_row
        units = array("i", bytes(4 * UNIT_INTS * capacity))
        shape, spans_at = ctypes.addressof(self._shape), address_of(rows)
        count = self._plan(shape, spans_at, len(spans), address_of(units), capacity)
        assert count <= capacity, (count, capacity)
        call = FtAttentionCall(
            shape=shape,
            spans=spans_at,
            pages=address_of(pages),
            paths=address_of(paths) if paths else None,
            num_spans=len(spans),
        )
        return AttentionPlan(call, address_of(units), count, (rows, pages, paths, units))


@final
class AttentionPlan:
    """A step's spans and units in C's memory, which lives as long as this object."""

    __slots__ = ("_kept", "call", "num_units", "units")

    def __init__(
        self, call: FtAttentionCall, units: int, num_units: int, kept: tuple["array[int]", ...]
    ) -> None:
        self.call, self.units, self.num_units, self._kept = call, units, num_units, kept
