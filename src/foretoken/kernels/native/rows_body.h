// The kernels of rows.h, written once over vec.h. A file that includes this has defined NAME.
#include "rows.h"

#include <float.h>

#include "scalar.h"
#include "vec.h"

#define ALWAYS static inline __attribute__((always_inline))
#define LOG2_E 1.4426950408889634f

ALWAYS vf load_at(const void *row, int64_t at, int64_t count, const int type) {
    if (type == FT_BFLOAT16) {
        const bf16 *p = (const bf16 *)row + at;
        return count >= W ? vf_load_bf16(p) : vf_load_bf16_n(p, (int)count);
    }
    const float *p = (const float *)row + at;
    return count >= W ? vf_load(p) : vf_load_n(p, (int)count);
}

ALWAYS void store_at(void *row, int64_t at, int64_t count, vf x, const int type) {
    if (type == FT_BFLOAT16) {
        bf16 *p = (bf16 *)row + at;
        if (count >= W)
            vf_store_bf16(p, x);
        else
            vf_store_bf16_n(p, x, (int)count);
    } else {
        float *p = (float *)row + at;
        if (count >= W)
            vf_store(p, x);
        else
            vf_store_n(p, x, (int)count);
    }
}

ALWAYS void *row_at(const void *start, int64_t row, int64_t stride, const int type) {
    return (char *)start + row * stride * (type == FT_BFLOAT16 ? 2 : 4);
}

// 1 / rms of a row: squares are added in two vectors of lanes, alternately.
ALWAYS float inverse_rms(const void *row, int64_t width, float eps, const int type) {
    vf even = vf_set1(0.0f), odd = even;
    for (int64_t d = 0; d < width; d += 2 * W) {
        const vf a = load_at(row, d, width - d, type);
        even = vf_fma(a, a, even);
        if (d + W < width) {
            const vf b = load_at(row, d + W, width - d - W, type);
            odd = vf_fma(b, b, odd);
        }
    }
    const float mean = vf_sum(vf_add(even, odd)) / (float)width;
    return 1.0f / __builtin_sqrtf(mean + eps);
}

ALWAYS void norm_rows(const ft_norm_call *c, int64_t first, int64_t end, const int type) {
    for (int64_t i = first; i < end; i++) {
        const void *x = row_at(c->x, i, c->x_stride, type);
        void *y = row_at(c->y, i, c->y_stride, type);
        const vf factor = vf_set1(inverse_rms(x, c->width, c->eps, type));
        for (int64_t d = 0; d < c->width; d += W) {
            const int64_t count = c->width - d;
            const vf weight = load_at(c->weight, d, count, c->weight_type);
            const vf normed = vf_mul(vf_mul(load_at(x, d, count, type), factor), weight);
            store_at(y, d, count, normed, type);
        }
    }
}

// The same with a residual, which may be the result's own memory.
ALWAYS void norm_add_rows(const ft_norm_call *c, int64_t first, int64_t end, const int type) {
    for (int64_t i = first; i < end; i++) {
        const void *x = row_at(c->x, i, c->x_stride, type);
        const void *residual = row_at(c->residual, i, c->residual_stride, type);
        void *y = row_at(c->y, i, c->y_stride, type);
        const vf factor = vf_set1(inverse_rms(x, c->width, c->eps, type));
        for (int64_t d = 0; d < c->width; d += W) {
            const int64_t count = c->width - d;
            const vf weight = load_at(c->weight, d, count, c->weight_type);
            const vf normed = vf_mul(vf_mul(load_at(x, d, count, type), factor), weight);
            float lanes[W];
            store_at(lanes, 0, W, normed, type);
            const vf rounded = load_at(lanes, 0, W, type);
            store_at(y, d, count, vf_add(load_at(residual, d, count, type), rounded), type);
        }
    }
}

static void norm(const ft_norm_call *c, int64_t first, int64_t end) {
    if (c->type == FT_BFLOAT16 && !c->residual)
        norm_rows(c, first, end, FT_BFLOAT16);
    else if (c->type == FT_BFLOAT16)
        norm_add_rows(c, first, end, FT_BFLOAT16);
    else if (!c->residual)
        norm_rows(c, first, end, FT_FLOAT32);
    else
        norm_add_rows(c, first, end, FT_FLOAT32);
}

ALWAYS void norm_head(const ft_rotary_call *c, void *head, const void *weight, const int type) {
    const int size = c->head_dim;
    const vf factor = vf_set1(inverse_rms(head, size, c->eps, type));
    for (int d = 0; d < size; d += W) {
        const vf x = vf_mul(load_at(head, d, size - d, type), factor);
        const vf scale = load_at(weight, d, size - d, c->norm_type);
        store_at(head, d, size - d, vf_mul(x, scale), type);
    }
}

// Turn the first dimensions of a head where it lies; the rest stays.
ALWAYS void turn(void *head, const void *cos, const void *sin, int width, const int type) {
    const int half = width / 2;
    for (int d = 0; d < half; d += W) {
        const int count = half - d;
        const vf low = load_at(head, d, count, type), high = load_at(head, half + d, count, type);
        const vf first = vf_fma(high, load_at(sin, d, count, type),
                                vf_mul(low, load_at(cos, d, count, type)));
        const vf second = vf_fma(low, load_at(sin, half + d, count, type),
                                 vf_mul(high, load_at(cos, half + d, count, type)));
        store_at(head, d, count, first, type);
        store_at(head, half + d, count, second, type);
    }
}

// A head as FT_INT8 keeps it: numbers head / scale to the nearest, with scale = largest / 127. What is
// not finite makes the scale NaN, so that it shows.
ALWAYS void keep_rounded(const void *head, int size, char *to, const int type) {
    vf peak = vf_set1(0.0f), spoiled = peak;
    for (int d = 0; d < size; d += W) {
        const vf x = load_at(head, d, size - d, type);
        peak = vf_max(peak, vf_max(x, vf_sub(vf_set1(0.0f), x)));
        spoiled = vf_fma(x, vf_set1(0.0f), spoiled);
    }
    float scale = vf_peak(peak) / 127.0f;
    scale = (scale > FLT_MIN ? scale : FLT_MIN) + vf_sum(spoiled);
    for (int d = 0; d < size; d += W) {
        const vf x = vf_round(vf_div(load_at(head, d, size - d, type), vf_set1(scale)));
        // NaN becomes -127, which a whole number is.
        const vf number = vf_min(vf_max(x, vf_set1(-127.0f)), vf_set1(127.0f));
        vf_store_int8_n((int8_t *)to + d, number, size - d);
    }
    memcpy(to + size, &scale, FT_SCALE_BYTES);
}

// Keys and values of a row to their slot.
ALWAYS void keep(const ft_rotary_call *c, const void *heads, int64_t slot, const int type) {
    const int size = c->head_dim, count = 2 * c->num_kv_heads;
    if (c->kv_type != FT_INT8) {
        const size_t item = type == FT_BFLOAT16 ? 2 : 4;
        memcpy(row_at(c->kv, slot, c->kv_stride, type), heads, (size_t)count * (size_t)size * item);
        return;
    }
    char *to = (char *)c->kv + slot * c->kv_stride;
    for (int h = 0; h < count; h++, to += size + FT_SCALE_BYTES)
        keep_rounded(row_at(heads, h, size, type), size, to, type);
}

ALWAYS void rotary_rows(const ft_rotary_call *c, int64_t first, int64_t end, const int type) {
    const int size = c->head_dim, turned = c->num_heads + c->num_kv_heads;
    for (int64_t i = first; i < end; i++) {
        void *row = row_at(c->qkv, i, c->qkv_stride, type);
        const int64_t at = c->positions ? c->positions[i] : i;
        const int64_t slot = c->slots ? c->slots[i] : c->first_slot + i;
        const void *cos = row_at(c->cos, at, c->width, type);
        const void *sin = row_at(c->sin, at, c->width, type);
        for (int h = 0; h < turned; h++) {
            void *head = row_at(row, h, size, type);
            const void *weight = h < c->num_heads ? c->query_norm : c->key_norm;
            if (weight && !c->turns_first) norm_head(c, head, weight, type);
            turn(head, cos, sin, c->width, type);
            if (weight && c->turns_first) norm_head(c, head, weight, type);
        }
        for (int h = turned; c->value_norm && h < turned + c->num_kv_heads; h++)
            norm_head(c, row_at(row, h, size, type), c->value_norm, type);
        keep(c, row_at(row, c->num_heads, size, type), slot, type);
    }
}

static void rotary(const ft_rotary_call *c, int64_t first, int64_t end) {
    if (c->type == FT_BFLOAT16)
        rotary_rows(c, first, end, FT_BFLOAT16);
    else
        rotary_rows(c, first, end, FT_FLOAT32);
}

// x / (1 + 2^-rate): with rate = x log2(e) this is x sigmoid(x); or the sigmoid alone.
ALWAYS vf gated(vf x, const int activation) {
    vf rate = vf_mul(x, vf_set1(-LOG2_E));
    if (activation == FT_GELU_TANH) {
        const vf square = vf_fma(vf_mul(x, x), vf_set1(0.044715f), vf_set1(1.0f));
        rate = vf_mul(vf_mul(rate, square), vf_set1(1.5957691216057308f)); // 2 sqrt(2 / pi)
    }
    if (activation == FT_SIGMOID) x = vf_set1(1.0f);
    return vf_div(x, vf_add(vf_set1(1.0f), vf_exp2(vf_min(vf_set1(126.0f), rate))));
}

ALWAYS void gate_rows(const ft_gate_call *c, int64_t first, int64_t end, const int type,
                      const int activation) {
    for (int64_t i = first; i < end; i++) {
        const void *x = row_at(c->x, i, c->x_stride, type);
        void *y = row_at(c->y, i, c->y_stride, type);
        for (int64_t d = 0; d < c->width; d += W) {
            const int64_t count = c->width - d;
            const vf gate = gated(load_at(x, d, count, type), activation);
            const vf up = load_at(x, c->width + d, count, type);
            store_at(y, d, count, vf_mul(gate, up), type);
        }
    }
}

ALWAYS void gate_any(const ft_gate_call *c, int64_t first, int64_t end, const int type) {
    if (c->activation == FT_SILU)
        gate_rows(c, first, end, type, FT_SILU);
    else if (c->activation == FT_GELU_TANH)
        gate_rows(c, first, end, type, FT_GELU_TANH);
    else
        gate_rows(c, first, end, type, FT_SIGMOID);
}

static void gate(const ft_gate_call *c, int64_t first, int64_t end) {
    if (c->type == FT_BFLOAT16)
        gate_any(c, first, end, FT_BFLOAT16);
    else
        gate_any(c, first, end, FT_FLOAT32);
}

enum {
    SCORES = 16 / W,                             // vectors of a panel
    AT_ONCE = W == 16 ? 8 : W == 8 ? 4 : 2       // rows whose sums stay in registers
};

// Sums of several rows: those of one wait for each other.
ALWAYS void score_rows(const ft_scores_call *c, int64_t panel, int64_t first, const int rows, const int type) {
    const float *const weights = c->router + panel * c->hidden * 16;
    vf sum[AT_ONCE][SCORES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < SCORES; v++) sum[r][v] = vf_set1(0.0f);
    for (int64_t k = 0; k < c->hidden; k++) {
        vf weight[SCORES];
        for (int v = 0; v < SCORES; v++) weight[v] = vf_load(weights + k * 16 + v * W);
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
            const vf x = vf_set1(ft_value(row_at(c->x, first + r, c->hidden, type), k, type));
            for (int v = 0; v < SCORES; v++) sum[r][v] = vf_add(sum[r][v], vf_mul(x, weight[v]));
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < SCORES; v++)
            vf_store(c->scores + (first + r) * c->outputs + panel * 16 + v * W, sum[r][v]);
}

ALWAYS void score_all(const ft_scores_call *c, int64_t panel, int64_t first, int64_t end, const int type) {
    for (; first + AT_ONCE <= end; first += AT_ONCE) score_rows(c, panel, first, AT_ONCE, type);
    for (; first < end; first++) score_rows(c, panel, first, 1, type);
}

static void scores(const ft_scores_call *c, int64_t panel, int64_t first, int64_t end) {
    if (c->type == FT_BFLOAT16)
        score_all(c, panel, first, end, FT_BFLOAT16);
    else
        score_all(c, panel, first, end, FT_FLOAT32);
}

const ft_row_kernels NAME = {1, norm, rotary, gate, scores};
