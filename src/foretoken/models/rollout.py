"""Drafting of several tokens in one foreign call (native/rollout.h).

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
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.drawing import BEST, pack_rows
from foretoken.ops.linear import KernelLinear, Linear

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Model(ctypes.Structure):
    """ft_rollout_model."""

    _fields_ = [
        *((name, _PTR) for name in ("decoder", "embedding", "norm", "head", "ids")),
        ("num_layers", _I32),
    ]


class _Draws(ctypes.Structure):
    """ft_rollout_draws."""

    _fields_ = [
        ("rows", ctypes.c_char_p),
        *((name, _PTR) for name in ("tokens", "logits")),
        ("keeps_logits", _I64),
    ]


def plan_best(sequences: int, steps: int) -> RolloutPlan:
    """`steps` tokens of each sequence, each the best by the raw logits."""
    rows = pack_rows((0,) * (sequences * steps), BEST)
    return RolloutPlan(steps=steps, rows=rows, keeps_logits=False, best=True)


@final
class CompiledRollout:
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
        pointers = (_PTR, _PTR, _PTR, _PTR, _I32, _PTR, _PTR, _PTR, _I64)
        self._run: Any = library.function("ft_rollout", pointers, _I64)
        self._x = embedding_VD.new_empty(0, embedding_VD.shape[1])
        self._logits_BV = embedding_VD.new_empty(0, head.columns, dtype=head.out_dtype)

    def __call__(
        self,
        layouts: Sequence[SpanLayout],
        tokens: Sequence[int],
        plan: RolloutPlan,
        store: KVStore,
        stream_BD: Tensor | None = None,
    ) -> RolledOut:
        """Draft up to `plan.steps` tokens for each sequence.

        Args:
            layouts: where the token to be fed stands, one row each; the pages must cover as many
                positions from there as there are steps.
            tokens: the newest token of each sequence, fed first.
            plan: how many tokens, and how each is chosen.
            store: keys and values.
            stream_BD: where the stream of a head begins that continues its own outputs, with the
                embedded tokens beside it; changed. None: it begins with those.
        """
        rows, steps = len(layouts), plan.steps
        if rows > self._x.shape[0]:
            self._x = self._x.new_empty(rows, self._x.shape[1])
            self._logits_BV = self._logits_BV.new_empty(rows, self._logits_BV.shape[1])
        kept_KV = self._logits_BV
        if plan.keeps_logits:
            kept_KV = kept_KV.new_empty(steps * rows, kept_KV.shape[1])
        positions = array("q", (layout.start for layout in layouts))
        slots, ids = array("q", bytes(8 * rows)), array("q", tokens)
        ids.frombytes(bytes(8 * rows * steps))
        made = self._layers.plan_rows(layouts, store)
        made.step.x = self._x.data_ptr()
        if stream_BD is not None:
            assert stream_BD.is_contiguous() and stream_BD.shape[0] == rows, stream_BD.shape
            made.step.x, made.step.beside = stream_BD.data_ptr(), self._x.data_ptr()
        made.step.positions, made.step.slots = _address(positions), _address(slots)
        draws = _Draws(
            rows=plan.rows,
            tokens=_address(ids),
            logits=kept_KV.data_ptr(),
            keeps_logits=plan.keeps_logits,
        )
        done = self._run(
            ctypes.addressof(self._model),
            ctypes.addressof(made.step),
            made.spans,
            made.pages,
            self._page_size,
            _address(positions),
            _address(slots),
            ctypes.addressof(draws),
            steps,
        )
        end = rows * (done + 1)
        return RolledOut(
            ids=[ids[rows + row : end : rows].tolist() for row in range(rows)],
            logits_KV=kept_KV[: rows * done] if plan.keeps_logits else None,
        )


def compile_rollout(
    layers: CompiledLayers | None,
    embedding_VD: Tensor,
    norm: RMSNorm,
    head: Linear,
    ids_N: Tensor | None = None,
) -> CompiledRollout | None:
    """The loop, or None if some part has no kernel."""
    if layers is None or layers.num_kinds != 1 or not isinstance(head, KernelLinear):
        return None
    if head.dtype != embedding_VD.dtype or head.out_dtype != torch.float32:
        return None
    if not layers.shares_norm(norm) or not embedding_VD.is_contiguous():
        return None
    return CompiledRollout(layers, embedding_VD, norm, head, ids_N)


def _address(values: "array[int]") -> int:
    return values.buffer_info()[0]
