"""Triton kernels that weigh drafts; `GpuKernels.accept` says what they promise together.

Owns device code, no launch: `launches` has those. Importing it imports triton. Sums over a
row are of whole numbers, so they have one value however a row is spread over threads. Spans, S
chains, have four numbers each: first draft, drafts, first row of logits, first row of `probs`.
"""

import triton
import triton.language as tl

from foretoken.kernels.triton.draw import first_best, noise, scaled

_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _chance(logits, stride, how, kept, row, token):
    """float64 probability of a token after a row; NaN of a row without any."""
    x = tl.load(logits + row * stride + tl.maximum(token, 0))
    x = tl.div_rn(x, tl.load(how + row * 4))
    p = tl.exp(x - tl.load(kept + row * 3)) / tl.load(kept + row * 3 + 1)
    return tl.where(x < tl.load(kept + row * 3 + 2), 0.0, p).to(tl.float64)


@triton.jit
def _drafted(probs, probs_stride, row, token):
    """float64 probability with which a draft was drawn; 1 of one-hot drafts."""
    q = tl.full((), 1.0, tl.float64)
    if probs is not None:
        q = tl.load(probs + row * probs_stride + tl.maximum(token, 0)).to(tl.float64)
    return q


@triton.jit
def _next_weight(
    weight, logits, stride, how, kept, probs, probs_stride, row, drafted, token
):  # fmt: skip
    """What a block that goes on with this draft weighs: weight p / q, at most 1."""
    p = _chance(logits, stride, how, kept, row, token)
    q = _drafted(probs, probs_stride, drafted, token)
    ratio = tl.where(token < 0, 0.0, p / tl.maximum(q, _TINY))
    return tl.where(weight * ratio > 1.0, 1.0, weight * ratio)


@triton.jit(do_not_specialize=["stride", "probs_stride", "most"])
def remain(
    logits, how, kept, probs, spans, ids, left, stride, probs_stride, vocabulary, most,
    BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Program (span, draft): the sum of max(w p - q, 0) at the draft, w of the draft before it."""
    spans += tl.program_id(0) * 4
    at = tl.program_id(1)
    ids += tl.load(spans)
    if at < tl.load(spans + 1):
        row = tl.load(spans + 2).to(tl.int64)
        drafted = tl.load(spans + 3).to(tl.int64)
        weight = tl.full((), 1.0, tl.float64)
        for i in range(at):
            weight = _next_weight(
                weight, logits, stride, how, kept, probs, probs_stride, row + i, drafted + i,
                tl.load(ids + i),
            )  # fmt: skip
        token = tl.load(ids + at)
        row += at
        total = weight
        if probs is None:
            own = _chance(logits, stride, how, kept, row, token)
            total = tl.where(token < 0, weight, weight * (1.0 - own))
        elif token >= 0:
            q = probs + (drafted + at) * probs_stride
            sums = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, vocabulary, BLOCK):
                rest = _rest(
                    logits, stride, how, kept, q, row, weight, start, vocabulary, BLOCK
                )  # fmt: skip
                sums += (tl.maximum(rest, 0.0) * (2.0**BITS)).to(tl.int64)
            total = tl.sum(sums, 0).to(tl.float64) * (0.5**BITS)
        tl.store(left + tl.program_id(0) * most + at, total)


@triton.jit
def _rest(
    logits, stride, how, kept, q, row, weight, start, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """w p - q of ids from `start` on; 0 behind the last."""
    x = scaled(logits + row * stride, start, vocabulary, tl.load(how + row * 4), BLOCK)
    p = tl.exp(x - tl.load(kept + row * 3)) / tl.load(kept + row * 3 + 1)
    p = tl.where(x < tl.load(kept + row * 3 + 2), 0.0, p)
    i = start + tl.arange(0, BLOCK)
    return weight.to(tl.float32) * p - tl.load(q + i, i < vocabulary, 0.0)


@triton.jit(do_not_specialize=["stride", "probs_stride", "most"])
def accept(
    logits, how, kept, probs, spans, ids, uniforms, left, stays_S, weights_S,
    stride, probs_stride, most, WHOLE: tl.constexpr, NEAR: tl.constexpr, CRUMB: tl.constexpr,
):  # fmt: skip
    """Program span: how many drafts stay, -1 - that where it is too close to call; and the weight
    of the last of them. WHOLE: tested as a block, with what `remain` found."""
    span = tl.program_id(0)
    spans += span * 4
    ids += tl.load(spans)
    uniforms += tl.load(spans)
    count = tl.load(spans + 1)
    row = tl.load(spans + 2).to(tl.int64)
    drafted = tl.load(spans + 3).to(tl.int64)
    weight = tl.full((), 1.0, tl.float64)
    last = weight
    stays = count * 0
    is_open = count < 0
    goes_on = count > 0
    for i in range(count):
        token = tl.load(ids + i)
        u = tl.load(uniforms + i)
        if WHOLE:
            weight = _next_weight(
                weight, logits, stride, how, kept, probs, probs_stride, row + i, drafted + i, token
            )  # fmt: skip
            chance = weight
            slack = weight * 0.0
            if i + 1 < count:
                more = tl.load(left + span * most + i + 1)
                rest = more + 1.0 - weight
                chance = tl.where(rest > 0.0, more / rest, 1.0)
                slack = tl.where((more > 0.0) | (rest < CRUMB), CRUMB / (rest + CRUMB), 0.0)
            near = ~(tl.abs(u - chance) > NEAR * (u + chance) + slack)
            passed = (u <= chance) & ~near
            stays = tl.where(passed, i + 1, stays)
            last = tl.where(passed, weight, last)
            is_open = near | (is_open & ~passed)
        else:
            bar = u * _drafted(probs, probs_stride, drafted + i, token)
            p = _chance(logits, stride, how, kept, row + i, token)
            near = ~(tl.abs(bar - p) > NEAR * (bar + p)) & (token >= 0)
            is_open = is_open | (goes_on & near)
            goes_on = goes_on & (bar < p) & (token >= 0) & ~near
            stays += goes_on.to(tl.int32)
    tl.store(stays_S + span, tl.where(is_open, -1 - stays, stays))
    tl.store(weights_S + span, last)


@triton.jit(do_not_specialize=["stride", "probs_stride"])
def redraw(
    logits, how, kept, probs, spans, ids, keys, stays_S, weights_S, best, best_ids,
    stride, probs_stride, vocabulary, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Program (span, part of a row): the best id of what follows the drafts that stay."""
    span = tl.program_id(0)
    part = tl.program_id(1)
    stays = tl.load(stays_S + span)
    spans += span * 4
    if stays >= 0:
        row = tl.load(spans + 2).to(tl.int64) + stays
        token = -1
        if stays < tl.load(spans + 1):
            token = tl.load(ids + tl.load(spans) + stays)
        first = tl.load(keys + row * 2)
        second = tl.load(keys + row * 2 + 1)
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        top_id = tl.zeros((BLOCK,), tl.int32)
        for at in range(part * SPAN, tl.minimum(vocabulary, (part + 1) * SPAN), BLOCK):
            i = at + tl.arange(0, BLOCK)
            x = scaled(logits + row * stride, at, vocabulary, tl.load(how + row * 4), BLOCK)
            there = x >= tl.load(kept + row * 3 + 2)
            if probs is None:
                there = there & (i != token)
            elif token >= 0:
                q = probs + (tl.load(spans + 3).to(tl.int64) + stays) * probs_stride
                weight = tl.load(weights_S + span)
                rest = _rest(logits, stride, how, kept, q, row, weight, at, vocabulary, BLOCK)
                there = rest > 0.0
                x = tl.log(tl.where(there, rest, 1.0))
            score = tl.where(there, x - tl.log(noise(i, first, second)), float("-inf"))
            better = score > top
            top = tl.where(better, score, top)
            top_id = tl.where(better, i, top_id)
        at = span * tl.num_programs(1) + part
        tl.store(best + at, tl.max(top))
        tl.store(best_ids + at, first_best(top, top_id))


@triton.jit
def settle(
    stays_S, best, best_ids, found, PARTS, BLOCK: tl.constexpr
):  # fmt: skip
    """Program span: drafts that stay, and the token after them; -1 where that is left open."""
    span = tl.program_id(0)
    stays = tl.load(stays_S + span)
    token = -1
    if stays >= 0:
        s = tl.arange(0, BLOCK)
        score = tl.load(best + span * PARTS + s, mask=s < PARTS, other=float("-inf"))
        ids = tl.load(best_ids + span * PARTS + s, mask=s < PARTS, other=0x7FFFFFFF)
        token = first_best(score, ids)
        token = tl.where(tl.max(score) > float("-inf"), token, -1)
    tl.store(found + span * 2, tl.where(stays < 0, -1 - stays, stays))
    tl.store(found + span * 2 + 1, token)
