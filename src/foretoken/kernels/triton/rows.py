"""Triton kernels of what is done to rows between matrices; `gpu_kernels` says what they promise.

Owns device code, no launch: `launches` has those. Importing it imports triton. A row is one
program's, or a head of it is, so its sums are made in one order, that of its width.
"""

import triton
import triton.language as tl

from foretoken.kernels.triton.matrix import follow


@triton.jit
def embed(
    tokens, table, y, table_stride, y_stride, scale, WIDTH,
    BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program (row, columns): the row of a table that a number names, times scale."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(table + token * table_stride + d, mask=d < WIDTH, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(y + row * y_stride + d, x, mask=d < WIDTH)


@triton.jit
def _added(parts, bias, row, rows, d, there, width, PARTS: tl.constexpr, weights=None):
    """float32: a row's parts in order, times their weights if there are some, then the bias."""
    y = tl.load(parts + row * width + d, mask=there, other=0.0)
    if weights is not None:
        y *= tl.load(weights + row * PARTS)
    for part in tl.static_range(1, PARTS):
        z = tl.load(parts + (part * rows + row) * width + d, mask=there, other=0.0)
        if weights is not None:
            z *= tl.load(weights + row * PARTS + part)
        y += z
    if bias is not None:
        y += tl.load(bias + d, mask=there, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    parts, weights, bias, residual, y, rows, width, residual_stride, y_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, columns): parts + bias + residual, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _added(parts, bias, row, rows, d, d < width, width, PARTS, weights)
    if residual is not None:
        total += tl.load(residual + row * residual_stride + d, d < width, 0.0).to(tl.float32)
    tl.store(y + row * y_stride + d, total.to(y.dtype.element_ty), mask=d < width)


@triton.jit
def _normed(x, weight, d, there, width, eps):
    """float32: x / rms(x) * weight."""
    factor = 1.0 / tl.sqrt(tl.sum(x * x) / width + eps)
    return x * factor * tl.load(weight + d, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def add_norm(
    parts, weights, bias, stream, after, weight, normed, kept, kept_slots, kept_normed,
    kept_normed_slots, rows, width, stream_stride, normed_stride, kept_stride, kept_normed_stride,
    eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program row: its parts, or their norm, onto the stream; then the norm of that."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    there = d < width
    kind: tl.constexpr = stream.dtype.element_ty
    x = tl.load(stream + row * stream_stride + d, mask=there, other=0.0).to(tl.float32)
    if PARTS > 0:
        y = _added(parts, bias, row, rows, d, there, width, PARTS, weights)
        if after is not None:
            y = y.to(kind).to(tl.float32)
            y = _normed(y, after, d, there, width, eps).to(kind).to(tl.float32)
        x = (y + x).to(kind)
        tl.store(stream + row * stream_stride + d, x, mask=there)
        x = x.to(tl.float32)
    if kept is not None:
        slot = tl.load(kept_slots + row).to(tl.int64)
        tl.store(kept + slot * kept_stride + d, x.to(kind), mask=there)
    if weight is not None:
        x = _normed(x, weight, d, there, width, eps).to(kind)
        tl.store(normed + row * normed_stride + d, x, mask=there)
        if kept_normed is not None:
            slot = tl.load(kept_normed_slots + row).to(tl.int64)
            tl.store(kept_normed + slot * kept_normed_stride + d, x, mask=there)


@triton.jit(do_not_specialize=["rows"])
def turn_and_write(
    parts, bias, query_norm, key_norm, cos, sin, query_scale, places, slots, q, numbers, scales,
    rows, width, q_stride, slot_stride, head_stride, scale_stride, head_scale_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, TURNED: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head of queries, keys or values).

    TURNED: of a head's SIZE numbers the first that are turned. WHOLE: norms reach over ALL numbers
    of the queries, or of the keys, at most.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_query = head < HEADS
    d = tl.arange(0, BLOCK)
    there = d < SIZE
    kind: tl.constexpr = q.dtype.element_ty
    at = head * SIZE
    x = _added(parts, bias, row, rows, at + d, there, width, PARTS).to(kind)
    if head < HEADS + KV_HEADS:
        place = tl.load(places + row).to(tl.int64)
        # Each number's partner: the other half of what is turned.
        e = tl.where(d < TURNED // 2, d + TURNED // 2, d - TURNED // 2)
        turned = d < TURNED
        y = x.to(tl.float32)
        z = _added(parts, bias, row, rows, at + e, turned, width, PARTS).to(kind).to(tl.float32)
        if query_norm is not None:
            first = tl.where(is_query, 0, HEADS * SIZE)
            of = at - first if WHOLE else 0
            if WHOLE:
                f = tl.arange(0, ALL)
                count = tl.where(is_query, HEADS * SIZE, KV_HEADS * SIZE)
                whole = _added(parts, bias, row, rows, first + f, f < count, width, PARTS)
                whole = whole.to(kind).to(tl.float32)
            else:
                count = SIZE
                whole = y
            factor = 1.0 / tl.sqrt(tl.sum(whole * whole) / count + eps)
            if is_query:
                weight = tl.load(query_norm + of + d, mask=there, other=0.0).to(tl.float32)
                other = tl.load(query_norm + of + e, mask=turned, other=0.0).to(tl.float32)
            else:
                weight = tl.load(key_norm + of + d, mask=there, other=0.0).to(tl.float32)
                other = tl.load(key_norm + of + e, mask=turned, other=0.0).to(tl.float32)
            y = y * factor * weight
            z = z * factor * other
        c = tl.load(cos + place * TURNED + d, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + place * TURNED + d, mask=turned, other=0.0).to(tl.float32)
        x = (y * c + z * s).to(kind)
        if query_scale is not None:
            if is_query:
                x = (x.to(tl.float32) * tl.load(query_scale + place).to(tl.float32)).to(kind)
    if is_query:
        tl.store(q + row * q_stride + at + d, x, mask=there)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        to = numbers + slot * slot_stride + (head - HEADS) * head_stride + d
        if scales is None:
            tl.store(to, x, mask=there)
        else:
            number, scale = _in_int8(x.to(tl.float32))
            tl.store(to, number, mask=there)
            to = scales + slot * scale_stride + (head - HEADS) * head_scale_stride
            tl.store(to, scale)


@triton.jit
def _in_int8(x):
    """A head as `ops.quantize_kv` rounds it: its numbers and their scale, NaN where some of it is
    not finite."""
    # The least normal float32; 3 * 2 ** 22, with which a sum has no room for fractions.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x)), 127.0), 1.1754943508222875e-38)
    scale += tl.sum(x * 0.0)
    number = tl.div_rn(x, tl.zeros_like(x) + scale) + 12582912.0 - 12582912.0
    number = tl.where(number == number, number, -127.0)
    return number.to(tl.int8), scale
