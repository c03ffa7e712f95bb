"""Triton kernels of matrices, floats and integers; `gpu_kernels` says what they promise.

Owns device code, no launch: `triton_kernels` has those, and which tiles a shape has. Importing it
imports triton.

Weights are the first operand of a product and rows the second: so 64 outputs fill the matrix
instruction, whatever the number of rows, and rows come in tiles of any size. The inputs are cut
into segments, whose length belongs to the shape of the weights; a sum is made within a segment in
order of the inputs, and segments are added in order, here or by whoever reads them.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def linear(
    x,
    values,
    scale,
    zero,
    parts,
    rows,
    outputs,
    inputs,
    segment,
    x_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    TAIL: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    STEP: tl.constexpr,
):
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
    if WHOLE:
        total = tl.zeros((TILE_N, TILE_T), tl.float32)
        for start in range(0, inputs, segment):
            end = tl.minimum(start + segment, inputs)
            total += _sum(
                x_rows, row_there, values, scale, zero, w, start, end, inputs,
                BITS, GROUP, TAIL, TILE_N, TILE_T, STEP,
            )  # fmt: skip
    else:
        start = part * segment
        total = _sum(
            x_rows, row_there, values, scale, zero, w, start, tl.minimum(start + segment, inputs),
            inputs, BITS, GROUP, TAIL, TILE_N, TILE_T, STEP,
        )  # fmt: skip
    to = parts + (part.to(tl.int64) * rows + t[None, :]) * outputs + n[:, None]
    tl.store(to, total, mask=(n < outputs)[:, None] & row_there)


@triton.jit(do_not_specialize=["rows"])
def gate_up(
    x,
    values,
    scale,
    zero,
    bias,
    y,
    rows,
    width,
    inputs,
    segment,
    x_stride,
    y_stride,
    GELU: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TAIL: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (outputs, rows): act(gate) * up, of `width` gates and then as many ups."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    t = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    x_rows = x + t.to(tl.int64)[None, :] * x_stride
    row_there = (t < rows)[None, :]
    w = tl.minimum(n, width - 1).to(tl.int64)
    gate = tl.zeros((TILE_N, TILE_T), tl.float32)
    up = tl.zeros((TILE_N, TILE_T), tl.float32)
    for start in range(0, inputs, segment):
        end = tl.minimum(start + segment, inputs)
        gate_part, up_part = _sums(
            x_rows, row_there, values, scale, zero, w, w + width, start, end, inputs,
            BITS, GROUP, TAIL, TILE_N, TILE_T, STEP,
        )  # fmt: skip
        gate += gate_part
        up += up_part
    if bias is not None:
        gate += tl.load(bias + w).to(tl.float32)[:, None]
        up += tl.load(bias + width + w).to(tl.float32)[:, None]
    kind: tl.constexpr = y.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    inner = gate
    if GELU:
        # 2 sqrt(2 / pi).
        inner = (gate * gate * 0.044715 + 1.0) * gate * 1.5957691216057308
    gate = (gate / (1.0 + tl.exp(-inner))).to(kind).to(tl.float32)
    up = up.to(kind).to(tl.float32)
    to = y + t.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(to, (gate * up).to(kind), mask=(n < width)[:, None] & row_there)


@triton.jit
def _sum(
    x, row_there, values, scale, zero, w, start, end, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr,
    TILE_N: tl.constexpr, TILE_T: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The sum over one segment, scaled."""
    total = tl.zeros((TILE_N, TILE_T), tl.float32)
    for at in range(start, end, STEP):
        low, high = _rows(x, row_there, at, end, BITS, TAIL, STEP)
        total = _add(total, low, high, values, scale, zero, w, at, end, inputs, BITS, GROUP, TAIL, STEP)
    if BITS > 0 and GROUP == 0:
        total *= tl.load(scale + w).to(tl.float32)[:, None]
    return total


@triton.jit
def _sums(
    x, row_there, values, scale, zero, w, w_2, start, end, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr,
    TILE_N: tl.constexpr, TILE_T: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The sums over one segment of two tiles of outputs, with the same bits as of each alone."""
    total = tl.zeros((TILE_N, TILE_T), tl.float32)
    total_2 = tl.zeros((TILE_N, TILE_T), tl.float32)
    for at in range(start, end, STEP):
        low, high = _rows(x, row_there, at, end, BITS, TAIL, STEP)
        total = _add(total, low, high, values, scale, zero, w, at, end, inputs, BITS, GROUP, TAIL, STEP)
        total_2 = _add(
            total_2, low, high, values, scale, zero, w_2, at, end, inputs, BITS, GROUP, TAIL, STEP
        )
    if BITS > 0 and GROUP == 0:
        total *= tl.load(scale + w).to(tl.float32)[:, None]
        total_2 *= tl.load(scale + w_2).to(tl.float32)[:, None]
    return total, total_2


@triton.jit
def _rows(x, row_there, at, end, BITS: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr):
    """Inputs of a step [STEP, rows]; where two values share a byte, its first and second half."""
    half: tl.constexpr = STEP // 2 if BITS == 4 else STEP
    k = at + tl.arange(0, half)[:, None]
    there = row_there
    if TAIL:
        there = there & (k < end)
    low = tl.load(x + k, mask=there, other=0.0)
    high = low
    if BITS == 4:
        high = tl.load(x + half + k, mask=row_there, other=0.0)
    return low, high


@triton.jit
def _add(
    total, low, high, values, scale, zero, w, at, end, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The sum, one step of inputs further."""
    kind: tl.constexpr = low.dtype
    part = total
    if GROUP > 0:
        part = tl.zeros_like(total)
    if BITS == 4:
        byte = at // 2 + tl.arange(0, STEP // 2)[None, :]
        both = tl.load(values + w[:, None] * (inputs // 2) + byte)
        part = tl.dot(((both & 15).to(tl.int8) - 8).to(kind), low, part, input_precision="ieee")
        part = tl.dot(((both >> 4).to(tl.int8) - 8).to(kind), high, part, input_precision="ieee")
    else:
        k = at + tl.arange(0, STEP)[None, :]
        cells = values + w[:, None] * inputs + k
        if TAIL:
            tile = tl.load(cells, mask=k < end, other=0)
        else:
            tile = tl.load(cells)
        part = tl.dot(tile.to(kind), low, part, input_precision="ieee")
    if GROUP > 0:
        group = w * (inputs // GROUP) + at // GROUP
        if zero is not None:
            # Sums of the rows' inputs, in every output alike; as products, which have an order.
            ones = tl.full((total.shape[0], low.shape[0]), 1.0, kind)
            inputs_sum = tl.dot(ones, low, input_precision="ieee")
            inputs_sum = tl.dot(ones, high, inputs_sum, input_precision="ieee")
            part += inputs_sum * (8.0 - tl.load(zero + group).to(tl.float32))[:, None]
        part = total + part * tl.load(scale + group).to(tl.float32)[:, None]
    return part
