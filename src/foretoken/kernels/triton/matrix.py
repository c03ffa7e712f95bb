"""Triton kernels of matrices, floats and integers; `gpu_kernels` says what they promise.

Owns device code, no launch: `launches` has those, and which tiles a shape has. Importing it
imports triton.

Weights are the first operand of a product and rows the second: so 64 outputs fill the matrix
instruction, whatever the number of rows, and rows come in tiles of any size. The inputs are cut
into segments, whose length belongs to the shape of the weights; a sum is made within a segment in
order of the inputs, and segments are added in order, here or by whoever reads them.
"""

import triton
import triton.language as tl


@triton.jit
def follow(PDL: tl.constexpr, weights=None):
    """Wait for what launches before this one have written, and let the next one begin, where
    launches overlap (PDL). Weights are written by none: some of them are fetched meanwhile."""
    if PDL:
        if weights is not None:
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weights.to(tl.int64)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])
def linear(
    x, values, scale, zero, parts, rows, outputs, inputs, segment, x_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    TAIL: tl.constexpr, TILE_N: tl.constexpr, TILE_T: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows, segment), or, of the WHOLE, all segments: parts [P, T, N].

    TAIL: whether STEP does not divide every segment.
    """
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    t = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    part = tl.program_id(2)
    x_rows = x + t.to(tl.int64)[None, :] * x_stride
    row_there = (t < rows)[None, :]
    # Outputs beyond the last are computed as the last, and not kept.
    w = tl.minimum(n, outputs - 1).to(tl.int64)
    follow(PDL, values + (w * inputs + part * segment) // (2 if BITS == 4 else 1))
    if WHOLE:
        total = tl.zeros((TILE_N, TILE_T), tl.float32)
        for start in range(0, inputs, segment):
            part_total, _ = sums(
                x_rows, row_there, values, scale, zero, w, None,
                start, tl.minimum(start + segment, inputs), inputs,
                BITS, GROUP, PAIRS, TAIL, TILE_N, TILE_T, STEP,
            )  # fmt: skip
            total += part_total
    else:
        start = part * segment
        total, _ = sums(
            x_rows, row_there, values, scale, zero, w, None,
            start, tl.minimum(start + segment, inputs), inputs,
            BITS, GROUP, PAIRS, TAIL, TILE_N, TILE_T, STEP,
        )  # fmt: skip
    to = parts + (part.to(tl.int64) * rows + t[None, :]) * outputs + n[:, None]
    tl.store(to, total, mask=(n < outputs)[:, None] & row_there)


@triton.jit(do_not_specialize=["rows"])
def gate_up(
    x, values, scale, zero, bias, y, rows, width, inputs, segment, x_stride, y_stride,
    ACTIVATION: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
    TAIL: tl.constexpr, TILE_N: tl.constexpr, TILE_T: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows): act(gate) * up, of `width` gates and then as many ups."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    t = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    x_rows = x + t.to(tl.int64)[None, :] * x_stride
    row_there = (t < rows)[None, :]
    w = tl.minimum(n, width - 1).to(tl.int64)
    follow(PDL, values + w * inputs // (2 if BITS == 4 else 1))
    gate = tl.zeros((TILE_N, TILE_T), tl.float32)
    up = tl.zeros((TILE_N, TILE_T), tl.float32)
    for start in range(0, inputs, segment):
        end = tl.minimum(start + segment, inputs)
        gate_part, up_part = sums(
            x_rows, row_there, values, scale, zero, w, w + width, start, end, inputs,
            BITS, GROUP, PAIRS, TAIL, TILE_N, TILE_T, STEP,
        )  # fmt: skip
        gate += gate_part
        up += up_part
    found = gated(gate, up, bias, w, width, 0.0, y.dtype.element_ty, ACTIVATION)
    to = y + t.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(to, found, mask=(n < width)[:, None] & row_there)


@triton.jit
def gated(gate, up, bias, w, width, limit, kind: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(gate) * up of sums of these outputs and their bias, each rounded to `kind`; ACTIVATION:
    as `gpu_kernels` counts them."""
    if bias is not None:
        gate += tl.load(bias + w).to(tl.float32)[:, None]
        up += tl.load(bias + width + w).to(tl.float32)[:, None]
    gate = gate.to(kind).to(tl.float32)
    up = up.to(kind).to(tl.float32)
    inner = gate
    if ACTIVATION == 1:
        # 2 sqrt(2 / pi).
        inner = (gate * gate * 0.044715 + 1.0) * gate * 1.5957691216057308
    if ACTIVATION == 2:
        # What is no number stays none.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        inner = gate * 1.702
    gate = gate / (1.0 + tl.exp(-inner))
    if ACTIVATION != 2:
        gate = gate.to(kind).to(tl.float32)
    return (gate * up).to(kind)


@triton.jit
def sums(
    x, row_there, values, scale, zero, w, w_2, start, end, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    TILE_N: tl.constexpr, TILE_T: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The sums over one segment of a tile of outputs, and of a second one if there is one; each
    has the bits that it has alone."""
    total = tl.zeros((TILE_N, TILE_T), tl.float32)
    total_2 = total
    for at in range(start, end, STEP):
        low, high = _rows(x, row_there, at, end, BITS, GROUP, TAIL, STEP)
        total = _add(
            total, low, high, values, scale, zero, w, at, end, inputs,
            BITS, GROUP, PAIRS, TAIL, STEP,
        )  # fmt: skip
        if w_2 is not None:
            total_2 = _add(
                total_2, low, high, values, scale, zero, w_2, at, end, inputs,
                BITS, GROUP, PAIRS, TAIL, STEP,
            )  # fmt: skip
    if BITS > 0 and GROUP == 0:
        total *= tl.load(scale + w).to(tl.float32)[:, None]
        if w_2 is not None:
            total_2 *= tl.load(scale + w_2).to(tl.float32)[:, None]
    return total, total_2


@triton.jit
def _rows(
    x, row_there, at, end,
    BITS: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Inputs of a step [STEP, rows]; where two values share a byte, those of the low bits, then
    those of the high ones: the halves of each group."""
    if BITS == 4:
        j = tl.arange(0, STEP // 2)[:, None]
        k = at + j // (GROUP // 2) * GROUP + j % (GROUP // 2)
    else:
        k = at + tl.arange(0, STEP)[:, None]
    there = row_there
    if TAIL:
        there = there & (k < end)
    low = tl.load(x + k, mask=there, other=0.0)
    high = low
    if BITS == 4:
        high = tl.load(x + GROUP // 2 + k, mask=there, other=0.0)
    return low, high


@triton.jit
def _add(
    total, low, high, values, scale, zero, w, at, end, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The sum, one step of inputs further."""
    kind: tl.constexpr = low.dtype
    row = values + w[:, None] * (inputs // 2 if BITS == 4 else inputs)
    if BITS == 4:
        byte = at // 2 + tl.arange(0, STEP // 2)[None, :]
        tile = _tile(row + byte, byte < end // 2, TAIL)
        first = (tile & 15).to(tl.float32)
        second = (tile >> 4).to(tl.float32)
        factor = _numbers(scale, w, at, end, inputs, GROUP // 2, GROUP, PAIRS, TAIL, STEP)
        middle = 8.0
        if zero is not None:
            middle = _numbers(zero, w, at, end, inputs, GROUP // 2, GROUP, PAIRS, TAIL, STEP)
        total = tl.dot(((first - middle) * factor).to(kind), low, total, input_precision="ieee")
        total = tl.dot(((second - middle) * factor).to(kind), high, total, input_precision="ieee")
    else:
        k = at + tl.arange(0, STEP)[None, :]
        tile = _tile(row + k, k < end, TAIL)
        if GROUP > 0:
            factor = _numbers(scale, w, at, end, inputs, GROUP, GROUP, PAIRS, TAIL, STEP)
            tile = tile.to(tl.float32)
            if zero is not None:
                tile -= _numbers(zero, w, at, end, inputs, GROUP, GROUP, PAIRS, TAIL, STEP)
            tile *= factor
        if tile.dtype == tl.float32 and BITS == 0:
            # Rows may be narrower; matrix instructions take a product in three parts.
            total = tl.dot(tile, low.to(tl.float32), total, input_precision="tf32x3")
        else:
            total = tl.dot(tile.to(kind), low, total, input_precision="ieee")
    return total


@triton.jit
def _tile(cells, there, TAIL: tl.constexpr):
    if TAIL:
        found = tl.load(cells, mask=there, other=0)
    else:
        found = tl.load(cells)
    return found


@triton.jit
def _numbers(
    numbers, w, at, end, inputs,
    EACH: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The numbers of a step's groups, float32, EACH times side by side."""
    count: tl.constexpr = STEP // GROUP
    size: tl.constexpr = w.shape[0]
    if PAIRS:
        # float16: what is read ahead comes four bytes at a time at least.
        pairs = numbers.to(tl.pointer_type(tl.int32), bitcast=True)
        group = at // GROUP // 2 + tl.arange(0, count // 2)[None, :]
        cells = pairs + w[:, None] * (inputs // GROUP // 2) + group
        both = _tile(cells, group < end // GROUP // 2, TAIL)
        even = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        odd = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        found = tl.reshape(tl.join(even, odd), (size, count))
    else:
        group = at // GROUP + tl.arange(0, count)[None, :]
        cells = numbers + w[:, None] * (inputs // GROUP) + group
        found = _tile(cells, group < end // GROUP, TAIL)
    found = tl.broadcast_to(found.to(tl.float32)[:, :, None], (size, count, EACH))
    return tl.reshape(found, (size, count * EACH))
