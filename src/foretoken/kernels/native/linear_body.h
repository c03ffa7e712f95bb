// The linear kernels, written once over vec.h; see linear.h for what they compute.
//
// A file that includes this has defined NAME (of the ft_linear_kernels it makes), MOST_ROWS (rows, at
// most 6, whose sums of floats fit in the registers, those of FLOAT_PANELS(rows) panels at once),
// MOST_FIXED_ROWS and FIXED_PANELS (rows and panels for which integer sums do; with PANELS_OF, not both
// at once), PAIRS if its processors multiply bfloat16 and have VNNI, and TILES if they have AMX's tiles.
// With NEON it may define DOTS, for dot products of bytes, and with them PAIRS, for products of small
// matrices of bfloat16 and of bytes.
//
// A tile goes along K in chunks. A chunk of weights is read from memory once, and stays in the L1
// cache while all rows pass over it in groups of at most MOST_ROWS; sums wait in memory meanwhile,
// which changes no bits. While a chunk is computed, the next is fetched.
#include <stdlib.h>

#include "linear.h"
#include "vec.h"

#if defined(__SANITIZE_ADDRESS__)
// What sanitizers look at is the same in a copy for any number of rows, and compiled in a thirtieth of the
// time that copies for each take.
#define ALWAYS static inline
#define UNROLL
#else
#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#endif
#define HALVES (FT_PANEL / W)  // vectors of a panel
#define SUM_STRIDE (FT_TILE * FT_PANEL)

enum {
    ROWS_AT_ONCE = 96,  // their sums, and their inputs of a chunk, stay in the nearest caches
    MANY_SUMS = 1920,   // rows x tiles, where several share the inputs: half of an L2 cache
    STEP_BYTES = 64,    // of a panel: 2 bfloat16, 1 float32, 4 int8 or 8 int4 inputs
    CHUNK_STEPS = 64,   // a multiple of the steps of a block of 128 integer inputs
    TILE_CHUNK = 256,   // of pairs in AMX's tiles, whose sums are loaded and stored in each chunk
    FETCH_STEPS = 32    // how far ahead weights are fetched, from the sizes tried
};

// What a group of rows needs for a chunk.
typedef struct {
    const ft_linear *layer;
    const char *weight;    // the chunk in the first panel
    int64_t panel_stride;  // bytes from panel to panel
    const char *x;         // the chunk in the group's first row
    int64_t x_stride;      // bytes from row to row
    float *sums;           // [row][SUM_STRIDE]
    int steps;
    const char *fetch[FT_TILE];  // what to bring nearer meanwhile
    int64_t fetch_step;          // bytes of it per step
    int fetch_near;              // into the L1 cache
    // Fixed point only.
    const float *x_scale;  // of the chunk's first block in the group's first row
    const int32_t *x_sum;  // of the chunk's parts in the group's first row
    int64_t blocks, parts;
    const char *scale, *zero;  // of the chunk's first group in the first panel, or null
    int64_t group_stride;      // numbers from panel to panel of these; of blocks bytes
    int64_t upper_stride;      // bytes from panel to panel of blocks' upper numbers
    int64_t scales_ahead;      // numbers from these to the ones that are brought nearer, or 0; of blocks bytes
    int64_t upper_ahead;       // the same of blocks' upper numbers
    int halves;                // whether the numbers are float16
} chunk;

// `near` is known where it can be: asked in every step, it costs six rows up to a sixth.
ALWAYS void fetch_ahead(const chunk *c, const int panel, const int panels, int step,
                        const int near) {
    UNROLL for (int p = panel; p < panel + panels; p++) {
        const char *const at = c->fetch[p] + step * c->fetch_step;
        if (near)
            __builtin_prefetch(at, 0, 3);
        else
            __builtin_prefetch(at, 0, 2);
    }
}

// Bytes of so many scales or zero points of groups.
ALWAYS int64_t number_bytes(const chunk *c, int64_t count) { return count << (c->halves ? 1 : 2); }

typedef vf group_sums[6][FT_TILE][HALVES];

ALWAYS void load_sums(const chunk *c, const int rows, const int panels, group_sums sum) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++)
                sum[r][p][h] = vf_load(c->sums + r * SUM_STRIDE + p * FT_PANEL + h * W);
}

ALWAYS void store_sums(const chunk *c, const int rows, const int panels, group_sums sum) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++)
                vf_store(c->sums + r * SUM_STRIDE + p * FT_PANEL + h * W, sum[r][p][h]);
}

#if defined(TILES)
#define BF16_INPUTS 32
#include "linear_tiles.h"

#elif defined(PAIRS) && defined(NEON)
#define BF16_INPUTS 4
#include "linear_neon_pairs.h"

#elif defined(PAIRS)
#define BF16_INPUTS 2

// A lane is an output, so sums never cross lanes and go along K in the order of memory, whatever the
// number of rows. Weights are loaded once per step for all rows of the group: few rows wait for memory,
// not for arithmetic.
ALWAYS void add_pairs(const chunk *c, const int rows, const int panels, const int near,
                      group_sums sum) {
    for (int i = 0; i < c->steps; i++) {
        __m512bh w[FT_TILE];
        fetch_ahead(c, 0, panels, i, near);
        UNROLL for (int p = 0; p < panels; p++)
            w[p] = (__m512bh)_mm512_loadu_si512(c->weight + p * c->panel_stride + i * STEP_BYTES);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t pair;  // two inputs of the row, given to all lanes
            memcpy(&pair, c->x + r * c->x_stride + i * 4, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int p = 0; p < panels; p++)
                sum[r][p][0] = _mm512_dpbf16_ps(sum[r][p][0], w[p], x);
        }
    }
}

#else
#define BF16_INPUTS 0

// The first or the second of the pairs of W outputs, as floats. A bfloat16 is the upper half of a
// float: a shift brings the first ones there, a mask leaves the second ones where they are.
ALWAYS vf half_of_pairs(const char *at, const int part) {
#if W == 16
    const __m512i pairs = _mm512_loadu_si512(at);
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_castsi512_ps(part ? _mm512_and_si512(pairs, upper) : _mm512_slli_epi32(pairs, 16));
#elif W == 8
    const __m256i pairs = _mm256_loadu_si256((const __m256i *)at);
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_castsi256_ps(part ? _mm256_and_si256(pairs, upper) : _mm256_slli_epi32(pairs, 16));
#elif defined(NEON)
    const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)at));
    const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
    return vreinterpretq_f32_u32(part ? vandq_u32(pairs, upper) : vshlq_n_u32(pairs, 16));
#else
    float values[W];
    bf16 pairs[2 * W];
    memcpy(pairs, at, sizeof pairs);
    for (int i = 0; i < W; i++) values[i] = bf16_to_float(pairs[2 * i + part]);
    return vf_load(values);
#endif
}

// Input number `part` of each pair of a step, of all rows.
ALWAYS void add_inputs(const chunk *c, const int rows, const int panels, const int part, int step,
                       group_sums sum) {
    UNROLL for (int p = 0; p < panels; p++) {
        vf w[HALVES];
        // Loaded again for the other part: registers are for sums.
        UNROLL for (int h = 0; h < HALVES; h++)
            w[h] = half_of_pairs(c->weight + p * c->panel_stride + step * STEP_BYTES + h * W * 4, part);
        UNROLL for (int r = 0; r < rows; r++) {
            const vf x = vf_set1(((const float *)(c->x + r * c->x_stride))[2 * step + part]);
            UNROLL for (int h = 0; h < HALVES; h++) vf_add_product(&sum[r][p][h], w[h], x);
        }
    }
}

ALWAYS void add_pairs(const chunk *c, const int rows, const int panels, const int near,
                      group_sums sum) {
    for (int i = 0; i < c->steps; i++) {
        fetch_ahead(c, 0, panels, i, near);
        add_inputs(c, rows, panels, 0, i, sum);
        add_inputs(c, rows, panels, 1, i, sum);
    }
}

#endif

// A kernel of a chunk's floating sums out of what adds its steps to them.
#define FLOATING(kernel, add_steps)                                       \
    ALWAYS void kernel(const chunk *c, const int rows, const int panels) { \
        group_sums sum;                                                   \
        load_sums(c, rows, panels, sum);                                  \
        if (c->fetch_near)                                                \
            add_steps(c, rows, panels, 1, sum);                           \
        else                                                              \
            add_steps(c, rows, panels, 0, sum);                           \
        store_sums(c, rows, panels, sum);                                 \
    }

#if !defined(TILES) && !(defined(PAIRS) && defined(NEON))
FLOATING(pair_steps, add_pairs)
#endif

ALWAYS void add_floats(const chunk *c, const int rows, const int panels, const int near,
                       group_sums sum) {
    for (int i = 0; i < c->steps; i++) {
        fetch_ahead(c, 0, panels, i, near);
        UNROLL for (int p = 0; p < panels; p++) {
            vf w[HALVES];
            UNROLL for (int h = 0; h < HALVES; h++)
                w[h] = vf_load((const float *)(c->weight + p * c->panel_stride + i * STEP_BYTES) + h * W);
            UNROLL for (int r = 0; r < rows; r++) {
                const vf x = vf_set1(((const float *)(c->x + r * c->x_stride))[i]);
                UNROLL for (int h = 0; h < HALVES; h++) vf_add_product(&sum[r][p][h], w[h], x);
            }
        }
    }
}

FLOATING(float_steps, add_floats)

// Panels whose integer sums are kept at once.
#if !defined(PANELS_OF)
#define PANELS_OF(rows, bits) FIXED_PANELS
#endif
#include "linear_fixed.h"
#if defined(TILES)
#include "linear_tiles_fixed.h"
#endif

// From panel `panel` of the tile on.
static inline chunk part_of(const chunk *c, int panel) {
    chunk part = *c;
    part.weight += panel * c->panel_stride;
    part.sums += panel * FT_PANEL;
    if (c->layer->weight_type == FT_WEIGHT_BLOCKS) {
        part.scale += panel * c->group_stride;
        part.zero += panel * c->upper_stride;
    } else {
        if (part.scale) part.scale += number_bytes(c, panel * c->group_stride);
        if (part.zero) part.zero += number_bytes(c, panel * c->group_stride);
    }
    for (int p = 0; p + panel < FT_TILE; p++) part.fetch[p] = c->fetch[p + panel];
    return part;
}

// Panels that a kernel of floats, or of whole numbers, takes at once; those of a tile take turns.
#if defined(NEON)
// Registers of four sums: a panel's take four for each row.
#define FLOAT_PANELS(rows) ((rows) > 2 ? 1 : (rows) == 2 ? 2 : FT_TILE)
#define WHOLE_PANELS FLOAT_PANELS
#elif W == 8
// Sixteen registers: sums of at most twelve vectors.
#define FLOAT_PANELS(rows) ((rows) == 1 ? FT_TILE : (rows) <= 3 ? 2 : 1)
#define WHOLE_PANELS(rows) FT_TILE
#else
#define FLOAT_PANELS(rows) FT_TILE
#define WHOLE_PANELS(rows) FT_TILE
#endif
#define RUN(kernel, rows, panels, at_once)                                 \
    if (panels <= at_once(rows)) {                                         \
        kernel(c, rows, panels);                                           \
    } else {                                                               \
        for (int panel = 0; panel < panels; panel += at_once(rows)) {      \
            const chunk part = part_of(c, panel);                          \
            kernel(&part, rows, at_once(rows));                            \
        }                                                                  \
    }

// Copies of a kernel with the numbers of rows and panels known to the compiler: only then do all sums
// stay in registers. A number of rows beyond `most` never comes; its copy is compiled for one row.
#define CAP(rows, most) ((rows) <= (most) ? (rows) : 1)
#define COPY(kernel, rows, most, panels, at_once)     \
    case rows:                                        \
        RUN(kernel, CAP(rows, most), panels, at_once) \
        break;
#define ALL_COPIES(kernel, most, panels, at_once)                                                 \
    switch (rows) {                                                                               \
        COPY(kernel, 1, most, panels, at_once) COPY(kernel, 2, most, panels, at_once)             \
        COPY(kernel, 3, most, panels, at_once) COPY(kernel, 4, most, panels, at_once)             \
        COPY(kernel, 5, most, panels, at_once) COPY(kernel, 6, most, panels, at_once)             \
        default: abort();                                                                         \
    }
#define TILE_COPIES(kernel, most, at_once)                  \
    static void kernel##_tile(const chunk *c, int rows) {   \
        ALL_COPIES(kernel, most, FT_TILE, at_once)          \
    }
#define COPIES(kernel, most, at_once)                       \
    TILE_COPIES(kernel, most, at_once)                      \
    static void kernel##_panel(const chunk *c, int rows) {  \
        ALL_COPIES(kernel, most, 1, at_once)                \
    }

#if !defined(TILES)
COPIES(pair_steps, MOST_ROWS, FLOAT_PANELS)
#endif
COPIES(float_steps, MOST_ROWS, FLOAT_PANELS)
COPIES(int8_steps, MOST_FIXED_ROWS, WHOLE_PANELS)
COPIES(int4_steps, MOST_FIXED_ROWS, WHOLE_PANELS)
#if QUAD_BITS >= 8
COPIES(int8_quads, MOST_FIXED_ROWS, WHOLE_PANELS)
#endif
#if QUAD_BITS >= 4
COPIES(int4_quads, MOST_FIXED_ROWS, WHOLE_PANELS)
#endif
#if FEW_ROWS
TILE_COPIES(int8_split, FEW_ROWS, WHOLE_PANELS)
TILE_COPIES(int4_split, FEW_ROWS / 2, WHOLE_PANELS)
#endif

#include "linear_ggml.h"

// How a layer's weights are walked through.
typedef struct {
    int chunk_steps;
    void (*tile)(const chunk *, int rows);
    void (*panel)(const chunk *, int rows);
    int most_rows;
    int inputs_per_step;
    int x_bytes;  // of a prepared input
    // So many rows, alone with a chunk, go another way through a tile.
    int few_rows;
    void (*few)(const chunk *, int rows);
    int cost_of;  // rows that cost as much as one, if not 0
} walk;

#if FEW_ROWS
// From a cache, quads are the faster ones. From memory few rows wait for their weights in any case, and
// on a Zen 5 a pass of quads took a tenth longer than one of pairs: 8 bits would be slower than 16.
// Zen 4, which fetches far, was slower with one row of int4 only.
static int few_rows_of(int bits) {
    if (!ft_fetches_near()) return bits == 4;
    return bits == 4 ? FEW_ROWS / 2 : FEW_ROWS;
}
#define FEW(bits) few_rows_of(bits), int##bits##_split_tile
#else
#define FEW(bits) 0, 0
#endif

// Blocks: by their front, and whether rows of 8 bits are multiplied as quads.
static walk walk_of_blocks(const ft_linear *layer, int64_t rows) {
#define OF_BLOCKS(name, bytes) \
    {BLOCK_CHUNK, name##_tile, name##_panel, MOST_FIXED_ROWS, FT_STEP, bytes, 0, 0, 0}
#define PAIRS_OF_BLOCKS(name) OF_BLOCKS(name##_pairs, 2),
    static const walk pairs[FT_FRONTS] = {EVERY_FRONT(PAIRS_OF_BLOCKS)};
    walk found = pairs[layer->front];
#if BLOCK_QUADS
#define QUADS_OF_BLOCKS(name) OF_BLOCKS(name##_quads, 1),
    static const walk quads[FT_FRONTS] = {EVERY_FRONT(QUADS_OF_BLOCKS)};
#define SPLITS_OF_BLOCKS(name) [name] = OF_BLOCKS(name##_split, 2),
    static const walk splits[FT_FRONTS] = {SPLIT_FRONTS(SPLITS_OF_BLOCKS)};
    const int x_kind = x_kind_of(layer, rows);
    if (x_kind == X_BYTES) found = quads[layer->front];
    if (x_kind == X_SPLIT) found = splits[layer->front];
#endif
    (void)rows;
    return found;
}

static walk walk_of(const ft_linear *layer, int64_t rows) {
    if (layer->weight_type == FT_WEIGHT_BLOCKS) return walk_of_blocks(layer, rows);
#if defined(TILES)
    const walk
        pairs = {TILE_CHUNK, pair_steps_tile, pair_steps_panel, 2 * TILE_ROWS, 2, 2, 0, 0, TILE_ROWS},
        bytes = {CHUNK_STEPS, tiled_8_tile, tiled_8_panel, TILE_ROWS, 4, 1, 0, 0, TILE_ROWS},
        split = {CHUNK_STEPS, tiled_16_tile, tiled_16_panel, TILE_ROWS, 4, 2, 0, 0, TILE_ROWS};
    if (layer->weight_type == FT_WEIGHT_BFLOAT16) return pairs;
    if (goes_through_tiles(layer, rows)) return layer->x_bits == 8 ? bytes : split;
#endif
    (void)rows;
#if QUAD_BITS >= 8
    if (layer->weight_type == FT_WEIGHT_INT8 && layer->x_bits == 8)
        return (walk){CHUNK_STEPS, int8_quads_tile, int8_quads_panel, MOST_FIXED_ROWS, 4, 1, FEW(8), 0};
#endif
#if QUAD_BITS >= 4
    if (layer->weight_type == FT_WEIGHT_INT4 && layer->x_bits == 8)
        return (walk){CHUNK_STEPS, int4_quads_tile, int4_quads_panel, MOST_FIXED_ROWS, 8, 1, FEW(4), 0};
#endif
    switch (layer->weight_type) {
        case FT_WEIGHT_FLOAT32:
            return (walk){CHUNK_STEPS, float_steps_tile, float_steps_panel, MOST_ROWS, 1, 4, 0, 0, 0};
        case FT_WEIGHT_INT8:
            return (walk){CHUNK_STEPS, int8_steps_tile, int8_steps_panel, MOST_FIXED_ROWS, 4, 2, 0, 0, 0};
        case FT_WEIGHT_INT4:
            return (walk){CHUNK_STEPS, int4_steps_tile, int4_steps_panel, MOST_FIXED_ROWS, 8, 2, 0, 0, 0};
        default:
            return (walk){CHUNK_STEPS, pair_steps_tile, pair_steps_panel, MOST_ROWS, 2, PAIR_INPUT_BYTES, 0, 0, 0};
    }
}

static vf silu(vf x) {
    const vf power = vf_min(vf_mul(x, vf_set1(-1.44269504f)), vf_set1(126.0f));
    return vf_div(x, vf_add(vf_set1(1.0f), vf_exp2(power)));
}

static inline vf load_row(const void *at, int type, int64_t index, int count) {
    if (type == FT_BFLOAT16) return vf_load_bf16_n((const bf16 *)at + index, count);
    return vf_load_n((const float *)at + index, count);
}

static inline void store_row(void *at, int type, int64_t index, vf value, int count) {
    if (type == FT_BFLOAT16)
        vf_store_bf16_n((bf16 *)at + index, value, count);
    else
        vf_store_n((float *)at + index, value, count);
}

// Sums of a panel's outputs, scaled and with their bias.
static inline vf scaled(const ft_linear *layer, const float *sums, int64_t output) {
    vf value = vf_load(sums);
    if (layer->weight_type == FT_WEIGHT_INT8 && !layer->group)
        value = vf_mul(value, vf_load((const float *)layer->scale + output));
    if (layer->bias) value = vf_add(value, vf_load(layer->bias + output));
    return value;
}

static void finish(const ft_linear_job *job, int64_t panel, int64_t panels, int64_t row,
                   const float *sums) {
    const ft_linear *layer = job->layer;
    const ft_linear_rows *rows = job->rows;
    const int64_t columns = layer->gated ? layer->outputs / 2 : layer->outputs;
    const int each = layer->gated ? 2 : 1;
    // Of a gated matrix the panels alternate, so a gate and its up are in the same sums.
    for (int p = 0; p < panels; p += each)
        for (int h = 0; h < HALVES; h++) {
            const int64_t column = (panel + p) / each * FT_PANEL + h * W;
            const int64_t output = (panel + p) * FT_PANEL + h * W;
            const float *at = sums + p * FT_PANEL + h * W;
            const int64_t left = columns - column;
            if (left <= 0) continue;
            const int count = left < W ? (int)left : W;
            vf value = scaled(layer, at, output);
            if (layer->gated)
                value = vf_mul(silu(value), scaled(layer, at + FT_PANEL, output + FT_PANEL));
            // Added before the one rounding to y's type.
            if (rows->residual) {
                const int64_t index = row * rows->residual_stride + column;
                value = vf_add(value, load_row(rows->residual, layer->y_type, index, count));
            }
            store_row(rows->y, layer->y_type, row * rows->y_stride + column, value, count);
        }
}

// A share in which so many rows as cost no more are together, if so many are left.
static inline int whole_share(int rows, int cost_of, int64_t left) {
    const int64_t whole = ft_round_up(rows, cost_of);
    return (int)(whole < left ? whole : left);
}

// All rows [first, first + count) over one chunk.
static void run_chunk(const walk *how, chunk *c, int panels, int64_t count) {
    if (panels == FT_TILE && count <= how->most_rows) {
        (count <= how->few_rows ? how->few : how->tile)(c, (int)count);
        return;
    }
    const int64_t groups = (count + how->most_rows - 1) / how->most_rows;
    const chunk start = *c;
    int64_t row = 0;
    for (int64_t g = 0; g < groups; g++) {
        // Equal shares of what is left: a last group of one row would load the weights for itself.
        int rows = (int)((count - row) / (groups - g));
        if (how->cost_of) rows = whole_share(rows, how->cost_of, count - row);
        c->x = start.x + row * start.x_stride;
        c->sums = start.sums + row * SUM_STRIDE;
        c->x_scale = start.x_scale + row * start.blocks;
        c->x_sum = start.x_sum + row * start.parts;
        c->scales_ahead = g ? 0 : start.scales_ahead;
        if (panels == FT_TILE) {
            // The groups share the fetching of the next chunk.
            for (int p = 0; p < FT_TILE; p++) {
                const int64_t turn = groups < FT_TILE ? p * groups / FT_TILE : p;
                c->fetch[p] = turn == g ? start.fetch[p] : start.weight;
            }
            how->tile(c, rows);
        } else {
            // The end of a matrix. It is rare, so each panel goes alone instead of by copies for 2 and 3.
            for (int p = 0; p < panels; p++) {
                chunk one = part_of(c, p);
                one.fetch[0] = one.weight;
                how->panel(&one, rows);
            }
        }
        row += rows;
    }
    *c = start;
}

// Where a chunk's fetching begins, from where the chunk does: further along, or in the next tile.
typedef struct {
    int64_t panels, steps;
} distance;

static distance ahead(int64_t step, int64_t steps, int64_t next, int far) {
    if (step + far < steps) return (distance){0, far};
    return next ? (distance){next, far - steps} : (distance){0, 0};
}

// Steps of the chunk that begins at `step`: chunks end where fetching turns to the next tile, and
// where those do that rows are prepared in.
static int steps_of_chunk(int64_t step, int64_t last, int64_t steps, int most, int far) {
    const int64_t turn = (steps - far) / far * far;
    int64_t end = (step / most + 1) * most;
    if (step < turn && end > turn) end = turn;
    return (int)((end < last ? end : last) - step);
}

// What does not change within a call of `tile`.
typedef struct {
    const ft_linear_job *job;
    walk how;
    int step_bytes, fetch_steps;
    int64_t steps, last;  // of a panel, and of those where chunks end
    int64_t groups;       // of a panel's scales
    int64_t next;         // panels from a tile to the one that this thread will be given next; or 0
} plan;

static plan plan_of(const ft_linear_job *job, int64_t panel, int64_t panels) {
    const ft_linear *layer = job->layer;
    plan p = {.job = job, .how = walk_of(layer, job->x.rows)};
    const int blocks = layer->weight_type == FT_WEIGHT_BLOCKS;
    p.step_bytes = blocks ? ft_front_bytes(layer->front) : STEP_BYTES;
    p.fetch_steps = blocks ? BLOCK_FETCH : FETCH_STEPS;
    const int each = p.how.inputs_per_step;
    p.steps = ft_round_up(ft_padded_inputs(layer), each) / each;
    // Rows that lie where they were given have no padding to read.
    const int unpadded = layer->weight_type < FT_WEIGHT_INT8 && BF16_INPUTS < 32;
    const int taken = BF16_INPUTS > each && each == 2 ? BF16_INPUTS : each;
    p.last = unpadded ? ft_round_up(layer->inputs, taken) / each : p.steps;
    p.groups = layer->group ? ft_padded_inputs(layer) / layer->group : 0;
    const int64_t next = (int64_t)FT_TILE * ft_threads();
    if (panels <= FT_TILE && panel + next + FT_TILE <= ft_panels(layer)) p.next = next;
    return p;
}

// What is the same for all chunks.
static void start_chunks(const plan *p, chunk *c) {
    const ft_prepared *x = &p->job->x;
    *c = (chunk){.layer = p->job->layer,
                 .panel_stride = p->steps * p->step_bytes,
                 .x_stride = x->stride,
                 .blocks = x->blocks,
                 .parts = x->parts,
                 .group_stride = p->groups * FT_PANEL,
                 .halves = p->job->layer->halves,
                 .fetch_step = p->step_bytes,
                 .fetch_near = ft_fetches_near()};
    const ft_linear *layer = c->layer;
    if (layer->weight_type != FT_WEIGHT_BLOCKS) return;
    c->group_stride = p->steps * ft_number_bytes(layer->front, layer->form);
    c->upper_stride = layer->inputs / layer->unit * ft_upper_bytes(layer->form);
}

// The chunk of a tile that begins at `step`. One by one, because a chunk of one row is short.
ALWAYS void move_chunk(const plan *p, chunk *c, int64_t panel, int64_t row, int64_t step) {
    const ft_linear *layer = c->layer;
    const ft_prepared *x = &p->job->x;
    const int64_t input = step * p->how.inputs_per_step, block = input / FT_BLOCK;
    c->weight = (const char *)layer->weight + (panel * p->steps + step) * p->step_bytes;
    c->x = ft_prepared_at(x, row, input * p->how.x_bytes);
    c->x_scale = x->scales + row * x->blocks + block;
    c->x_sum = x->sums + row * x->parts + block * (FT_BLOCK / ft_part(layer));
    if (layer->weight_type == FT_WEIGHT_BLOCKS) {
        c->scale = (const char *)layer->scale + panel * c->group_stride;
        c->scale += step * ft_number_bytes(layer->front, layer->form);
        c->zero = (const char *)layer->zero + panel * c->upper_stride;
        c->zero += input / layer->unit * ft_upper_bytes(layer->form);
    } else if (layer->group) {
        const int64_t group = block * (FT_BLOCK / layer->group);
        const int64_t first = number_bytes(c, (panel * p->groups + group) * FT_PANEL);
        c->scale = (const char *)layer->scale + first;
        if (layer->zero) c->zero = (const char *)layer->zero + first;
    }
    const distance far = ahead(step, p->steps, p->next, p->fetch_steps);
    for (int i = 0; i < FT_TILE; i++)
        c->fetch[i] = c->weight + (i + far.panels) * c->panel_stride + far.steps * p->step_bytes;
    if (layer->weight_type == FT_WEIGHT_BLOCKS) {
        c->scales_ahead = far.panels * c->group_stride;
        c->scales_ahead += far.steps * ft_number_bytes(layer->front, layer->form);
        c->upper_ahead = far.panels * c->upper_stride;
        c->upper_ahead += far.steps * FT_STEP / layer->unit * ft_upper_bytes(layer->form);
        return;
    }
    if (!layer->group) return;
    const int64_t groups = far.steps * p->how.inputs_per_step / layer->group;
    c->scales_ahead = far.panels * c->group_stride + groups * FT_PANEL;
}

// Tiles of rows [row, row + count), chunk by chunk; `sums` holds those of the tiles one after another.
static void run_rows(const plan *p, int64_t panel, int64_t panels, int64_t row, int64_t count,
                     float *sums) {
    const int64_t tiles = ft_round_up(panels, FT_TILE) / FT_TILE, of_tile = SUM_STRIDE * count;
    memset(sums, 0, sizeof(float) * (size_t)(of_tile * tiles));
    chunk c;
    start_chunks(p, &c);
    // Chunks outside, tiles inside: the rows' inputs of a chunk stay in the cache for all tiles, and
    // every weight is still read once.
    for (int64_t step = 0; step < p->last; step += c.steps) {
        c.steps = steps_of_chunk(step, p->last, p->steps, p->how.chunk_steps, p->fetch_steps);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = t * FT_TILE, left = panels - first;
            move_chunk(p, &c, panel + first, row, step);
            c.sums = sums + t * of_tile;
            run_chunk(&p->how, &c, left < FT_TILE ? (int)left : FT_TILE, count);
        }
    }
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t r = 0; r < count; r++) {
            const int64_t first = t * FT_TILE, left = panels - first;
            finish(p->job, panel + first, left < FT_TILE ? left : FT_TILE, row + r,
                   sums + t * of_tile + r * SUM_STRIDE);
        }
}

static void tile(const ft_linear_job *job, int64_t panel, int64_t panels) {
    const plan p = plan_of(job, panel, panels);
    const int64_t tiles = ft_round_up(panels, FT_TILE) / FT_TILE, rows = job->rows->rows;
    const int64_t at_once = tiles > 1 ? MANY_SUMS / tiles : ROWS_AT_ONCE;
    float *sums = ft_scratch(1, sizeof(float) * (size_t)(SUM_STRIDE * at_once * tiles));
    if (!sums) abort();
    for (int64_t row = 0; row < rows; row += at_once)
        run_rows(&p, panel, panels, row, rows - row < at_once ? rows - row : at_once, sums);
#if defined(TILES)
    release_tiles();
#endif
}

static int chunk_shift(const ft_linear *layer) {
    const walk how = walk_of(layer, 1);
    return __builtin_ctz((unsigned)(how.chunk_steps * how.inputs_per_step * how.x_bytes));
}

static size_t row_bytes(const ft_linear *layer) {
    const int64_t padded = ft_padded_inputs(layer);
    if (layer->weight_type >= FT_WEIGHT_INT8)
        return (size_t)(walk_of(layer, 1).x_bytes * ft_round_up(padded, FT_BLOCK));
    return (size_t)padded * (layer->weight_type == FT_WEIGHT_FLOAT32 ? 4 : PAIR_INPUT_BYTES);
}

// 1 / sqrt(mean of squares + eps).
static float norm_factor(const ft_linear *layer, const void *x, int64_t start) {
    vf total = vf_set1(0);
    for (int64_t k = 0; k < layer->inputs; k += W) {
        const int64_t left = layer->inputs - k;
        const vf value = load_row(x, layer->x_type, start + k, left < W ? (int)left : W);
        total = vf_add(total, vf_mul(value, value));
    }
    return 1.0f / __builtin_sqrtf(vf_sum(total) / (float)layer->inputs + layer->norm_eps);
}

static void prepare(const ft_linear_job *job, int64_t row) {
    const ft_linear *layer = job->layer;
    const int64_t start = row * job->rows->x_stride;
    const void *x = job->rows->x;
    const int integer = layer->weight_type >= FT_WEIGHT_INT8;
    const int narrow = layer->weight_type == FT_WEIGHT_BFLOAT16 && PAIR_INPUT_BYTES == 2;
    const int x_bytes = walk_of(layer, 1).x_bytes;
    float block[FT_BLOCK];
    const vf factor = vf_set1(layer->norm ? norm_factor(layer, x, start) : 1.0f);
    const int64_t padded = integer ? job->x.blocks * FT_BLOCK : ft_padded_inputs(layer);
    for (int64_t k = 0; k < padded; k += W) {
        const int64_t left = layer->inputs - k;
        const int count = left < 0 ? 0 : left < W ? (int)left : W;
        vf value = count ? load_row(x, layer->x_type, start + k, count) : vf_set1(0);
        if (layer->norm) {
            const vf weight = count ? vf_load_n(layer->norm + k, count) : vf_set1(0);
            value = vf_mul(vf_mul(value, factor), weight);
            // Rounded as a norm of its own would leave it: the fused layer has the bits of both.
            if (layer->x_type == FT_BFLOAT16) {
                bf16 rounded[W];
                vf_store_bf16(rounded, value);
                value = vf_load_bf16(rounded);
            }
        }
        const int64_t room = padded - k;
        const int kept = room < W ? (int)room : W;
        if (integer) {
            // A block's fixed-point scale is known when its largest value is: when it is whole.
            vf_store(block + k % FT_BLOCK, value);
            if (k % FT_BLOCK + W == FT_BLOCK) fix_block(job, row, k / FT_BLOCK, block, x_bytes);
            continue;
        }
        char *target = ft_prepared_at(&job->x, row, k * x_bytes);
        if (narrow) {
            vf_store_bf16_n((bf16 *)target, value, kept);
        } else {
            vf_store_n((float *)target, value, kept);
        }
    }
}

const ft_linear_kernels NAME = {1, chunk_shift, row_bytes, prepare, tile, BF16_INPUTS};
