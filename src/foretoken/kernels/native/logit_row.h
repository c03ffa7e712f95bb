// What is done to one row of logits, written once over vec.h: its largest values, its mass, its filters.
#ifndef FORETOKEN_LOGIT_ROW_H
#define FORETOKEN_LOGIT_ROW_H

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "draw.h"
#include "vec.h"

typedef int32_t vs __attribute__((vector_size(4 * W)));

enum { BLOCK = 256 };  // ids that are summed, or whose largest value is looked at, together
#define LN_2 0.6931471805599453f
#define LOG2_E 1.4426950408889634f

// Natural logarithm of normal positive numbers, within 1e-6 of its value or of 1e-6: the exponent
// plus 2 atanh(t) with t = (m - 1) / (m + 1) for a mantissa m around 1.
static inline vf logarithm(vf x) {
    const vs bits = (vs)x;
    const vs power = (bits - 0x3F3504F3) >> 23;  // the bits of sqrt(1 / 2)
    const vf m = (vf)(bits - (power << 23));
    const vf t = vf_div(vf_sub(m, vf_set1(1.0f)), vf_add(m, vf_set1(1.0f)));
    const vf square = vf_mul(t, t);
    vf p = vf_set1(2.0f / 9.0f);
    p = vf_fma(p, square, vf_set1(2.0f / 7.0f));
    p = vf_fma(p, square, vf_set1(2.0f / 5.0f));
    p = vf_fma(p, square, vf_set1(2.0f / 3.0f));
    p = vf_fma(p, square, vf_set1(2.0f));
    const vf exponent = (vf)__builtin_convertvector(power, __typeof__(vf_set1(0.0f)));
    return vf_fma(exponent, vf_set1(LN_2), vf_mul(p, t));
}

static inline vf load_or(const float *p, int64_t count, float other) {
    if (count >= W) return vf_load(p);
    float lanes[W];
    vf_store(lanes, vf_set1(other));
    memcpy(lanes, p, (size_t)count * sizeof(float));
    return vf_load(lanes);
}

static inline float largest(const float *values, int64_t count) {
    vf most = load_or(values, count, -INFINITY);
    for (int64_t i = W; i < count; i += W)
        most = vf_max(most, load_or(values + i, count - i, -INFINITY));
    return vf_peak(most);
}

// The k-th largest value: a heap of the largest so far, the least of them on top.
static inline float kth_largest(const float *values, int64_t count, int k) {
    float heap[FT_DRAW_MOST_K];
    for (int i = 0; i < k; i++) heap[i] = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        const float value = values[i];
        if (!(value > heap[0])) continue;
        int at = 0;
        for (int child = 1; child < k; child = 2 * at + 1) {
            if (child + 1 < k && heap[child + 1] < heap[child]) child++;
            if (!(heap[child] < value)) break;
            heap[at] = heap[child];
            at = child;
        }
        heap[at] = value;
    }
    return heap[0];
}

// Sum of weights whose value is at least `low`.
static inline double mass(const float *weights, const float *values, int64_t count, float low) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i += BLOCK) {
        const int64_t end = i + BLOCK < count ? i + BLOCK : count;
        vf part = vf_set1(0.0f);
        for (int64_t at = i; at < end; at += W) {
            const vs in = (vs)(load_or(values + at, end - at, -INFINITY) >= vf_set1(low));
            part = vf_add(part, (vf)((vs)load_or(weights + at, end - at, 0.0f) & in));
        }
        sum += (double)vf_sum(part);
    }
    return sum;
}


#endif
