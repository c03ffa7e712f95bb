"""Triton kernels of attention over paged keys and values; `gpu_kernels` says what they promise.

Owns device code, no launch: `launches` has those. Importing it imports triton.

A row's bits are its own: blocks of keys begin at absolute places, what a row does not see leaves
its sums as they are, to the bit, and weights are added up as a product with ones, in the order of
the keys, where a reduction would go by how a tile is spread over warps.
"""

import triton
import triton.language as tl

from foretoken.kernels.triton.matrix import follow


@triton.jit(do_not_specialize=["tails_stride"])
def attend(
    q, numbers, scales, sinks, out, sums, top_mass, units, places, lasts, runs, bases, pages, tails,
    q_stride, out_stride, slot_stride, head_stride, scale_stride, head_scale_stride, tails_stride,
    scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, TREES: tl.constexpr, SPLITS: tl.constexpr,
    BY_KEY: tl.constexpr, INTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (unit, key head): a tile of rows over a split; WIDTH, a power of two, holds SIZE."""
    follow(PDL)
    unit = units + tl.program_id(0) * INTS
    head = tl.program_id(1)
    first = tl.load(unit)
    count = tl.load(unit + 1)
    start = tl.load(unit + 2)
    end = tl.load(unit + 3)
    table = pages + tl.load(unit + 4)
    split = tl.load(unit + 5)
    low = split * SPLIT
    high = tl.minimum(end, low + SPLIT)
    begin = 0
    if WINDOW > 0:
        # Pages before are another's, perhaps.
        begin = tl.maximum(0, tl.load(unit + 6) - WINDOW + 1)
        low = tl.maximum(low, begin // KEYS * KEYS)
    m = tl.arange(0, TILE)
    there = m // GROUP < count
    row = (first + m // GROUP).to(tl.int64)
    query = head * GROUP + m % GROUP if BY_KEY else m % GROUP * HEADS + head
    d = tl.arange(0, WIDTH)
    cell = there[:, None] & (d < SIZE)[None, :]
    x = tl.load(q + row[:, None] * q_stride + (query * SIZE)[:, None] + d[None, :], cell, 0.0)
    place = tl.load(places + row, mask=there, other=-1)
    last = place
    if lasts is not None:
        last = tl.load(lasts + row, mask=there, other=-1)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    mass = tl.zeros((TILE, 16), tl.float32)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    keys = numbers + head * head_stride
    values = keys + HEADS * head_stride
    key_scales = scales
    value_scales = scales
    if scales is not None:
        key_scales = scales + head * head_scale_stride
        value_scales = key_scales + HEADS * head_scale_stride
    blocks = tl.cdiv(high - low, KEYS)
    shared = blocks
    own = 0
    if TREES:
        # Blocks below that of `start` are everybody's; then comes each branch, as the chain it is.
        run_of_row = tl.load(runs + row, mask=there, other=-1)
        first_run = tl.load(unit + 7)
        count_runs = tl.load(unit + 8)
        if count_runs > 0:
            shared = tl.maximum(0, tl.minimum(blocks, start // KEYS - low // KEYS))
            own = blocks - shared
            blocks = shared + own * count_runs
    for block in range(blocks):
        n = low + block * KEYS + tl.arange(0, KEYS)
        stored = n
        mine = there
        if TREES:
            # Below 0 of blocks that are shared.
            branch = (block - shared + own) // tl.maximum(own, 1) - 1
            run = first_run + branch
            n -= tl.maximum(branch, 0) * own * KEYS
            behind = (n >= tl.where(branch < 0, end, start)) & (n < end)
            tail = tl.load(tails + run * tails_stride + n - start, mask=behind, other=0)
            stored = tl.where(behind, start + tail, n)
            mine = there & (run_of_row == tl.where(branch < 0, run_of_row, run))
        own_key = (n >= begin) & (n < end)
        page = tl.load(table + stored // PAGE, mask=own_key, other=0)
        slot = (page * PAGE + stored % PAGE).to(tl.int64)
        k = _stored(
            keys, key_scales, slot, own_key, slot_stride, scale_stride, x.dtype, SIZE, WIDTH
        )
        score = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        seen = (n[None, :] <= last[:, None]) & mine[:, None]
        if WINDOW > 0:
            seen = seen & (n[None, :] > place[:, None] - WINDOW)
        if CAPPED:
            t = tl.exp(-2.0 * tl.abs(score / softcap))
            t = (1.0 - t) / (1.0 + t)
            score = softcap * tl.where(score < 0, -t, t)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(top - finite)[:, None]
        weight = tl.exp(score - finite[:, None]).to(x.dtype)
        top = higher
        ones = tl.full((KEYS, 16), 1.0, x.dtype)
        mass = tl.dot(weight, ones, mass * shrink, input_precision="ieee")
        v = _stored(
            values, value_scales, slot, own_key, slot_stride, scale_stride, x.dtype, SIZE, WIDTH
        )
        total = tl.dot(weight, v, total * shrink, input_precision="ieee")
    mass = tl.max(mass, 1)  # All columns are equal.
    if SPLITS:
        # A row has a result of every split that it sees some of, by its place alone.
        has = there & (last >= split * SPLIT)
        if WINDOW > 0:
            has = has & (place - WINDOW + 1 < (split + 1) * SPLIT)
        base = tl.load(bases + row, mask=has, other=0).to(tl.int64) + split
        base = base * (HEADS * GROUP) + query
        cell = has[:, None] & (d < SIZE)[None, :]
        tl.store(sums + base[:, None] * SIZE + d[None, :], total, mask=cell)
        tl.store(top_mass + base * 2, top, mask=has)
        tl.store(top_mass + base * 2 + 1, mass, mask=has)
    else:
        if sinks is not None:
            sink = tl.load(sinks + query).to(tl.float32)
            total, mass = _with_sink(total, mass[:, None], top[:, None], sink[:, None])
        else:
            mass = mass[:, None]
        y = total / tl.where(mass == 0.0, 1.0, mass)
        to = out + row[:, None] * out_stride + (query * SIZE)[:, None] + d[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=cell)


@triton.jit
def _stored(
    numbers, scales, slot, there, slot_stride, scale_stride,
    kind: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A head's keys, or values, in these slots: [keys, WIDTH]."""
    d = tl.arange(0, WIDTH)
    cell = there[:, None]
    if SIZE != WIDTH:
        cell = cell & (d < SIZE)[None, :]
    found = tl.load(numbers + slot[:, None] * slot_stride + d[None, :], mask=cell, other=0)
    if scales is not None:
        scale = tl.load(scales + slot * scale_stride, mask=there, other=0.0)
        found = (found.to(tl.float32) * scale[:, None]).to(kind)
    return found


@triton.jit
def _with_sink(total, mass, top, sink):
    """One more key, whose score is the sink and whose value is 0."""
    higher = tl.maximum(top, sink)
    shrink = tl.exp(top - higher)
    return total * shrink, mass * shrink + tl.exp(sink - higher)


@triton.jit
def combine(
    sums, top_mass, sinks, places, lasts, bases, out, out_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): its results of splits, AT_ONCE by AT_ONCE, in order."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, WIDTH)
    place = tl.load(places + row)
    base = tl.load(bases + row).to(tl.int64)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, place - WINDOW + 1) // SPLIT
    last = place
    if lasts is not None:
        last = tl.load(lasts + row)
    end = last // SPLIT + 1
    top = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for split in range(first, end, AT_ONCE):
        s = split + tl.arange(0, AT_ONCE)
        at = (base + s) * HEADS + head
        tops = tl.load(top_mass + at * 2, mask=s < end, other=float("-inf"))
        masses = tl.load(top_mass + at * 2 + 1, mask=s < end, other=0.0)
        cell = (s < end)[:, None] & (d < SIZE)[None, :]
        parts = tl.load(sums + at[:, None] * SIZE + d[None, :], mask=cell, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(top - finite)
        weight = tl.exp(tops - finite)
        mass = mass * shrink + tl.sum(masses * weight, 0)
        total = total * shrink + tl.sum(parts * weight[:, None], 0)
        top = higher
    if sinks is not None:
        total, mass = _with_sink(total, mass, top, tl.load(sinks + head).to(tl.float32))
    y = total / tl.where(mass == 0.0, 1.0, mass)
    to = out + row * out_stride + head * SIZE + d
    tl.store(to, y.to(out.dtype.element_ty), mask=d < SIZE)
