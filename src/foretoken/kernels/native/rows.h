// What is done to each row of activations between the matrices: norms, rotary positions, gates, scores of
// routers.
//
// Everything is computed in float32 and rounded once to the type of the rows. A row's bits depend on
// the row alone.
#ifndef FORETOKEN_ROWS_H
#define FORETOKEN_ROWS_H

#include "foretoken.h"

enum { FT_SILU = 0, FT_GELU_TANH = 1, FT_SIGMOID = 2 };

// y = x / rms(x) * weight (+ residual, then: round(x / rms(x) * weight) + residual).
typedef struct {
    const void *x;
    void *y;
    const void *residual;  // or null; may be y itself
    const void *weight;    // [width]
    int64_t rows, width;
    int64_t x_stride, y_stride, residual_stride;
    int32_t type;  // of x, y and residual
    int32_t weight_type;
    float eps;
} ft_norm_call;

// Turns queries and keys of fused rows [H + 2 K heads] by their positions, after (or before) a norm over
// each head if there are weights. Queries change in place; keys and values go to their slots.
typedef struct {
    void *qkv;                 // [rows, (H + 2 K) * h]
    void *kv;                  // [slots, 2 * K heads]: keys, then values
    const void *cos, *sin;     // tables [positions, width]; the first half of sin has the minus sign
    const int64_t *positions;  // rows of the tables, or null: row i has row i
    const int64_t *slots;      // or null: row i has first_slot + i
    const void *query_norm, *key_norm, *value_norm;  // [h], or null
    int64_t first_slot;
    int64_t rows, qkv_stride, kv_stride;  // in numbers of their types
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t width;  // dimensions of a head that are turned, even
    int32_t type;
    int32_t kv_type;  // `type`, or FT_INT8: the largest of a head becomes 127 or -127
    int32_t norm_type;
    int32_t turns_first;  // whether queries and keys are turned before they are normed
    float eps;
} ft_rotary_call;

// y = act(x[:, :width]) * x[:, width:].
typedef struct {
    const void *x;
    void *y;
    int64_t rows, width;
    int64_t x_stride, y_stride;
    int32_t type, activation;
} ft_gate_call;

// scores = x router: products of float32, added along the inputs in order.
typedef struct {
    const float *router;  // [panel][hidden][16]
    const void *x;        // [rows, hidden]
    float *scores;        // [rows, outputs]
    int64_t rows, hidden;
    int64_t outputs;  // a multiple of 16
    int32_t type;
} ft_scores_call;

FT_EXPORT void ft_norm(const ft_norm_call *call);
FT_EXPORT void ft_rotary(const ft_rotary_call *call);
FT_EXPORT void ft_gate(const ft_gate_call *call);
void ft_scores(const ft_scores_call *call);

// An instruction set's kernels: each for rows [first, end).
typedef struct {
    int ready;  // 0: this build has none
    void (*norm)(const ft_norm_call *call, int64_t first, int64_t end);
    void (*rotary)(const ft_rotary_call *call, int64_t first, int64_t end);
    void (*gate)(const ft_gate_call *call, int64_t first, int64_t end);
    // Those of one panel.
    void (*scores)(const ft_scores_call *call, int64_t panel, int64_t first, int64_t end);
} ft_row_kernels;

extern const ft_row_kernels ft_rows_portable, ft_rows_avx2, ft_rows_avx512, ft_rows_avx512bf16,
    ft_rows_neon, ft_rows_neonbf16;

#endif
