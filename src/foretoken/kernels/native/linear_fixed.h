// The integer part of linear_body.h: activations in fixed point, exact sums within a group.
//
// A block of 128 activations is scale * q with whole q in [-32639, 32639], or with 8 bits in
// [-127, 127]. Weights are unsigned (value + 128, or 0..15), and the excess, times the sum of q, is
// where a group's sums start from. Both are multiplied as pairs of 16 bits: packed weights are widened
// in registers, once for all rows of a group. With activations of 8 bits they are multiplied as quads
// of 8 where the instruction set does that exactly (QUAD_BITS), else as pairs: the sums are the same.
// So are those of quads that are split into pairs, which few rows alone with their weights do (FEW_ROWS).
#include "ggml.h"
#include "vec_whole.h"

enum { MOST_FIXED = 32639, MOST_OF_8 = 127 };

#if defined(PAIRS)
enum { PAIR_INPUT_BYTES = 2 };
#else
enum { PAIR_INPUT_BYTES = 4 };
#endif

#if defined(TILES)
// Whether tiles multiply so many rows: whole blocks of 8 bits, each with one scale.
static int goes_through_tiles(const ft_linear *layer, int64_t rows) {
    const int whole = !layer->group || layer->group == FT_BLOCK;
    return layer->weight_type == FT_WEIGHT_INT8 && whole && rows > MOST_FIXED_ROWS &&
           ft_padded_inputs(layer) % FT_BLOCK == 0;
}
#endif

// How the activations of blocks lie: a row's four as two pairs, as four upper and four lower bytes, or as
// four bytes. BLOCK_QUADS: bits of values whose products as quads are exact.
enum { X_PAIRS, X_SPLIT, X_BYTES };
#if defined(NEON) || !QUAD_BITS
#define BLOCK_QUADS 0
#elif defined(HALF_STEPS)
#define BLOCK_QUADS 6
enum { MOST_SPLIT_BITS = 4, MOST_SPLIT = 1 };
#else
#define BLOCK_QUADS 8
enum { MOST_SPLIT_BITS = 8, MOST_SPLIT = 2 };
#endif

// Bits of a front's values.
ALWAYS int bits_of_front(const int front) {
    return front == FT_BITS5 || front == FT_FP4 ? 5 : front == FT_BITS6 ? 6 : front == FT_IQ4 ? 8 : 4;
}

#if BLOCK_QUADS
static int x_kind_of(const ft_linear *layer, int64_t rows) {
    if (bits_of_front(layer->front) > BLOCK_QUADS) return X_PAIRS;
    if (layer->x_bits == 8) return X_BYTES;
    // More rows, or values whose products have to be widened often, are faster as pairs.
    return rows <= MOST_SPLIT && bits_of_front(layer->front) <= MOST_SPLIT_BITS ? X_SPLIT : X_PAIRS;
}
#endif

#if defined(TILES) || defined(DOTS) || BLOCK_QUADS
// Of each `together` numbers of a block first the upper bytes, then the lower ones, both with a sign:
// 256 upper + lower.
ALWAYS void split_bytes(const int32_t *fixed, const int together, char *at) {
    for (int k = 0; k < FT_BLOCK; k++) {
        const int8_t lower = (int8_t)(uint8_t)fixed[k];
        char *const to = at + k / together * 2 * together + k % together;
        to[0] = (char)((fixed[k] - lower) / 256);
        to[together] = (char)lower;
    }
}
#endif

static void fix_block(const ft_linear_job *job, int64_t row, int64_t block, const float *values,
                      int x_bytes) {
    const float limit = job->layer->x_bits == 8 ? MOST_OF_8 : MOST_FIXED;
    vf peak = vf_set1(0), odd = vf_set1(0);
    for (int k = 0; k < FT_BLOCK; k += W) {
        const vf value = vf_load(values + k);
        peak = vf_max(vf_max(value, vf_sub(vf_set1(0), value)), peak);
        odd = vf_add(odd, vf_mul(value, vf_set1(0)));  // NaN if any value is NaN or infinite
    }
    const float most = vf_peak(peak), strange = vf_sum(odd);
    const int usable = strange == 0 && most > 0;
    const vf inverse = vf_set1(usable ? limit / most : 0.0f);
    ((float *)job->x.scales)[row * job->x.blocks + block] = most / limit + strange;
    float scaled_values[FT_BLOCK];
    int32_t fixed[FT_BLOCK];
    for (int k = 0; k < FT_BLOCK; k += W) {
        const vf value = vf_round(vf_mul(vf_load(values + k), inverse));
        vf_store(scaled_values + k, value);
    }
    for (int k = 0; k < FT_BLOCK; k++) fixed[k] = usable ? (int32_t)scaled_values[k] : 0;
    const int each = ft_part(job->layer);
    int32_t *sums = (int32_t *)job->x.sums + row * job->x.parts + block * (FT_BLOCK / each);
    for (int k = 0; k < FT_BLOCK; k += each) {
        int32_t sum = 0;
        for (int i = 0; i < each; i++) sum += fixed[k + i];
        sums[k / each] = sum;
    }
    char *const at = ft_prepared_at(&job->x, row, x_bytes * block * FT_BLOCK);
    if (x_bytes == 1) {
        for (int k = 0; k < FT_BLOCK; k++) ((int8_t *)at)[k] = (int8_t)fixed[k];
        return;
    }
#if defined(TILES)
    if (goes_through_tiles(job->layer, job->x.rows)) {
        split_bytes(fixed, FT_BLOCK, at);
        return;
    }
#endif
#if BLOCK_QUADS
    if (job->layer->weight_type == FT_WEIGHT_BLOCKS && x_kind_of(job->layer, job->x.rows) == X_SPLIT) {
        split_bytes(fixed, 4, at);
        return;
    }
#endif
#ifdef DOTS
    if (job->layer->weight_type != FT_WEIGHT_BLOCKS) {
        split_bytes(fixed, 8, at);
        return;
    }
#endif
    // Each four in the order in which unpack() below finds their weights.
    int16_t *target = (int16_t *)at;
    for (int k = 0; k < FT_BLOCK; k += 4) {
        target[k] = (int16_t)fixed[k];
        target[k + 1] = (int16_t)fixed[k + 2];
        target[k + 2] = (int16_t)fixed[k + 1];
        target[k + 3] = (int16_t)fixed[k + 3];
    }
}

enum { MOST_GROUPS = CHUNK_STEPS / 4 };  // of a chunk: of 32 inputs of 4 bits

// Inputs that share a scale; a layer without groups has blocks.
ALWAYS int inputs_of_group(const chunk *c) { return c->layer->group ? c->layer->group : FT_BLOCK; }

// Of a chunk's groups, the same for all panels.
typedef struct {
    int32_t excess[MOST_FIXED_ROWS][MOST_GROUPS];  // the sum of q, which a zero point is times
    int32_t start[MOST_FIXED_ROWS][MOST_GROUPS];   // what whole sums start from
} group_inputs;

#ifdef HALF_STEPS
// Sums of 32 bits and the pairs of sums of 16 bits.
ALWAYS vi added_up(vi sum, vi narrow) {
    vi_add_products(&sum, narrow, vi_set1(0x00010001));
    return sum;
}
#else
#define added_up(sum, narrow) (narrow)  // never asked for
#endif

typedef vi whole_sums[MOST_FIXED_ROWS][FIXED_PANELS][HALVES];

#if !defined(NEON)
// Pair number `part` of each 32 bits: inputs 0 and 2, 1 and 3, 4 and 6, 5 and 7.
ALWAYS vi unpack(vi packed, const int bits, const int part) {
    const vi low = vi_set1(bits == 8 ? 0x00ff00ff : 0x000f000f);
    if (part == 0) return vi_and(packed, low);
    if (part == 1) return bits == 8 ? vi_shift(packed, 8) : vi_and(vi_shift(packed, 8), low);
    return part == 2 ? vi_and(vi_shift(packed, 4), low) : vi_shift(packed, 12);
}
#endif

// Where a group's sums are in the chunk.
typedef struct {
    int panel, number;  // first panel, number of the group
    int step, end;
} place;

ALWAYS void fetch_scales(const chunk *c, const int panels, const place *at) {
    const int64_t first = c->scales_ahead + at->panel * c->group_stride + at->number * FT_PANEL;
    const char *const scale = c->scale + number_bytes(c, first);
    const int64_t stride = number_bytes(c, c->group_stride);
    UNROLL for (int p = 0; p < panels; p++) __builtin_prefetch(scale + p * stride, 0, 2);
    if (!c->zero) return;
    const char *const zero = c->zero + number_bytes(c, first);
    UNROLL for (int p = 0; p < panels; p++) __builtin_prefetch(zero + p * stride, 0, 2);
}

typedef vf group_numbers[FIXED_PANELS][HALVES];

// Scales or zero points as floats, once for all rows.
ALWAYS void widen(const char *halves, int64_t first, int64_t stride, const int panels,
                  group_numbers wide) {
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int h = 0; h < HALVES; h++)
            wide[p][h] = vf_load_half((const uint16_t *)halves + first + p * stride + h * W);
}

ALWAYS void start_group(const group_inputs *in, const int rows, const int panels, int number,
                        whole_sums sum) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) sum[r][p][h] = vi_set1(in->start[r][number]);
}

// How a layer has the numbers of its groups.
enum { SCALES = 1, ZEROS = 2, HALVED = 4 };

// Add whole sums of a group, times the scales of activations and weights. `narrow`: they have 16 bits, and
// are first added up to what the group starts from. `numbers` is known where this is inlined.
ALWAYS void end_group(const chunk *c, const int rows, const int panels, const place *at,
                      const group_inputs *in, whole_sums sum, const int narrow, const int numbers) {
    // Else what all ways have in common is done before it is known which it is: sums have no registers then.
    __asm__ volatile("" ::: "memory");
    const int with_scale = numbers & SCALES, with_zero = numbers & ZEROS, halves = numbers & HALVED;
    const int64_t block = at->number * inputs_of_group(c) / FT_BLOCK;
    const int64_t stride = c->group_stride;
    const int64_t first = at->panel * stride + at->number * FT_PANEL;
    const float *const scales = with_scale ? (const float *)c->scale + first : 0;
    const float *const zeros = with_zero ? (const float *)c->zero + first : 0;
    group_numbers wide_scales, wide_zeros;
    if (halves) widen(c->scale, first, stride, panels, wide_scales);
    if (halves && with_zero) widen(c->zero, first, stride, panels, wide_zeros);
    float *const sums = c->sums + at->panel * FT_PANEL;
    UNROLL for (int r = 0; r < rows; r++) {
        const vf x_scale = vf_set1(c->x_scale[r * c->blocks + block]);
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                vi found = sum[r][p][h];
                if (narrow) found = added_up(vi_set1(in->start[r][at->number]), found);
                vf whole = vf_of_vi(found);
                if (with_zero) {
                    const vf zero = halves ? wide_zeros[p][h] : vf_load(zeros + p * stride + h * W);
                    const vf excess = vf_set1((float)in->excess[r][at->number]);
                    whole = vf_sub(whole, vf_mul(zero, excess));
                }
                vf term = vf_mul(whole, x_scale);
                if (halves)
                    term = vf_mul(term, wide_scales[p][h]);
                else if (with_scale)
                    term = vf_mul(term, vf_load(scales + p * stride + h * W));
                float *total = sums + r * SUM_STRIDE + p * FT_PANEL + h * W;
                vf_store(total, vf_add(vf_load(total), term));
            }
    }
}

// The same, by how the layer has its scales.
ALWAYS void end_any_group(const chunk *c, const int bits, const int rows, const int panels,
                          const place *at, const group_inputs *in, whole_sums sum,
                          const int narrow) {
    const int with_zero = bits == 4 && c->zero;
    if (with_zero && c->halves)
        end_group(c, rows, panels, at, in, sum, narrow, SCALES | ZEROS | HALVED);
    else if (with_zero)
        end_group(c, rows, panels, at, in, sum, narrow, SCALES | ZEROS);
    else if (c->halves)
        end_group(c, rows, panels, at, in, sum, narrow, SCALES | HALVED);
    else if (bits == 4 || c->scale)
        end_group(c, rows, panels, at, in, sum, narrow, SCALES);
    else
        end_group(c, rows, panels, at, in, sum, narrow, 0);
}

#if defined(NEON)
#include "linear_neon_fixed.h"
#else
// The inputs of one pair of every step; `weight` and `x` are where the step begins.
ALWAYS void add_part(const chunk *c, const int bits, const int rows, const int panels,
                     const char *weight, const char *x, const int part, whole_sums sum) {
    vi w[FIXED_PANELS][HALVES];
    // Loaded again for each part, which costs less than keeping it.
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int h = 0; h < HALVES; h++)
            w[p][h] = unpack(vi_load(weight + p * c->panel_stride + h * W * 4), bits, part);
    UNROLL for (int r = 0; r < rows; r++) {
        const vi pair = vi_set1(pair_at(x + r * c->x_stride + part * 4));
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) vi_add_products(&sum[r][p][h], w[p][h], pair);
    }
}

#if QUAD_BITS
// Quad number `part` of each 32 bits: inputs 0 to 3, or of 4-bit weights also 4 to 7.
ALWAYS vi unpack_quads(vi packed, const int bits, const int part) {
    if (bits == 8) return packed;
    return vi_and(part ? vi_shift(packed, 4) : packed, vi_set1(0x0f0f0f0f));
}

// The inputs of one quad of every step; `weight` and `x` are where the step begins.
ALWAYS void add_quads(const chunk *c, const int bits, const int rows, const int panels,
                      const char *weight, const char *x, const int part, whole_sums sum) {
    vi w[FIXED_PANELS][HALVES];
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int h = 0; h < HALVES; h++)
            w[p][h] = unpack_quads(vi_load(weight + p * c->panel_stride + h * W * 4), bits, part);
    UNROLL for (int r = 0; r < rows; r++) {
        const vi quad = vi_set1(pair_at(x + r * c->x_stride + part * 4));
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) vi_add_quads(&sum[r][p][h], w[p][h], quad);
    }
}
#endif

#if FEW_ROWS
// As add_part, of rows that lie as quads: each pair is widened out of the quad that it is half of.
ALWAYS void add_split_part(const chunk *c, const int bits, const int rows, const int panels,
                           const char *weight, const char *x, const int part, whole_sums sum) {
    vi w[FIXED_PANELS][HALVES];
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int h = 0; h < HALVES; h++)
            w[p][h] = unpack(vi_load(weight + p * c->panel_stride + h * W * 4), bits, part);
    UNROLL for (int r = 0; r < rows; r++) {
        const vi quad = vi_set1(pair_at(x + r * c->x_stride + part / 2 * 4));
        const vi pair = vi_odd_or_even_bytes(quad, part & 1);
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) vi_add_products(&sum[r][p][h], w[p][h], pair);
    }
}
#endif

// `x_bits` says how the rows lie: 16 as pairs, 8 as quads, which may be `split` into pairs.
ALWAYS void add_step(const chunk *c, const int bits, const int x_bits, const int split, const int rows,
                     const int panels, const place *at, const int near, int step, whole_sums sum) {
    const char *weight = c->weight + at->panel * c->panel_stride + step * STEP_BYTES;
    const char *x = c->x + step * (4 * x_bits / bits);
    fetch_ahead(c, at->panel, panels, step, near);
#if FEW_ROWS
    if (split) {
        add_split_part(c, bits, rows, panels, weight, x, 0, sum);
        add_split_part(c, bits, rows, panels, weight, x, 1, sum);
        if (bits == 8) return;
        add_split_part(c, bits, rows, panels, weight, x, 2, sum);
        add_split_part(c, bits, rows, panels, weight, x, 3, sum);
        return;
    }
#endif
    (void)split;
#if QUAD_BITS
    if (x_bits == 8) {
        add_quads(c, bits, rows, panels, weight, x, 0, sum);
        if (bits == 4) add_quads(c, bits, rows, panels, weight, x, 1, sum);
        return;
    }
#endif
    add_part(c, bits, rows, panels, weight, x, 0, sum);
    add_part(c, bits, rows, panels, weight, x, 1, sum);
    if (bits == 8) return;
    add_part(c, bits, rows, panels, weight, x, 2, sum);
    add_part(c, bits, rows, panels, weight, x, 3, sum);
}

#define MIDDLE_OF_8 128

ALWAYS void add_steps(const chunk *c, const int bits, const int x_bits, const int split,
                      const int rows, const int panels, const place *at, const int near, whole_sums sum) {
    // Not all steps in one piece, where their number is known: sums would not stay in registers.
    _Pragma("GCC unroll 1") for (int i = at->step; i < at->end; i++)
        add_step(c, bits, x_bits, split, rows, panels, at, near, i, sum);
}

ALWAYS void add_group(const chunk *c, const int bits, const int x_bits, const int split,
                      const int rows, const int panels, const place *at, whole_sums sum) {
    if (c->fetch_near)
        add_steps(c, bits, x_bits, split, rows, panels, at, 1, sum);
    else
        add_steps(c, bits, x_bits, split, rows, panels, at, 0, sum);
}
#endif

#ifdef HALF_STEPS
// Sums of 16 bits, of the quads of at most HALF_STEPS steps.
ALWAYS void add_narrow(const chunk *c, const int rows, const int panels, const place *at, whole_sums narrow) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) narrow[r][p][h] = vi_set1(0);
    add_group(c, 4, 8, 0, rows, panels, at, narrow);
}

ALWAYS void run_quads(const chunk *c, const int rows, const int panels, const place *at,
                      const group_inputs *in) {
    whole_sums narrow;
    if (at->end - at->step == HALF_STEPS) {
        add_narrow(c, rows, panels, at, narrow);
        end_any_group(c, 4, rows, panels, at, in, narrow, 1);
        return;
    }
    whole_sums sum;
    start_group(in, rows, panels, at->number, sum);
    for (int i = at->step; i < at->end; i += HALF_STEPS) {
        const place part = {at->panel, at->number, i, i + HALF_STEPS};
        add_narrow(c, rows, panels, &part, narrow);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int h = 0; h < HALVES; h++)
                    sum[r][p][h] = added_up(sum[r][p][h], narrow[r][p][h]);
    }
    end_any_group(c, 4, rows, panels, at, in, sum, 0);
}
#endif

ALWAYS void run_group(const chunk *c, const int bits, const int x_bits, const int split,
                      const int rows, const int panels, const place *at, const group_inputs *in) {
    if (c->scales_ahead) fetch_scales(c, panels, at);
#ifdef HALF_STEPS
    if (x_bits == 8) {
        run_quads(c, rows, panels, at, in);
        return;
    }
#endif
    whole_sums sum;
    start_group(in, rows, panels, at->number, sum);
#if defined(NEON)
    (void)split;
    add_group(c, bits, x_bits, rows, panels, at, sum);
#else
    add_group(c, bits, x_bits, split, rows, panels, at, sum);
#endif
    end_any_group(c, bits, rows, panels, at, in, sum, 0);
}

// What rows bring to the chunk's groups [first, end), of so many parts each.
ALWAYS void add_parts(const chunk *c, const int rows, const int first, const int end, const int parts,
                      int32_t middle, group_inputs *in) {
    for (int r = 0; r < rows; r++) {
        const int32_t *const sums = c->x_sum + r * c->parts;
        for (int group = first; group < end; group++) {
            int32_t excess = 0;
            for (int i = 0; i < parts; i++) excess += sums[group * parts + i];
            in->excess[r][group] = excess;
            in->start[r][group] = (int32_t)(0u - (uint32_t)excess * (uint32_t)middle);
        }
    }
}

// The usual numbers of parts in copies of their own: of several groups at once.
ALWAYS void find_inputs(const chunk *c, const int bits, const int rows, int first, int end,
                        group_inputs *in) {
    const int parts = inputs_of_group(c) / 32;
    const int middle = bits == 8 ? MIDDLE_OF_8 : c->zero ? 0 : 8;
    if (parts == 1)
        add_parts(c, rows, first, end, 1, middle, in);
    else if (parts == 4)
        add_parts(c, rows, first, end, 4, middle, in);
    else
        add_parts(c, rows, first, end, parts, middle, in);
}

ALWAYS void fixed_steps(const chunk *given, const int bits, const int x_bits, const int split,
                        const int rows, const int panels) {
    // Sums are stored while it is read: of a copy, the compiler knows that they leave it as it is.
    const chunk copy = *given, *const c = &copy;
    const int most = PANELS_OF(rows, bits), at_once = panels < most ? panels : most;
    const int steps = inputs_of_group(c) * bits / 32;
    group_inputs inputs;
    find_inputs(c, bits, rows, 0, (c->steps + steps - 1) / steps, &inputs);
    for (int panel = 0; panel < panels; panel += at_once)
        for (int group = 0, i = 0; i < c->steps; group++, i += steps) {
            const place at = {panel, group, i, i + steps < c->steps ? i + steps : c->steps};
            run_group(c, bits, x_bits, split, rows, at_once, &at, &inputs);
        }
}

ALWAYS void int8_steps(const chunk *c, const int rows, const int panels) {
    fixed_steps(c, 8, 16, 0, rows, panels);
}

ALWAYS void int4_steps(const chunk *c, const int rows, const int panels) {
    fixed_steps(c, 4, 16, 0, rows, panels);
}

#if QUAD_BITS >= 8
ALWAYS void int8_quads(const chunk *c, const int rows, const int panels) {
    fixed_steps(c, 8, 8, 0, rows, panels);
}
#endif

#if QUAD_BITS >= 4
ALWAYS void int4_quads(const chunk *c, const int rows, const int panels) {
    fixed_steps(c, 4, 8, 0, rows, panels);
}
#endif

#if FEW_ROWS
ALWAYS void int8_split(const chunk *c, const int rows, const int panels) {
    fixed_steps(c, 8, 8, 1, rows, panels);
}

ALWAYS void int4_split(const chunk *c, const int rows, const int panels) {
    fixed_steps(c, 4, 8, 1, rows, panels);
}
#endif
