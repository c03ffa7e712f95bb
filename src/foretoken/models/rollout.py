"""Greedy drafting of several tokens in one foreign call (native/rollout.h).

A one-layer draft model spends more time in Python between tokens than in its arithmetic. Owns the
buffers of a call, kept between calls; the layers, their order and roundings are `CompiledLayers`'.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from foretoken.kernels.library import find_library
from foretoken.kv.store import KVStore
from foretoken.layers.norm import RMSNorm
from foretoken.models.compiled import CompiledLayers
from foretoken.models.tensors import SpanLayout
from foretoken.ops.linear import KernelLinear, Linear

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Model(ctypes.Structure):
    """ft_rollout_model."""

    _fields_ = [
        *((name, _PTR) for name in ("decoder", "embedding", "norm", "head", "ids")),
        ("num_layers", _I32),
    ]


@final
class GreedyRollout:
    """A decoder bound to the loop. `compile_rollout` makes it, where every part has its kernel."""

    def __init__(
        self,
        layers: CompiledLayers,
        embedding_VD: Tensor,
        norm: RMSNorm,
        head: KernelLinear,
        ids_N: Tensor | None = None,
    ) -> None:
        """Bind the parts, which must stay as they are; `ids_N` names the head's outputs, int64."""
        library = find_library()
        assert library is not None, "the layers are compiled"
        self._kept = (layers, embedding_VD, norm, head, ids_N)
        self._layers = layers
        self._page_size = layers.page_size
        self._model = _Model(
            decoder=layers.address,
            embedding=embedding_VD.data_ptr(),
            norm=norm.weight_D.data_ptr(),
            head=head.address,
            ids=None if ids_N is None else ids_N.data_ptr(),
            num_layers=layers.num_layers,
        )
        pointers = (_PTR, _PTR, _PTR, _PTR, _I32, _PTR, _PTR, _PTR, _PTR, _I64)
        self._run: Any = library.function("ft_rollout", pointers)
        self._x = embedding_VD.new_empty(0, embedding_VD.shape[1])
        self._logits = embedding_VD.new_empty(0, head.columns, dtype=head.out_dtype)

    def __call__(
        self,
        layouts: Sequence[SpanLayout],
        tokens: Sequence[int],
        steps: int,
        store: KVStore,
        stream_BD: Tensor | None = None,
    ) -> list[list[int]]:
        """Draft `steps` tokens for each sequence.

        Args:
            layouts: where the token to be fed stands, one row each; the pages must cover `steps`
                positions from there.
            tokens: the newest token of each sequence, fed first.
            steps: how many tokens.
            store: keys and values.
            stream_BD: where the stream of a head begins that continues its own outputs, with the
                embedded tokens beside it; changed. None: it begins with those.

        Returns:
            The tokens of each sequence, [B][steps].
        """
        rows = len(layouts)
        if rows > self._x.shape[0]:
            self._x = self._x.new_empty(rows, self._x.shape[1])
            self._logits = self._logits.new_empty(rows, self._logits.shape[1])
        positions = array("q", (layout.start for layout in layouts))
        slots, ids = array("q", bytes(8 * rows)), array("q", tokens)
        ids.frombytes(bytes(8 * rows * steps))
        plan = self._layers.plan_rows(layouts, store)
        plan.step.x = self._x.data_ptr()
        if stream_BD is not None:
            assert stream_BD.is_contiguous() and stream_BD.shape[0] == rows, stream_BD.shape
            plan.step.x, plan.step.beside = stream_BD.data_ptr(), self._x.data_ptr()
        plan.step.positions, plan.step.slots = _address(positions), _address(slots)
        self._run(
            ctypes.addressof(self._model),
            ctypes.addressof(plan.step),
            plan.spans,
            plan.pages,
            self._page_size,
            _address(positions),
            _address(slots),
            _address(ids),
            self._logits.data_ptr(),
            steps,
        )
        return [ids[rows + row :: rows].tolist() for row in range(rows)]


def compile_rollout(
    layers: CompiledLayers | None,
    embedding_VD: Tensor,
    norm: RMSNorm,
    head: Linear,
    ids_N: Tensor | None = None,
) -> GreedyRollout | None:
    """The loop, or None if some part has no kernel."""
    if layers is None or layers.num_kinds != 1 or not isinstance(head, KernelLinear):
        return None
    if head.dtype != embedding_VD.dtype or head.out_dtype != torch.float32:
        return None
    if not layers.shares_norm(norm) or not embedding_VD.is_contiguous():
        return None
    return GreedyRollout(layers, embedding_VD, norm, head, ids_N)


def _address(values: "array[int]") -> int:
    return values.buffer_info()[0]
