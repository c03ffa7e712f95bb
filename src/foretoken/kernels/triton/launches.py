"""The GPU's kernels by Triton: launches, and which tiles a shape has.

Importing it imports triton; `kernels.triton.found` says where it may be used. Tiles, warps and
stages go by shapes, types and the device's capability, never by a timing: what decides bits (the
segments of a matrix, the class of matrix instructions) belongs to the weights and the device.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    EXPERT_ACTIVATIONS,
    KEY_BLOCK,
    MASS_BITS,
    UNIT_INTS,
    AddNorm,
    AttentionCall,
    Drafted,
    Draw,
    ExpertChoice,
    ExpertMatrices,
    ExpertPairs,
    GpuKernels,
    GpuWeights,
    Heads,
    Recorder,
)
from foretoken.kernels.triton import attention as triton_attention
from foretoken.kernels.triton import draw as triton_draw
from foretoken.kernels.triton import experts as triton_experts
from foretoken.kernels.triton import matrix as triton_matrix
from foretoken.kernels.triton import reject as triton_reject
from foretoken.kernels.triton import rows as triton_rows
from foretoken.shape.mixtures.experts import Experts

_PROGRAMS: Final = 240
"""Programs of a product of few rows that fill a large GPU."""
_LEAST_SEGMENT: Final = 256
_SHARED_INPUTS: Final = 8192
"""Matrices of so many inputs have four segments, which four GPUs can share, or eight."""
_OF_EIGHT: Final = 4096
"""Those of more outputs have eight: models so wide may be too large for four."""
_SPAN: Final = 8192
"""Ids of a row of logits that a program reads."""
_COMBINED: Final = 16
_KINDS: Final = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
}  # fmt: skip
_NEAR: Final = 2e-5
_CRUMB: Final = 1e-6
"""Two sides of a test are too close to call by this share, and what is left of a row's mass of 1 is
nothing below this; as in native/reject.c."""
_SEGMENTS: Final[dict[tuple[int, int, int, tuple[int, int]], int]] = {}
"""Segments of matrices, by outputs, inputs, bits and capability, where another number than the
formula's was measured to be faster (benchmarks/gpu_check.py)."""


class Tiles(NamedTuple):
    """How a product is cut: outputs, rows and inputs of a step of a program; warps and stages."""

    outputs: int
    rows: int
    step: int
    warps: int
    stages: int


def tiles_of(w: GpuWeights, rows: int, gated: bool = False) -> Tiles:
    """How a product of so many rows with these weights is cut.

    In flight is what a GPU has to have read ahead: 16 KiB of weights a program. A step of integers
    has two groups where scales have 16 bits: one alone is too few bytes to be read ahead. The step
    of 4 bits is one for all, since it says in which order halves of groups are added.
    """
    if rows > 64 and w.group and not gated:
        return Tiles(128, 64, 128 if w.bits == 4 else max(64, min(128, 2 * w.group)), 8, 3)
    # Floats of 32 bits are multiplied in parts, which fill the registers.
    wide = w.values_NK.dtype == torch.float32
    if rows > 64 and not (w.bits and gated) and not wide:
        return Tiles(64 if gated else 128, 128, 64, 8, 3)
    # Integers of gates and ups fill the registers.
    tile = min(32 if w.bits and gated else 64, max(16, triton.next_power_of_2(rows)))
    step = 64 if not w.bits and (gated or wide or tile == 64) else 128
    size = 64 * step * (w.bits or 8 * w.values_NK.element_size()) // 8
    # Rows are read ahead, too: many of them leave room for four steps.
    stages = 4 if tile == 64 else max(4, min(8, (16 << 10) // size + 1))
    return Tiles(64, tile, step, 4, stages)


@final
class TritonKernels(GpuKernels):
    """Launches on the device of the tensors; rows in bfloat16 or float16.

    float32 has no matrix instructions here: it is right under the interpreter, and too slow on a
    device.
    """

    few_rows = 64

    def __init__(
        self, capability: tuple[int, int], *, split: int = 256, tile: int | None = None
    ) -> None:
        """Launch as a device of this capability wants.

        Args:
            capability: of CUDA.
            split: keys of a split.
            tile: rows of an attention unit; None: as many as the matrix instruction takes.
        """
        super().__init__()
        self.split = split
        self.tile = tile or (64 if capability[0] in (9, 10) else 32)
        self._capability = capability
        # Else the interpreter runs them.
        self.on_gpu = isinstance(triton_matrix.linear, triton.JITFunction)
        can_follow = hasattr(tl.extra.cuda, "gdc_wait")  # Since Triton 3.4.
        self._overlaps = self.on_gpu and can_follow and capability >= (9, 0)

    def _run(
        self,
        name: str,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        warps: int = 4,
        stages: int = 1,
        **constants: Any,
    ) -> None:
        """Launch without fused multiplication and addition, which Triton's versions differ on; a
        kernel that waits by itself (PDL) begins while the one before ends."""
        self.launch(name)
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
        if "PDL" in kernel.arg_names:
            constants["PDL"] = self._overlaps
            options |= {"launch_pdl": True} if self._overlaps else {}
        self._start(kernel, grid, arguments, constants, options)

    @staticmethod
    def _start(
        kernel: Any, grid: tuple[int, ...], arguments: Any, constants: Any, options: Any
    ) -> None:
        kernel[grid](*arguments, **constants, **options)

    def recorder(self) -> Recorder | None:
        """CUDA's graphs; the interpreter has none."""
        return _Graphs(self) if self.on_gpu else None

    def segment_of(self, outputs: int, inputs: int, bits: int) -> int:
        """The least power of two of segments that gives enough programs; half of it where that
        makes all of one length, which heads can be shared by."""
        count = _SEGMENTS.get((outputs, inputs, bits, self._capability))
        if count is None:
            count, programs = 1, triton.cdiv(outputs, 64)
            least = 1 if inputs < _SHARED_INPUTS else 8 if outputs > _OF_EIGHT else 4
            while inputs >= 2 * count * _LEAST_SEGMENT and (
                programs * count < _PROGRAMS or count < least
            ):
                count *= 2
            if count > 1 and inputs % (128 * count) and not inputs % (64 * count):
                count //= 2
        # A multiple of every step.
        return inputs if count == 1 else triton.cdiv(triton.cdiv(inputs, count), 128) * 128

    def linear_splits(self, x_TK: Tensor, w: GpuWeights, parts_PTN: Tensor) -> None:
        self._linear("linear_splits", x_TK, w, parts_PTN, tiles_of(w, x_TK.shape[0]))

    def linear_long(self, x_TK: Tensor, w: GpuWeights, parts_1TN: Tensor) -> None:
        self._linear("linear_long", x_TK, w, parts_1TN, tiles_of(w, max(65, x_TK.shape[0])))

    def _linear(self, name: str, x_TK: Tensor, w: GpuWeights, parts: Tensor, tiles: Tiles) -> None:
        rows = x_TK.shape[0]
        self._run(
            name, triton_matrix.linear,
            (triton.cdiv(w.outputs, tiles.outputs), triton.cdiv(rows, tiles.rows), parts.shape[0]),
            x_TK, w.values_NK, w.scale_NG, w.zero_NG, parts,
            rows, w.outputs, w.inputs, w.segment, x_TK.stride(0),
            WHOLE=name == "linear_long", **_constants(w, tiles),
        )  # fmt: skip

    def gate_up(
        self, x_TK: Tensor, w: GpuWeights, bias_N: Tensor | None, activation: int, y_TF: Tensor
    ) -> None:
        rows, width = y_TF.shape
        tiles = tiles_of(w, rows, gated=True)
        self._run(
            "gate_up", triton_matrix.gate_up,
            (triton.cdiv(width, tiles.outputs), triton.cdiv(rows, tiles.rows)),
            x_TK, w.values_NK, w.scale_NG, w.zero_NG, bias_N, y_TF,
            rows, width, w.inputs, w.segment, x_TK.stride(0), y_TF.stride(0),
            ACTIVATION=activation, **_constants(w, tiles),
        )  # fmt: skip

    def add_parts(
        self,
        parts_PTN: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
        y_TN: Tensor,
        weights_TP: Tensor | None = None,
    ) -> None:
        parts, rows, width = parts_PTN.shape
        self._run(
            "add_parts", triton_rows.add_parts, (rows, triton.cdiv(width, 1024)),
            parts_PTN, weights_TP, bias_N, residual_TN, y_TN, rows, width, _stride(residual_TN),
            y_TN.stride(0),
            PARTS=parts, BLOCK=1024,
        )  # fmt: skip

    def embed(self, tokens_T: Tensor, table_VD: Tensor, scale: float, stream_TD: Tensor) -> None:
        self._copy_rows("embed", table_VD, tokens_T, scale, stream_TD)

    def take_rows(self, x_TD: Tensor, rows_R: Tensor, y_RD: Tensor) -> None:
        self._copy_rows("take_rows", x_TD, rows_R, 1.0, y_RD)

    def _copy_rows(self, name: str, x: Tensor, which: Tensor, scale: float, y: Tensor) -> None:
        rows, width = y.shape
        self._run(
            name, triton_rows.embed, (rows, triton.cdiv(width, 1024)),
            which, x, y, x.stride(0), y.stride(0), scale, width,
            BLOCK=1024, SCALED=scale != 1.0,
        )  # fmt: skip

    def add_norm(self, on: AddNorm) -> None:
        rows, width = on.stream_TD.shape
        stores = [(None, None) if one is None else one for one in (on.kept, on.kept_normed)]
        self._run(
            "add_norm", triton_rows.add_norm, (rows,),
            on.parts_PTD, on.weights_TP, on.bias_D, on.stream_TD, on.after_D, on.weight_D,
            on.normed_TD, *stores[0], *stores[1], rows, width, on.stream_TD.stride(0),
            on.normed_TD.stride(0), _stride(stores[0][0]), _stride(stores[1][0]), on.eps,
            PARTS=0 if on.parts_PTD is None else on.parts_PTD.shape[0],
            BLOCK=triton.next_power_of_2(width), warps=8 if width > 2048 else 4,
        )  # fmt: skip

    def pair_tile(self, pairs: int, experts: int, bits: int) -> int:
        # As many as an expert has of evenly shared ones, and no more than fit the registers.
        each: int = triton.next_power_of_2(triton.cdiv(pairs, experts))
        return max(16, min(32 if bits else 64, each))

    def choose_experts(
        self, parts_PTX: Tensor, choice: ExpertChoice, live_1: Tensor, pairs: ExpertPairs
    ) -> None:
        parts, rows, width = parts_PTX.shape
        experts, routing = choice.experts, choice.experts.routing
        block = triton.next_power_of_2(width)
        self._run(
            "choose_experts", triton_experts.choose, (rows,),
            parts_PTX, choice.bias_E, choice.choice_bias_E, live_1, pairs.weights_TS,
            pairs.experts_TU, rows, width, routing.softcap or 0.0, routing.floor, routing.eps,
            routing.scale, PARTS=parts, KIND=_KINDS[choice.dtype], COUNT=experts.count,
            USED=experts.used, SCORE=routing.score, WEIGHTS=routing.weights,
            SLOTS=pairs.weights_TS.shape[1], CAPPED=routing.softcap is not None,
            GROUPS=routing.groups, OPEN=routing.groups_used, BLOCK=block,
            warps=1 if block <= 256 else 4,
        )  # fmt: skip

    def sort_pairs(self, pairs: ExpertPairs, experts: int, read_1: Tensor) -> None:
        self._run(
            "sort_pairs", triton_experts.sort_pairs, (experts + 1,),
            pairs.experts_TU, pairs.order_P, pairs.blocks_B3, read_1,
            pairs.order_P.shape[0], pairs.blocks_B3.shape[0], COUNT=experts, TILE=pairs.tile,
            CHUNK=1024, BLOCK=triton.next_power_of_2(experts + 1),
        )  # fmt: skip

    def experts_gate_up(
        self, x_TK: Tensor, of: ExpertMatrices, experts: Experts, pairs: ExpertPairs, y_PF: Tensor
    ) -> None:
        w, width, tiles = of.weights, y_PF.shape[1], tiles_of(of.weights, pairs.tile, gated=True)
        self._run(
            "experts_gate_up", triton_experts.gate_up,
            (triton.cdiv(width, tiles.outputs), pairs.blocks_B3.shape[0]),
            x_TK, w.values_NK, w.scale_NG, w.zero_NG, of.bias_X, pairs.order_P, pairs.blocks_B3,
            y_PF, width, w.inputs, x_TK.stride(0), experts.limit,
            ACTIVATION=EXPERT_ACTIVATIONS[experts.activation], USED=experts.used,
            **_constants(w, tiles),
        )  # fmt: skip

    def experts_down(
        self, x_PF: Tensor, of: ExpertMatrices, experts: Experts, pairs: ExpertPairs, y_STN: Tensor
    ) -> None:
        w, (_, rows, outputs) = of.weights, y_STN.shape
        tiles = tiles_of(w, pairs.tile)
        self._run(
            "experts_down", triton_experts.down,
            (triton.cdiv(outputs, tiles.outputs), pairs.blocks_B3.shape[0]),
            x_PF, w.values_NK, w.scale_NG, w.zero_NG, of.bias_X, pairs.order_P, pairs.blocks_B3,
            y_STN, rows, outputs, w.inputs, USED=experts.used, **_constants(w, tiles),
        )  # fmt: skip

    def turn_and_write(self, on: Heads) -> None:
        parts_PTA, bias_A, norm, rotary, places_T, slots_T, q_THh, layer = on
        (parts, rows, width), (_, heads, size) = parts_PTA.shape, q_THh.shape
        numbers, scales = layer
        query, key, eps, whole = norm or (None, None, 0.0, False)
        kv_heads = numbers.shape[1] // 2
        self._run(
            "turn_and_write", triton_rows.turn_and_write, (rows, heads + 2 * kv_heads),
            parts_PTA, bias_A, query, key, *rotary, places_T, slots_T, q_THh, numbers, scales,
            rows, width, q_THh.stride(0), numbers.stride(0), numbers.stride(1),
            _stride(scales), _stride(scales, 1), eps,
            HEADS=heads, KV_HEADS=kv_heads, SIZE=size, TURNED=rotary.cos_XW.shape[1],
            BLOCK=triton.next_power_of_2(size), WHOLE=whole,
            ALL=triton.next_power_of_2(max(heads, kv_heads) * size), PARTS=parts,
            warps=4 if whole else 1,
        )  # fmt: skip

    def attend(self, on: AttentionCall) -> None:
        q_THh, (numbers, scales), shape, step, partials, out_TD, sinks_H = on
        heads, size = shape.num_kv_heads, shape.head_dim
        width = max(16, triton.next_power_of_2(size))
        self._run(
            "attend", triton_attention.attend, (step.units_U.shape[0], heads),
            q_THh, numbers, scales, sinks_H, out_TD, *partials,
            step.units_U, step.places_T, step.lasts_T, step.runs_T, step.bases_T, step.pages_P,
            step.tails_XJ,
            q_THh.stride(0), out_TD.stride(0), numbers.stride(0), numbers.stride(1),
            _stride(scales), _stride(scales, 1), step.tails_XJ.stride(0),
            shape.scale, shape.softcap,
            HEADS=heads, GROUP=shape.num_heads // heads, SIZE=size, WIDTH=width,
            PAGE=shape.page_size, TILE=self.tile, KEYS=KEY_BLOCK, SPLIT=self.split,
            WINDOW=shape.window, CAPPED=shape.softcap != 0.0, TREES=step.trees, SPLITS=step.splits,
            BY_KEY=shape.by_key, INTS=UNIT_INTS, **_attention_options(width, scales is not None),
        )  # fmt: skip

    def combine(self, on: AttentionCall) -> None:
        shape, step, out_TD = on.shape, on.step, on.out_TD
        self._run(
            "combine", triton_attention.combine, (out_TD.shape[0], shape.num_heads),
            *on.partials, on.sinks_H, step.places_T, step.lasts_T, step.bases_T,
            out_TD, out_TD.stride(0),
            HEADS=shape.num_heads, SIZE=shape.head_dim,
            WIDTH=triton.next_power_of_2(shape.head_dim), SPLIT=self.split, WINDOW=shape.window,
            AT_ONCE=_COMBINED,
        )  # fmt: skip

    def keep(self, logits_RV: Tensor, how_R4: Tensor, kept_R3: Tensor) -> None:
        rows, vocabulary = logits_RV.shape
        self._run(
            "keep", triton_draw.keep, (rows,),
            logits_RV, how_R4, kept_R3, torch.empty_like(logits_RV),
            logits_RV.stride(0), vocabulary, BLOCK=1024, BITS=MASS_BITS, warps=8,
        )  # fmt: skip

    def draw(self, on: Draw) -> None:
        logits_RV, keys_R2, how_R4, tokens_R, names_V, kept_R3 = on
        (rows, vocabulary), spans = logits_RV.shape, triton.cdiv(logits_RV.shape[1], _SPAN)
        best_RS = logits_RV.new_empty(rows, spans)
        ids_RS = logits_RV.new_empty(rows, spans, dtype=torch.int32)
        self._run(
            "draw", triton_draw.draw, (rows, spans),
            logits_RV, keys_R2, how_R4, kept_R3, names_V, best_RS, ids_RS,
            logits_RV.stride(0), vocabulary, BLOCK=1024, SPAN=_SPAN,
        )  # fmt: skip
        self._run(
            "pick", triton_draw.pick, (rows,),
            best_RS, ids_RS, names_V, tokens_R, tokens_R.stride(0), spans,
            BLOCK=triton.next_power_of_2(spans), warps=1,
        )  # fmt: skip

    def accept(self, drafted: Drafted, found_S2: Tensor, *, block: bool) -> None:
        logits, how, keys, probs, spans, ids, uniforms, most = drafted
        (rows, vocabulary), count = logits.shape, len(spans)
        parts, strides = triton.cdiv(vocabulary, _SPAN), (logits.stride(0), _stride(probs))
        kept = logits.new_empty(rows, 3)
        self.keep(logits, how, kept)
        left, weights = uniforms.new_empty(count, most), uniforms.new_empty(count)
        stays, on = spans.new_empty(count), (logits, how, kept, probs, spans, ids)
        if block:
            self._run(
                "remain", triton_reject.remain, (count, most),
                *on, left, *strides, vocabulary, most, BLOCK=1024, BITS=MASS_BITS,
            )  # fmt: skip
        self._run(
            "accept", triton_reject.accept, (count,), *on, uniforms, left, stays, weights,
            *strides, most, WHOLE=block, NEAR=_NEAR, CRUMB=_CRUMB, warps=1,
        )  # fmt: skip
        best, best_ids = logits.new_empty(count, parts), spans.new_empty(count, parts)
        self._run(
            "redraw", triton_reject.redraw, (count, parts), *on, keys, stays, weights,
            best, best_ids, *strides, vocabulary, BLOCK=1024, SPAN=_SPAN,
        )  # fmt: skip
        self._run(
            "settle", triton_reject.settle, (count,),
            stays, best, best_ids, found_S2, parts, BLOCK=triton.next_power_of_2(parts), warps=1,
        )  # fmt: skip

    def cap(self, logits_RV: Tensor, softcap: float) -> None:
        assert logits_RV.is_contiguous(), logits_RV.stride()
        grid, count = (triton.cdiv(logits_RV.numel(), 1024),), logits_RV.numel()
        self._run("cap", triton_draw.cap, grid, logits_RV, softcap, count, BLOCK=1024)

    def chance(self, logits_RV: Tensor, chance_R: Tensor) -> None:
        (rows, vocabulary), spans = logits_RV.shape, triton.cdiv(logits_RV.shape[1], _SPAN)
        best_RS, mass_RS = logits_RV.new_empty(rows, spans), logits_RV.new_empty(rows, spans)
        self._run(
            "weigh", triton_draw.weigh, (rows, spans),
            logits_RV, best_RS, mass_RS, logits_RV.stride(0), vocabulary, BLOCK=1024, SPAN=_SPAN,
        )  # fmt: skip
        self._run(
            "chance", triton_draw.chance, (rows,), best_RS, mass_RS, chance_R, spans,
            BLOCK=triton.next_power_of_2(spans), warps=1,
        )  # fmt: skip


class _Graphs:
    """Graphs in one pool of memory: only one of them runs at a time."""

    def __init__(self, kernels: GpuKernels) -> None:
        self._kernels, self._pool = kernels, torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # What is new is compiled and loaded, which no graph may do; beside the stream in use, so
        # that nothing of it is waited for while the graph is made.
        stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(stream)
        self._kernels.recording = True
        try:
            with torch.cuda.stream(side):
                run()
        finally:
            self._kernels.recording = False
        stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy and ask for memory meanwhile: it concerns this one alone.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


def _stride(x: Tensor | None, dimension: int = 0) -> int:
    return 0 if x is None else x.stride(dimension)


def _constants(w: GpuWeights, tiles: Tiles) -> dict[str, Any]:
    """What products of these weights are compiled for, and how they are launched."""
    scale = w.values_NK if w.scale_NG is None else w.scale_NG
    assert w.segment % tiles.step == 0 or w.segment == w.inputs, (w.segment, tiles)
    return {
        "BITS": w.bits,
        "GROUP": w.group,
        "PAIRS": 0 < w.group < tiles.step
        and scale.dtype == torch.float16
        and scale.shape[1] % 2 == 0,
        "TAIL": w.inputs % tiles.step != 0,
        "TILE_N": tiles.outputs,
        "TILE_T": tiles.rows,
        "STEP": tiles.step,
        "warps": tiles.warps,
        "stages": tiles.stages,
    }


def _attention_options(width: int, in_int8: bool) -> dict[str, int]:
    """Warps and stages by the width of a head and how it is stored."""
    return {"warps": 4 if width <= 128 else 8, "stages": 3 if width <= 128 and not in_int8 else 2}
