"""Triton kernels of mixtures of experts; `gpu_kernels` says what they promise.

Owns device code, no launch: `launches` has those. Importing it imports triton.

A row's pair with an expert goes through the same products as a row of any matrix, in a block with
other pairs of that expert; it finds its inputs and leaves its results by its own number, so nothing
is moved when pairs are sorted.
"""

import triton
import triton.language as tl

from foretoken.kernels.triton.matrix import gated, sums

_LOWEST = tl.constexpr(-0x80000000)


@triton.jit
def _rank(x):
    """Integers in the order of floats; what is no number is larger than all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softmax(x, there):
    """Over those that are there, the others 0."""
    x = tl.where(there, x, float("-inf"))
    powers = tl.exp(x - tl.max(x))
    return powers / tl.sum(powers)


@triton.jit
def _scores(x, there, softcap, SCORE: tl.constexpr, CAPPED: tl.constexpr):
    if CAPPED:
        x = (_sigmoid(x * (2.0 / softcap)) * 2.0 - 1.0) * softcap
    if SCORE == "softmax":
        x = _softmax(x, there)
    if SCORE == "sigmoid":
        x = _sigmoid(x)
    return x


@triton.jit
def _weights(score, chosen, floor, added, WEIGHTS: tl.constexpr):
    if WEIGHTS == "normalized":
        total = tl.sum(tl.where(chosen, score, 0.0))
        score = score / (tl.where(total < floor, floor, total) + added)
    if WEIGHTS == "softmax":
        score = _softmax(score, chosen)
    if WEIGHTS == "sigmoid":
        score = _sigmoid(score)
    return score


@triton.jit
def _within_groups(x, e, there, SIZE: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr):
    """Minus infinity outside the OPEN best groups of SIZE: those whose two best have most."""
    worth = x
    for group in range(GROUPS):
        inside = there & (e // SIZE == group)
        rank = tl.where(inside, _rank(x), _LOWEST)
        best = tl.argmax(rank, 0)
        second = tl.argmax(tl.where(e == best, _LOWEST, rank), 0)
        two = tl.sum(tl.where(e == best, x, 0.0)) + tl.sum(tl.where(e == second, x, 0.0))
        worth = tl.where(inside, two, worth)
    rank = tl.where(there, _rank(worth), _LOWEST)
    is_open = e < 0
    for _ in range(OPEN):
        own = e // SIZE == tl.argmax(rank, 0) // SIZE
        is_open = is_open | own
        rank = tl.where(own, _LOWEST, rank)
    return tl.where(is_open, x, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def choose(
    parts, bias, choice_bias, live, weights, experts, rows, width, softcap, floor, added, scale,
    PARTS: tl.constexpr, KIND: tl.constexpr, COUNT: tl.constexpr, USED: tl.constexpr,
    SCORE: tl.constexpr, WEIGHTS: tl.constexpr, SLOTS: tl.constexpr, CAPPED: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program row: its experts and their weights; of a row that is not live, no expert.

    Of `width` products COUNT are experts'; one more is a gate. SLOTS: weights of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    there = e < COUNT
    x = tl.load(parts + row * width + e, mask=e < width, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(parts + (part * rows + row) * width + e, mask=e < width, other=0.0)
    if bias is not None:
        x += tl.load(bias + e, mask=there, other=0.0).to(tl.float32)
    x = x.to(KIND).to(tl.float32)
    if SLOTS > USED:
        gate = 1.0
        if width > COUNT:
            gate = _sigmoid(tl.sum(tl.where(e == COUNT, x, 0.0)))
        tl.store(weights + row * SLOTS + USED, gate)
    score = _scores(x, there, softcap, SCORE, CAPPED)
    choosing = score
    if choice_bias is not None:
        choosing += tl.load(choice_bias + e, mask=there, other=0.0)
    if GROUPS > 1:
        choosing = _within_groups(choosing, e, there, COUNT // GROUPS, GROUPS, OPEN)
    rank = tl.where(there, _rank(choosing), _LOWEST)
    chosen = e < 0
    for _ in range(USED):
        best = tl.argmax(rank, 0)
        chosen = chosen | (e == best)
        rank = tl.where(e == best, _LOWEST, rank)
    weight = _weights(score, chosen, floor, added, WEIGHTS) * scale
    rank = tl.where(chosen, _rank(weight), _LOWEST)
    is_live = row < tl.load(live)
    for slot in range(USED):
        best = tl.argmax(rank, 0)
        tl.store(weights + row * SLOTS + slot, tl.sum(tl.where(e == best, weight, 0.0)))
        tl.store(experts + row * USED + slot, tl.where(is_live, best, COUNT))
        rank = tl.where(e == best, _LOWEST, rank)


@triton.jit(do_not_specialize=["read", "pairs", "most"])
def sort_pairs(
    experts, order, blocks, read, pairs, most,
    COUNT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program expert: its pairs in order of their numbers, behind those of experts before it, and
    its blocks; one program more ends the list of blocks. BLOCK is more than COUNT."""
    own = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    c = tl.arange(0, CHUNK)
    counts = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, pairs, CHUNK):
        found = tl.load(experts + at + c, mask=at + c < pairs, other=COUNT)
        counts += tl.histogram(found, BLOCK)
    counts = tl.where(e < COUNT, counts, 0)
    tiles = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(e < own, counts, 0))
    block = tl.sum(tl.where(e < own, tiles, 0))
    count = tl.sum(tl.where(e == own, counts, 0))
    # Of each block: expert, first place in the order, pairs.
    if own == COUNT:
        tl.store(read, tl.sum((counts > 0).to(tl.int32)))
        for at in range(block, most, CHUNK):
            tl.store(blocks + (at + c) * 3 + 2, tl.zeros_like(c), mask=at + c < most)
    else:
        for at in range(0, count, TILE):
            to = blocks + (block + at // TILE) * 3
            tl.store(to, own)
            tl.store(to + 1, first + at)
            tl.store(to + 2, tl.minimum(count - at, TILE))
        for at in range(0, pairs, CHUNK):
            mine = tl.load(experts + at + c, mask=at + c < pairs, other=COUNT) == own
            place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(order + place, at + c, mask=mine)
            first += tl.sum(mine.to(tl.int32))


@triton.jit
def _block(order, blocks, TILE_T: tl.constexpr):
    """A block's expert, its pairs, and which of its places have one."""
    block = blocks + tl.program_id(1) * 3
    count = tl.load(block + 2)
    t = tl.arange(0, TILE_T)
    there = t < count
    expert = tl.load(block, mask=count > 0, other=0).to(tl.int64)
    first = tl.load(block + 1, mask=count > 0, other=0)
    pair = tl.load(order + first + t, mask=there, other=0).to(tl.int64)
    return expert, pair, there[None, :], count


@triton.jit
def gate_up(
    x, values, scale, zero, bias, order, blocks, y, width, inputs, x_stride, limit,
    ACTIVATION: tl.constexpr, USED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, TILE_N: tl.constexpr, TILE_T: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Program (outputs, block): act(gate) * up of each pair, [P, width]."""
    expert, pair, there, count = _block(order, blocks, TILE_T)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    w = expert * (2 * width) + tl.minimum(n, width - 1)
    # Of a block without pairs nothing is read.
    end = tl.where(count > 0, inputs, 0)
    gate, up = sums(
        x + (pair // USED)[None, :] * x_stride, there, values, scale, zero, w, w + width,
        0, end, inputs, BITS, GROUP, PAIRS, TAIL, TILE_N, TILE_T, STEP,
    )  # fmt: skip
    found = gated(gate, up, bias, w, width, limit, y.dtype.element_ty, ACTIVATION)
    tl.store(y + pair[None, :] * width + n[:, None], found, mask=(n < width)[:, None] & there)


@triton.jit(do_not_specialize=["rows"])
def down(
    x, values, scale, zero, bias, order, blocks, parts, rows, outputs, inputs,
    USED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
    TAIL: tl.constexpr, TILE_N: tl.constexpr, TILE_T: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (outputs, block): what an expert gives to each of its pairs, by slot and row."""
    expert, pair, there, count = _block(order, blocks, TILE_T)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    w = expert * outputs + tl.minimum(n, outputs - 1)
    end = tl.where(count > 0, inputs, 0)
    total, _ = sums(
        x + pair[None, :] * inputs, there, values, scale, zero, w, None,
        0, end, inputs, BITS, GROUP, PAIRS, TAIL, TILE_N, TILE_T, STEP,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + w).to(tl.float32)[:, None]
    to = parts + (pair % USED * rows + pair // USED)[None, :] * outputs + n[:, None]
    tl.store(to, total, mask=(n < outputs)[:, None] & there)
