"""The structures of the C kernels as Python fills them in, and the check that both sides agree.

Owns the layout of everything that crosses the border by address. A class is named like its
structure in `native/*.h` (`ft_linear_rows` is `FtLinearRows`) and has its fields in the same order;
what they mean is said there. Two records are packed into bytes and two are written into arrays of
integers; these have their sizes here too. `library` calls `check_sizes` when it loads the kernels.
"""

import ctypes
import re
from array import array
from itertools import takewhile
from struct import Struct
from typing import Any, Final

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_F32, _F64 = ctypes.c_float, ctypes.c_double
_BYTES = ctypes.c_char_p

DRAW_ROW: Final = Struct("=Qfffi")
"""ft_draw_row: noise key, temperature, log of min_p, top_p, top_k."""
REJECT_SPAN: Final = Struct("=Qfffi5q")
"""ft_reject_span: an ft_draw_row, then position, row, drafted, first, count."""
SPAN_INTS: Final = 6
"""int32 numbers of an ft_span: row, num_rows, start, pages, paths, known."""
UNIT_INTS: Final = 5
"""int32 numbers of an ft_attention_unit, which only C writes."""
MOST_RANKS: Final = 64
"""Processes of an ft_group."""


def address_of(values: "array[Any]") -> int:
    """Where an array has its numbers, for as long as it is there and does not grow."""
    return values.buffer_info()[0]


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type that follow one another."""
    return [(name, kind) for name in names.split()]


class FtLinear(ctypes.Structure):
    """A linear layer over packed weights (linear.h)."""

    _fields_ = [
        *_fields(_I32, "weight_type x_type y_type gated group x_bits halves front form unit"),
        ("norm_eps", _F32),
        *_fields(_I64, "outputs inputs"),
        *_fields(_PTR, "weight scale zero bias norm next"),
    ]


class FtLinearRows(ctypes.Structure):
    """The rows that a linear layer is applied to (linear.h)."""

    _fields_ = [
        *_fields(_PTR, "x y residual"),
        *_fields(_I64, "rows x_stride y_stride residual_stride"),
    ]


class FtGgmlMatrix(ctypes.Structure):
    """Rows of blocks to be packed (ggml.h)."""

    _fields_ = [
        *_fields(_PTR, "rows columns values numbers upper"),
        *_fields(_I64, "outputs inputs"),
        *_fields(_I32, "type width unit"),
    ]


class FtPanelRows(ctypes.Structure):
    """Rows to be put in panels (packing.h)."""

    _fields_ = [
        *_fields(_PTR, "rows packed"),
        *_fields(_I64, "outputs units row_bytes"),
        ("flip", ctypes.c_uint32),
        ("halves", _I32),
    ]


class FtNormCall(ctypes.Structure):
    """An RMS norm over rows (rows.h)."""

    _fields_ = [
        *_fields(_PTR, "x y residual weight"),
        *_fields(_I64, "rows width x_stride y_stride residual_stride"),
        *_fields(_I32, "type weight_type"),
        ("eps", _F32),
    ]


class FtRotaryCall(ctypes.Structure):
    """Rotary positions of fused rows, and where keys and values go (rows.h)."""

    _fields_ = [
        *_fields(_PTR, "qkv kv cos sin positions slots query_norm key_norm value_norm"),
        *_fields(_I64, "first_slot rows qkv_stride kv_stride"),
        *_fields(_I32, "num_heads num_kv_heads head_dim width type kv_type norm_type turns_first"),
        ("eps", _F32),
    ]


class FtGateCall(ctypes.Structure):
    """A gated activation over rows (rows.h)."""

    _fields_ = [
        *_fields(_PTR, "x y"),
        *_fields(_I64, "rows width x_stride y_stride"),
        *_fields(_I32, "type activation"),
    ]


class FtAttentionShape(ctypes.Structure):
    """Heads, types and kind of an attention (attention.h)."""

    _fields_ = [
        *_fields(_I32, "num_heads num_kv_heads head_dim page_size type kv_type window"),
        *_fields(_F32, "scale softcap"),
    ]


class FtAttentionCall(ctypes.Structure):
    """Attention of all spans of a step over one layer's store (attention.h)."""

    _fields_ = [
        *_fields(_PTR, "shape spans pages paths q kv out sinks"),
        *_fields(_I64, "q_stride kv_stride out_stride"),
        ("num_spans", _I32),
    ]


class FtRejectCall(ctypes.Structure):
    """Drafts of many requests to be accepted or rejected (reject.h)."""

    _fields_ = [
        ("spans", _BYTES),
        *_fields(_PTR, "ids parents logits drafted kept paths last"),
        *_fields(_I64, "num_spans vocabulary rule"),
    ]


class FtExperts(ctypes.Structure):
    """A mixture of experts and its router (experts.h)."""

    _fields_ = [
        *_fields(_PTR, "router router_bias choice_bias weight_scale"),
        *_fields(_PTR, "gate_up down shared_gate_up shared_down"),
        *_fields(_I64, "hidden inner shared_inner"),
        *_fields(_I32, "experts chosen score weights groups open_groups shared_gated"),
        *_fields(_I32, "activation shared_activation type rounds_router"),
        *_fields(_F32, "floor added scale softcap limit alpha"),
    ]


class FtExpertsRows(ctypes.Structure):
    """The rows that go through a mixture of experts (experts.h)."""

    _fields_ = [
        *_fields(_PTR, "x by y residual"),
        ("rows", _I64),
        *_fields(_PTR, "distinct routes gated shared"),
        ("half", _I32),
    ]


class FtLayer(ctypes.Structure):
    """The matrices and norms of a decoder layer (decoder.h)."""

    _fields_ = [
        *_fields(_PTR, "qkv out gate gate_up down experts sinks"),
        *_fields(_PTR, "attention_norm mlp_norm after_attention after_mlp"),
        *_fields(_PTR, "after_plain experts_norm after_experts router_norm"),
        *_fields(_PTR, "query_norm key_norm value_norm beside_norm"),
        *_fields(_I64, "from_norm whole_norms turns_first keeps kind"),
        *_fields(_PTR, "input_gate input_back input_norm"),
        ("scale", _F32),
    ]


class FtDecoder(ctypes.Structure):
    """Layers, and what all of them share (decoder.h)."""

    _fields_ = [
        ("layers", _PTR),
        ("hidden", _I64),
        *_fields(_I32, "type norm_type activation"),
        *_fields(_F32, "eps branch_scale"),
    ]


class FtStepKind(ctypes.Structure):
    """What layers with the same window and positions share in a step (decoder.h)."""

    _fields_ = [
        ("attention", FtAttentionCall),
        ("units", _PTR),
        ("num_units", _I64),
        *_fields(_PTR, "cos sin query_scale"),
        *_fields(_I64, "width kv_stride"),
    ]


class FtStep(ctypes.Structure):
    """The rows that go through a decoder's layers (decoder.h)."""

    _fields_ = [
        *_fields(_PTR, "x positions slots"),
        *_fields(_I64, "first_slot rows"),
        *_fields(_PTR, "kv kinds beside inputs"),
        ("inputs_stride", _I64),
        ("kept", _PTR),
        ("kept_stride", _I64),
        ("distinct", _PTR),
    ]


class FtStop(ctypes.Structure):
    """Where chains of drafts end early (stop.h)."""

    _fields_ = [
        ("least_sure", _F32),
        ("least", _I64),
        *_fields(_PTR, "sure lengths"),
    ]


class FtFeatures(ctypes.Structure):
    """Hidden states of the target by slot, of which a drafter reads pieces (feature_rows.h)."""

    _fields_ = [
        *_fields(_PTR, "slots pieces"),
        *_fields(_I64, "stride piece_bytes num_pieces"),
    ]


class FtEmbedding(ctypes.Structure):
    """A table of floats, or a packed layer, that gives rows by token (embedding.h)."""

    _fields_ = [
        *_fields(_PTR, "floats packed"),
        *_fields(_I64, "tokens width"),
        ("type", _I32),
    ]


class FtRolloutModel(ctypes.Structure):
    """A decoder that drafts chains, with what stands around its layers (rollout.h)."""

    _fields_ = [
        *_fields(_PTR, "decoder embedding norm head ids"),
        *_fields(_PTR, "mixer shape cos sin kv"),
        ("features", FtFeatures),
        *_fields(_I64, "width kv_stride vocabulary"),
        ("num_layers", _I32),
    ]


class FtRolloutCall(ctypes.Structure):
    """Chains of drafts of many sequences by a decoder (rollout.h)."""

    _fields_ = [
        *_fields(_PTR, "spans pages fed units positions slots"),
        *_fields(_PTR, "x beside gathered masks"),
        ("draws", _BYTES),
        *_fields(_PTR, "tokens logits own"),
        *_fields(_I64, "num_spans rows steps keeps_logits"),
        ("stop", _PTR),
        ("anchored", _I64),
    ]


class FtMlpStage(ctypes.Structure):
    """One step of an MLP speculator (heads.h)."""

    _fields_ = _fields(_PTR, "project head embedding weight bias")


class FtMlp(ctypes.Structure):
    """An MLP speculator (heads.h)."""

    _fields_ = [
        ("stages", _PTR),
        *_fields(_I64, "hidden inner vocabulary"),
        ("token_scale", _F32),
        ("type", _I32),
        ("norms_input", _I64),
    ]


class FtMedusaBlock(ctypes.Structure):
    """A residual block of a Medusa head (heads.h)."""

    _fields_ = _fields(_PTR, "down linear")


class FtMedusa(ctypes.Structure):
    """The heads of Medusa (heads.h)."""

    _fields_ = [
        *_fields(_PTR, "blocks mixers tops"),
        *_fields(_I64, "hidden vocabulary layers"),
        ("type", _I32),
    ]


class FtHeadCall(ctypes.Structure):
    """Chains of drafts of many sequences by a head without keys and values (heads.h)."""

    _fields_ = [
        *_fields(_PTR, "features slots fed state room"),
        ("draws", _BYTES),
        *_fields(_PTR, "tokens logits"),
        *_fields(_I64, "feature_bytes rows steps keeps_logits"),
        ("stop", _PTR),
    ]


class FtBlockLayer(ctypes.Structure):
    """The matrices and norms of a layer of a block head (block.h)."""

    _fields_ = [
        *_fields(_PTR, "q kv out gate_up down"),
        *_fields(_PTR, "attention_norm mlp_norm query_norm key_norm"),
        ("kind", _I64),
    ]


class FtBlockKind(ctypes.Structure):
    """What layers of a block head share that see the same (block.h)."""

    _fields_ = [("shape", _PTR), ("causal", _I64)]


class FtBlockModel(ctypes.Structure):
    """A block head, with what stands around its layers (block.h)."""

    _fields_ = [
        *_fields(_PTR, "layers kinds mixer context_norm embedding norm head ids"),
        *_fields(_PTR, "shorts follow judge cos sin kv"),
        *_fields(_I64, "hidden inner rank vocabulary width kv_stride"),
        ("features", FtFeatures),
        *_fields(_I32, "num_layers num_kinds num_heads num_kv_heads head_dim type norm_type"),
        *_fields(_F32, "eps embedding_scale output_scale"),
    ]


class FtBlockCall(ctypes.Structure):
    """New places and blocks of many sequences, and their drafts (block.h)."""

    _fields_ = [
        *_fields(_PTR, "context blocks pages fed units positions slots"),
        *_fields(_PTR, "joined gathered x outputs before added"),
        ("draws", _BYTES),
        *_fields(_PTR, "tokens logits own"),
        *_fields(_I64, "num_context num_blocks num_fed rows steps first_row"),
        ("stop", _PTR),
    ]


class FtDraftOption(ctypes.Structure):
    """What one drafter could do in a step (allocate.h)."""

    _fields_ = [*_fields(_PTR, "survival depth_s start_s"), ("slot_s", _F64)]


class FtAllocateCall(ctypes.Structure):
    """A step, what drafters could do in it, and the best plan (allocate.h)."""

    _fields_ = [
        *_fields(_PTR, "rows_s bound_s token_s options"),
        *_fields(_I64, "rows sequences drafts num_options"),
        *_fields(_F64, "plain_s margin"),
        *_fields(_PTR, "counts drafter"),
        ("depth", _I64),
        *_fields(_F64, "seconds tokens unguarded"),
    ]


class FtSeat(ctypes.Structure):
    """Where a rank of a group counts its turns (group.h)."""

    _fields_ = [(name, _I32 * 16) for name in ("turns", "sleepers", "ended", "beats")]


class FtGroup(ctypes.Structure):
    """A rank and those that it waits for (group.h)."""

    _fields_ = [
        ("seats", _PTR * MOST_RANKS),
        ("lines", _I32 * MOST_RANKS),
        *_fields(_I32, "rank size"),
        ("spin_ns", _I64),
    ]


STRUCTURES: Final = (
    FtLinear,
    FtLinearRows,
    FtGgmlMatrix,
    FtPanelRows,
    FtNormCall,
    FtRotaryCall,
    FtGateCall,
    FtAttentionShape,
    FtAttentionCall,
    FtRejectCall,
    FtExperts,
    FtExpertsRows,
    FtLayer,
    FtDecoder,
    FtStepKind,
    FtStep,
    FtStop,
    FtFeatures,
    FtEmbedding,
    FtRolloutModel,
    FtRolloutCall,
    FtMlpStage,
    FtMlp,
    FtMedusaBlock,
    FtMedusa,
    FtHeadCall,
    FtBlockLayer,
    FtBlockKind,
    FtBlockModel,
    FtBlockCall,
    FtDraftOption,
    FtAllocateCall,
    FtSeat,
    FtGroup,
)
SIZES: Final = {
    **{re.sub("(?=[A-Z])", "_", s.__name__)[1:].lower(): ctypes.sizeof(s) for s in STRUCTURES},
    "ft_draw_row": DRAW_ROW.size,
    "ft_reject_span": REJECT_SPAN.size,
    "ft_span": 4 * SPAN_INTS,
    "ft_attention_unit": 4 * UNIT_INTS,
}
"""Bytes by the name that C has."""


class _Size(ctypes.Structure):
    """An entry of `ft_sizes`; the last one has no name."""

    _fields_ = [("name", _BYTES), ("bytes", _I64)]


def check_sizes(handle: ctypes.CDLL) -> None:
    """Assert that every structure has the size that the C compiler gave it.

    A field that is missing on one side would let C read beyond what Python filled in.
    """
    table = (_Size * (len(SIZES) + 1)).in_dll(handle, "ft_sizes")
    found = {one.name.decode(): one.bytes for one in takewhile(lambda one: one.name, table)}
    assert found.keys() == SIZES.keys(), sorted(found.keys() ^ SIZES.keys())
    wrong = [
        f"{name}: {SIZES[name]} bytes in structures.py, {size} in C"
        for name, size in found.items()
        if SIZES[name] != size
    ]
    assert not wrong, "; ".join(wrong)
