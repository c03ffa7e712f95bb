// y = act(norm(x) W^T * scale + bias) + residual for rows of activations and packed weights.
//
// Order of arithmetic, and with it a row's bits, depends on the row alone: not on how many rows there
// are, nor where it stands among them, nor on the threads.
//   Floating weights: one float32 accumulator per output, along K in order (pairs of bfloat16 as the
//   processor's instruction takes them).
//   Integer weights: activations become fixed point of 16 or 8 bits per row and block of 128 inputs;
//   sums within a group are exact integers; groups are then added in float32 in order (a product, then
//   a sum, never fused). These bits are the same on every instruction set.
//   Blocks (ggml.h): the same, but that the groups of 128 inputs are added first, each times its own
//   scale; what they share, of activations and of the block, is multiplied with their sum.
#ifndef FORETOKEN_LINEAR_H
#define FORETOKEN_LINEAR_H

#include "foretoken.h"

enum { FT_WEIGHT_FLOAT32, FT_WEIGHT_BFLOAT16, FT_WEIGHT_INT8, FT_WEIGHT_INT4, FT_WEIGHT_BLOCKS };
enum {
    FT_PANEL = 16,  // outputs that lie together
    FT_TILE = 4,    // panels that are computed together
    FT_BLOCK = 128  // inputs that share a fixed-point scale
};

// Weights are packed in panels of 16 outputs, each panel contiguous, outputs and inputs padded with
// zeros: outputs to whole panels, inputs to a multiple of 32 (float32: none; int4: to its groups).
//   float32   [panel][input][16]
//   bfloat16  [panel][input / 2][16][2]
//   int8      [panel][input / 4][16][4], each value + 128 as an unsigned byte
//   int4      [panel][input / 8][16][4]: byte j has inputs j (low half) and 4 + j (high half), 0..15
//   blocks    as ggml.h has them: weight, scale and zero are their values, numbers and upper numbers
// With `gated`, panels of gate and up outputs alternate, and `outputs` counts both.
typedef struct ft_linear {
    int32_t weight_type;
    int32_t x_type;      // also of what is rounded to after the norm
    int32_t y_type;      // of y and of the residual
    int32_t gated;       // y = silu(gate) * up: half as many columns as outputs
    int32_t group;       // int4: 32, 64 or 128 inputs; blocks: 32 or 16; else 0
    int32_t x_bits;      // integer weights: 8 for activations of 8 bits, else 16
    int32_t halves;      // scale and zero of groups are float16, else float32
    int32_t front, form, unit;  // of blocks (ggml.h); unit: inputs that share upper numbers
    float norm_eps;
    int64_t outputs;     // of the matrix, without padding
    int64_t inputs;
    const void *weight;
    const void *scale;   // of groups [panel][group][16]; else, for int8, float32 [panels * 16]
    const void *zero;    // int4, or null for 8: [panel][group][16], whole or not
    const float *bias;   // [panels * 16] in panel order, or null
    const float *norm;   // weights of an RMSNorm over x before, [inputs], or null
    const struct ft_linear *next;  // more outputs, beside these, of weights of another kind; or null
} ft_linear;

typedef struct {
    const void *x;         // [rows, inputs]
    void *y;               // [rows, outputs], gated: [rows, outputs / 2]
    const void *residual;  // like y, or null; may be y itself
    int64_t rows;
    int64_t x_stride, y_stride, residual_stride;  // between rows, in elements
} ft_linear_rows;

FT_EXPORT void ft_linear_run(const ft_linear *layer, const ft_linear_rows *rows);
// The same with rows that lie without gaps: a call that is cheap to make.
FT_EXPORT void ft_linear_dense(const ft_linear *layer, const void *x, void *y, const void *residual,
                               int64_t rows);

// Rows of x as a kernel wants them: floats, bfloat16 pairs, or fixed point. Few rows lie one after the
// other; of many the inputs of a chunk of weights lie together, so that what is used together is read
// in the order of memory and does not share sets of a cache.
typedef struct {
    const void *values;    // float, bf16; for integer weights int8, or 16 bits as fix_block() lays them
    int64_t stride;        // between rows, in bytes
    int64_t chunk_stride;  // between chunks of a row, in bytes
    int chunk_shift;       // a chunk of a row has 1 << chunk_shift bytes
    const float *scales;   // fixed point: [rows][blocks]
    const int32_t *sums;   // fixed point: [rows][padded inputs / part], sums of 32 values, or of 16
    int64_t blocks, parts;
    int64_t rows;  // how many together the layout was chosen for
} ft_prepared;

typedef struct {
    const ft_linear *layer;
    const ft_linear_rows *rows;
    ft_prepared x;
} ft_linear_job;

// An instruction set's kernels.
typedef struct {
    int ready;  // 0: this build has none
    // A row's inputs of a chunk of weights have 1 << chunk_shift bytes as prepared.
    int (*chunk_shift)(const ft_linear *layer);
    // Bytes of one prepared row of `values`.
    size_t (*row_bytes)(const ft_linear *layer);
    // Norm and convert one row of x.
    void (*prepare)(const ft_linear_job *job, int64_t row);
    // Compute `panels` panels from `panel` on, for all rows; the last of several tiles may be short.
    void (*tile)(const ft_linear_job *job, int64_t panel, int64_t panels);
    int bf16_inputs;  // bfloat16 rows of a multiple of so many inputs are used where they lie; or 0
} ft_linear_kernels;

extern const ft_linear_kernels ft_linear_portable, ft_linear_avx2, ft_linear_avxvnni,
    ft_linear_avx512, ft_linear_avx512bf16, ft_linear_amx, ft_linear_neon, ft_linear_neondot, ft_linear_neonbf16;

// Those of the level in use.
const ft_linear_kernels *ft_linear_kernels_in_use(void);

// Byte `byte` of a prepared row.
static inline char *ft_prepared_at(const ft_prepared *x, int64_t row, int64_t byte) {
    const int64_t chunk = byte >> x->chunk_shift, rest = byte - (chunk << x->chunk_shift);
    return (char *)x->values + chunk * x->chunk_stride + row * x->stride + rest;
}

static inline int64_t ft_round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Inputs as padded in the packed weights.
static inline int64_t ft_padded_inputs(const ft_linear *layer) {
    if (layer->weight_type == FT_WEIGHT_FLOAT32) return layer->inputs;
    return ft_round_up(layer->inputs, layer->group > 32 ? layer->group : 32);
}

// Inputs whose sum a row is prepared with: the smallest group.
static inline int ft_part(const ft_linear *layer) { return layer->group == 16 ? 16 : 32; }

static inline int64_t ft_panels(const ft_linear *layer) {
    if (!layer->gated) return ft_round_up(layer->outputs, FT_PANEL) / FT_PANEL;
    return 2 * (ft_round_up(layer->outputs / 2, FT_PANEL) / FT_PANEL);
}

#endif
