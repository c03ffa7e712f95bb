"""Triton kernels that choose tokens; `gpu_kernels` says what they promise.

Owns device code, no launch: `launches` has those. Importing it imports triton. A row of
logits is read by one program for each SPAN of its ids; what those found is compared in order.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["logits_stride"])
def draw(
    logits, keys, how, kept, names, best, ids, logits_stride, vocabulary,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Program (row, span): the best id by l / temperature + noise, the lowest of equals."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    heat = tl.load(how + row * 4)
    least = float("-inf")
    if kept is not None:
        least = tl.load(kept + row * 3 + 2)
    first = tl.load(keys + row * 2)
    second = tl.load(keys + row * 2 + 1)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    top_id = tl.zeros((BLOCK,), tl.int32)
    for at in range(span * SPAN, tl.minimum(vocabulary, (span + 1) * SPAN), BLOCK):
        i = at + tl.arange(0, BLOCK)
        score = tl.load(logits + row * logits_stride + i, i < vocabulary, float("-inf"))
        if heat > 0.0:
            token = i
            if names is not None:
                token = tl.load(names + i, mask=i < vocabulary, other=0)
            x = tl.div_rn(score, tl.zeros_like(score) + heat)
            score = tl.where(x >= least, x - tl.log(noise(token, first, second)), float("-inf"))
        better = score > top
        top = tl.where(better, score, top)
        top_id = tl.where(better, i, top_id)
    at = row * tl.num_programs(1) + span
    tl.store(best + at, tl.max(top))
    tl.store(ids + at, first_best(top, top_id))


@triton.jit
def first_best(scores, ids):
    """The id with the highest score, the lowest of equals."""
    return tl.min(tl.where(scores == tl.max(scores), ids, 0x7FFFFFFF))


@triton.jit
def noise(token, first, second):
    """Exponential noise of ids, as `ops.noise.KeyedNoise` makes it."""
    h = (token + first).to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = h ^ second.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = (h ^ (h >> 16)) * 0x2C1B3C6D
    h = (h ^ (h >> 15)) & 0x7FFFFFFF
    # Times 1 - 2 ** -24 and 2 ** -31.
    unit: tl.constexpr = (1.0 - 5.9604644775390625e-08) * 4.656612873077393e-10
    u = (h.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * -unit
    # log(1 + u) near 0 too, where 1 + u is rounded: by how much, w - 1 says (Kahan).
    w = 1.0 + u
    exact = w == 1.0
    return -tl.where(exact, u, tl.log(w) * (u / tl.where(exact, 1.0, w - 1.0)))


@triton.jit
def pick(best, ids, names, tokens, tokens_stride, SPANS, BLOCK: tl.constexpr):
    """Program row: the best of its spans, the first of equals, as a token."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK)
    score = tl.load(best + row * SPANS + s, mask=s < SPANS, other=float("-inf"))
    found = tl.load(ids + row * SPANS + s, mask=s < SPANS, other=0x7FFFFFFF)
    token = first_best(score, found)
    if names is not None:
        token = tl.load(names + token)
    tl.store(tokens + row * tokens_stride, token)


@triton.jit(do_not_specialize=["logits_stride"])
def weigh(logits, best, mass, logits_stride, vocabulary, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Program (row, span): the highest logit, and the sum of e ** (logit - highest)."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(span * SPAN, tl.minimum(vocabulary, (span + 1) * SPAN), BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(logits + row * logits_stride + i, i < vocabulary, float("-inf"))
        higher = tl.maximum(top, x)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - finite) + tl.exp(x - finite)
        top = higher
    highest = tl.max(top)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    at = row * tl.num_programs(1) + span
    tl.store(best + at, highest)
    tl.store(mass + at, tl.sum(total * tl.exp(top - finite)))


@triton.jit
def chance(best, mass, chances, SPANS, BLOCK: tl.constexpr):
    """Program row: the probability of the best id, of what its spans weigh."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK)
    top = tl.load(best + row * SPANS + s, mask=s < SPANS, other=float("-inf"))
    total = tl.load(mass + row * SPANS + s, mask=s < SPANS, other=0.0)
    tl.store(chances + row, 1.0 / tl.sum(total * tl.exp(top - tl.max(top))))


@triton.jit
def cap(logits, softcap, count, BLOCK: tl.constexpr):
    """Program of some logits: softcap * tanh(logits / softcap), in place."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + i, mask=i < count, other=0.0)
    t = tl.exp(-2.0 * tl.abs(x / softcap))
    t = (1.0 - t) / (1.0 + t)
    tl.store(logits + i, softcap * tl.where(x < 0, -t, t), mask=i < count)


@triton.jit(do_not_specialize=["stride"])
def keep(
    logits, how, kept, room, stride, vocabulary, BLOCK: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Program row: its best logit, where filters cut, and what they leave weighs."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    room += row * vocabulary
    heat = tl.load(how + row * 4)
    top_p = tl.load(how + row * 4 + 2)
    top_k = tl.load(how + row * 4 + 3)
    filtered = heat > 0.0
    heat = tl.where(filtered, heat, 1.0)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for at in range(0, vocabulary, BLOCK):
        i = at + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(logits + i, i < vocabulary, float("-inf")))
    best = tl.div_rn(tl.max(top), heat)
    # Most cuts are among those near the best, which are looked at again and again.
    edge = best - 8.0
    near = 0
    for at in range(0, vocabulary, BLOCK):
        x = scaled(logits, at, vocabulary, heat, BLOCK)
        here = (x > edge).to(tl.int32)
        tl.store(room + near + tl.cumsum(here, 0) - 1, x, mask=here > 0)
        near += tl.sum(here, 0)
    tl.debug_barrier()
    least = tl.where(filtered, best + tl.load(how + row * 4 + 1), float("-inf"))
    if filtered & (top_k > 0.0) & (top_k < vocabulary):
        bar = top_k.to(tl.int64)
        if near >= bar:
            cut = _cut(room, near, 1.0, best, bar, False, BLOCK, BITS)
        else:
            cut = _cut(logits, vocabulary, heat, best, bar, False, BLOCK, BITS)
        least = tl.maximum(least, cut)
    if filtered & (top_p <= 1.0):
        whole = _mass(logits, vocabulary, heat, best, least, True, True, BLOCK, BITS)
        bar = (top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
        if _mass(room, near, 1.0, best, edge, False, True, BLOCK, BITS) >= bar:
            cut = _cut(room, near, 1.0, best, bar, True, BLOCK, BITS)
        else:
            cut = _cut(logits, vocabulary, heat, best, bar, True, BLOCK, BITS)
        least = tl.maximum(least, cut)
    mass = _mass(logits, vocabulary, heat, best, least, True, True, BLOCK, BITS)
    tl.store(kept + row * 3, best)
    tl.store(kept + row * 3 + 1, mass.to(tl.float32) * (0.5**BITS))
    tl.store(kept + row * 3 + 2, least)


@triton.jit
def scaled(logits, at, count, heat, BLOCK: tl.constexpr):
    """Logits from `at` on over the temperature; -inf behind the last."""
    i = at + tl.arange(0, BLOCK)
    x = tl.load(logits + i, i < count, float("-inf"))
    return tl.div_rn(x, tl.zeros_like(x) + heat)


@triton.jit
def _mass(
    logits, count, heat, best, edge, WITH: tl.constexpr, WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """What all above an edge weigh, WITH those at it; not WEIGHED: how many they are."""
    total = tl.zeros((BLOCK,), tl.int64)
    for at in range(0, count, BLOCK):
        x = scaled(logits, at, count, heat, BLOCK)
        weight = tl.full((BLOCK,), 1, tl.int64)
        if WEIGHED:
            finite = tl.where(best == float("-inf"), 0.0, best)
            weight = (tl.exp(x - finite) * (2.0**BITS)).to(tl.int64)
        counts = x > edge
        if WITH:
            counts = x >= edge
        total += tl.where(counts, weight, 0)
    return tl.sum(total, 0)


@triton.jit
def _cut(
    logits, count, heat, best, bar, WEIGHED: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """The least logit above which there is less than the bar, found bit by bit."""
    low = _ordered(tl.minimum(best, float("-inf"))).to(tl.int64) - 1
    high = _ordered(best).to(tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        edge = _number(middle)
        less = _mass(logits, count, heat, best, edge, False, WEIGHED, BLOCK, BITS) < bar
        high = tl.where(less, middle, high)
        low = tl.where(less, low, middle)
    return _number(high)


@triton.jit
def _ordered(x):
    """An integer that is greater where the number is."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(ordered):
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
