"""MLP speculators and Medusa on the compiled kernels: a whole chain is one foreign call.

Built from networks whose linears serve already (`head_linears`) and whose weights it shares;
`heads.mlp` and `heads.medusa` are the twins in PyTorch: they train, draft trees, and serve wherever
some part has no kernel. Owns the buffers of a call.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from foretoken.kernels.library import find_library
from foretoken.models.stopping import StopCall, cut
from foretoken.models.tensors import RolledOut, RolloutPlan
from foretoken.ops.linear import KernelLinear
from foretoken.ops.rows import TYPES
from foretoken.proposers.heads.linears import kernel_of
from foretoken.proposers.heads.medusa import Medusa, ResidualBlock
from foretoken.proposers.heads.mlp import MLPSpeculator

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Stage(ctypes.Structure):
    """ft_mlp_stage."""

    _fields_ = [(name, _PTR) for name in ("project", "head", "embedding", "weight", "bias")]


class _MLP(ctypes.Structure):
    """ft_mlp."""

    _fields_ = [
        ("stages", _PTR),
        *((name, _I64) for name in ("hidden", "inner", "vocabulary")),
        ("token_scale", _F32),
        ("type", _I32),
        ("norms_input", _I64),
    ]


class _Block(ctypes.Structure):
    """ft_medusa_block."""

    _fields_ = [("down", _PTR), ("linear", _PTR)]


class _Medusa(ctypes.Structure):
    """ft_medusa."""

    _fields_ = [
        *((name, _PTR) for name in ("blocks", "mixers", "tops")),
        *((name, _I64) for name in ("hidden", "vocabulary", "layers")),
        ("type", _I32),
    ]


class _Call(ctypes.Structure):
    """ft_head_call."""

    _fields_ = [
        *((name, _PTR) for name in ("features", "slots", "fed", "state", "room")),
        ("draws", ctypes.c_char_p),
        *((name, _PTR) for name in ("tokens", "logits")),
        *((name, _I64) for name in ("feature_bytes", "rows", "steps", "keeps_logits")),
        ("stop", _PTR),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A network in C's memory."""

    function: str
    struct: Any
    kept: tuple[Any, ...]
    """What the struct points to."""
    widest: int
    """Values of a state."""
    vocabulary: int
    all_at_once: bool
    """Whether every step has a state and logits of its own, whatever is kept."""


@final
class StatelessKernels:
    """A network bound to its call; `compile_mlp` and `compile_medusa` make it."""

    def __init__(self, bound: _Bound, features_SD: Tensor) -> None:
        """Draft from the target's hidden states of all slots."""
        library = find_library()
        assert library is not None and features_SD.stride(1) == 1, features_SD.stride()
        self._bound, self._features_SD = bound, features_SD
        self._run: Any = library.function(bound.function, (_PTR, _PTR), _I64)
        self._values = features_SD.new_empty(0)
        self._logits_KV = torch.empty(0, bound.vocabulary)
        stride = features_SD.stride(0) * features_SD.element_size()
        self._call = _Call(features=features_SD.data_ptr(), feature_bytes=stride)

    def __call__(self, slots: Sequence[int], fed: Sequence[int], plan: RolloutPlan) -> RolledOut:
        """Draft up to `plan.steps` tokens for each sequence.

        Args:
            slots: where the newest computed token of each has its hidden state.
            fed: the newest tokens.
            plan: how many tokens, and how each is chosen.
        """
        call, bound, count, steps = self._call, self._bound, len(slots), plan.steps
        rows = count * steps if bound.all_at_once or plan.keeps_logits else count
        if rows > self._logits_KV.shape[0]:
            self._logits_KV = torch.empty(rows, bound.vocabulary)
        needed = count * bound.widest * ((steps if bound.all_at_once else 1) + 2)
        if needed > self._values.shape[0]:
            self._values = self._values.new_empty(needed)
        slots_B, fed_B = array("q", slots), array("q", fed)
        tokens = array("q", bytes(8 * count * steps))
        room = 2 * count * bound.widest * self._values.element_size()
        call.room = self._values.data_ptr()
        call.state = call.room + room
        call.slots, call.fed, call.tokens = map(_address, (slots_B, fed_B, tokens))
        call.draws, call.logits = plan.rows, self._logits_KV.data_ptr()
        call.rows, call.steps, call.keeps_logits = count, steps, plan.keeps_logits
        stop = None if plan.stop is None else StopCall(plan.stop, steps)
        call.stop = None if stop is None else stop.address
        done = self._run(ctypes.addressof(bound.struct), ctypes.addressof(call))
        ended, done = done < 0, done if done >= 0 else -1 - done
        made, at = tokens[: count * done], count * done if rows > count else 0
        found = RolledOut(
            ids=[made[row::count].tolist() for row in range(count)],
            logits_KV=self._logits_KV[: count * done] if plan.keeps_logits else None,
            undecided_BV=None if done == steps or ended else self._logits_KV[at : at + count],
        )
        return found if stop is None else cut(found, stop.found(done, ended=ended))

    @property
    def at_once(self) -> bool:
        """Whether all tokens come of one pass."""
        return self._bound.all_at_once


def compile_mlp(net: MLPSpeculator, features_SD: Tensor | None) -> StatelessKernels | None:
    """The network on kernels, or None if some part has none; it must stay as it is."""
    dtype = net.ln[0].get_parameter("weight").dtype
    if find_library() is None or features_SD is None or dtype not in TYPES:
        return None
    count, tied = net.shape.n_predict, net.shape.tie_weights
    stages = (_Stage * count)()
    for i, stage in enumerate(stages):
        own = 0 if tied else i
        project = kernel_of(net.proj[min(i, len(net.proj) - 1)], dtype, dtype)
        head = kernel_of(net.head[own], dtype, torch.float32)
        if project is None or head is None:
            return None
        stage.project, stage.head = project.address, head.address
        stage.embedding = net.emb[own].get_parameter("weight").data_ptr()
        stage.weight = net.ln[own].get_parameter("weight").data_ptr()
        stage.bias = net.ln[own].get_parameter("bias").data_ptr()
    struct = _MLP(
        stages=ctypes.addressof(stages),
        hidden=net.shape.emb_dim,
        inner=net.shape.inner_dim,
        vocabulary=net.shape.vocab_size,
        token_scale=net.token_scale,
        type=TYPES[dtype],
        norms_input=net.shape.scale_input,
    )
    bound = _Bound(
        function="ft_mlp_draft",
        struct=struct,
        kept=(net, stages),
        widest=max(net.shape.emb_dim, net.shape.inner_dim),
        vocabulary=net.shape.vocab_size,
        all_at_once=False,
    )
    return StatelessKernels(bound, features_SD)


def compile_medusa(
    net: Medusa, features_SD: Tensor | None, target_head: KernelLinear | None
) -> StatelessKernels | None:
    """The same for Medusa; `target_head` is what networks without heads of their own need."""
    if find_library() is None or features_SD is None or features_SD.dtype not in TYPES:
        return None
    dtype, shape = features_SD.dtype, net.shape
    if (shape.rank or 0) > shape.hidden_size:
        return None
    linears = [
        (
            block.down is None,
            kernel_of(block.down, dtype, dtype),
            kernel_of(block.linear, dtype, dtype),
        )
        for blocks in net.blocks
        for block in blocks.children()
        if isinstance(block, ResidualBlock)
    ]
    mixers = [kernel_of(mixer, dtype, dtype) for mixer in net.mixers]
    tops = [kernel_of(head, dtype, torch.float32) for head in net.lm_heads]
    if shape.share_head:
        fits = target_head is not None and target_head.dtype == dtype
        tops = [target_head if fits else None]
    blocks = (_Block * len(linears))()
    for block, (without, down, linear) in zip(blocks, linears, strict=True):
        if linear is None or (down is None and not without):
            return None
        block.down, block.linear = None if down is None else down.address, linear.address
    pointers = [_pointers(mixers), _pointers(tops)]
    if None in pointers or tops[0] is None or tops[0].out_dtype != torch.float32:
        return None
    struct = _Medusa(
        blocks=ctypes.addressof(blocks),
        mixers=ctypes.addressof(pointers[0]) if mixers else None,
        tops=ctypes.addressof(pointers[1]),
        hidden=shape.hidden_size,
        vocabulary=tops[0].columns,
        layers=shape.medusa_num_layers,
        type=TYPES[dtype],
    )
    bound = _Bound(
        function="ft_medusa_draft",
        struct=struct,
        kept=(net, target_head, blocks, pointers),
        widest=shape.hidden_size,
        vocabulary=tops[0].columns,
        all_at_once=True,
    )
    return StatelessKernels(bound, features_SD)


def _pointers(linears: Sequence[KernelLinear | None]) -> Any:
    """Their addresses in C's memory; None if one is missing."""
    addresses = [linear.address for linear in linears if linear is not None]
    return (_PTR * len(linears))(*addresses) if len(addresses) == len(linears) else None


def _address(values: "array[int]") -> int:
    return values.buffer_info()[0]
