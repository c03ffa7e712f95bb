// Matrices of block types (ggml.h) for linear_body.h: one loop for all of them.
//
// Four values of an output are a quad of bytes, made in registers from nibbles, higher bits and tables.
// Activations of 16 bits are multiplied with its halves as pairs, those of 8 with the quad itself where
// that is exact. Whole sums of a group go to memory, and there they get their scales: what ends a group
// is the same for all fronts.
#include "ggml.h"

enum {
    BLOCK_CHUNK = 16,  // steps: whole units of 256 inputs
    BLOCK_FETCH = 8    // how many steps ahead values are fetched
};

// Whole sums of a group, of all rows.
typedef int32_t group_totals[MOST_FIXED_ROWS][FT_PANEL];

typedef struct {
    const char *values;       // of a step, in one panel
    const char *x;            // the step in the first row
    int64_t x_stride;
} block_step;

// Quad number `k` of a step, of the outputs of half `h`.
ALWAYS vi block_quad(const char *values, const int front, const vi table, const int k, const int h) {
    const char *const at = values + h * W * 4;
    const vi packed = vi_load(at + k / 2 * STEP_BYTES), low = vi_set1(0x0f0f0f0f);
    const vi nibbles = vi_and(k % 2 ? vi_shift(packed, 4) : packed, low);
    if (front == FT_IQ4 || front == FT_FP4) return vi_look_up(table, nibbles);
    if (front == FT_BITS5) {
        const vi plane = vi_load(at + 4 * STEP_BYTES);
        const vi there = k < 4 ? vi_shift_up(plane, 4 - k) : vi_shift(plane, k - 4);
        return vi_or(nibbles, vi_and(there, vi_set1(0x10101010)));
    }
    if (front == FT_BITS6) {
        const vi plane = vi_load(at + (4 + k / 4) * STEP_BYTES);
        const int field = 2 * (k % 4);
        const vi there = field < 4 ? vi_shift_up(plane, 4 - field) : vi_shift(plane, field - 4);
        return vi_or(nibbles, vi_and(there, vi_set1(0x30303030)));
    }
    return nibbles;
}

typedef vi block_sums[MOST_FIXED_ROWS][HALVES];

ALWAYS void begin_sums(const int rows, block_sums sum) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int h = 0; h < HALVES; h++) sum[r][h] = vi_set1(0);
}

ALWAYS void keep_sums(const int rows, block_sums sum, group_totals totals) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int h = 0; h < HALVES; h++) vi_store(totals[r] + h * W, sum[r][h]);
}

// Quads [first, first + count) as pairs of 16 bits.
ALWAYS void sum_pairs(const block_step *s, const int front, const vi table, const int rows,
                      const int first, const int count, group_totals totals) {
    block_sums sum;
    begin_sums(rows, sum);
    UNROLL for (int k = first; k < first + count; k++) {
        vi quad[HALVES];
        UNROLL for (int h = 0; h < HALVES; h++) quad[h] = block_quad(s->values, front, table, k, h);
        UNROLL for (int part = 0; part < 2; part++) {
            vi w[HALVES];
            UNROLL for (int h = 0; h < HALVES; h++)
                w[h] = part ? vi_shift(quad[h], 8) : vi_and(quad[h], vi_set1(0x00ff00ff));
            UNROLL for (int r = 0; r < rows; r++) {
                const vi pair = vi_set1(pair_at(s->x + r * s->x_stride + (2 * k + part) * 4));
                UNROLL for (int h = 0; h < HALVES; h++) vi_add_products(&sum[r][h], w[h], pair);
            }
        }
    }
    keep_sums(rows, sum, totals);
}

// Bits of a front's values.
ALWAYS int bits_of_front(const int front) {
    return front == FT_BITS5 || front == FT_FP4 ? 5 : front == FT_BITS6 ? 6 : front == FT_IQ4 ? 8 : 4;
}

// Bits of values that quads take exactly.
#if defined(NEON) || !QUAD_BITS
#define BLOCK_QUADS 0
#elif defined(HALF_STEPS)
#define BLOCK_QUADS 6
#else
#define BLOCK_QUADS 8
#endif

#if BLOCK_QUADS
#ifdef HALF_STEPS
// So many quads' products are added in 16 bits: a pair of them is at most 2 x 127 x the largest value.
ALWAYS int quads_of_16_bits(const int front) {
    const int bits = bits_of_front(front);
    return bits == 4 ? 8 : bits == 5 ? 4 : 2;
}
#endif

// The same as quads of bytes.
ALWAYS void sum_quads(const block_step *s, const int front, const vi table, const int rows,
                      const int first, const int count, group_totals totals) {
    block_sums sum;
    begin_sums(rows, sum);
#ifdef HALF_STEPS
    const int at_once = quads_of_16_bits(front) < count ? quads_of_16_bits(front) : count;
    UNROLL for (int begin = first; begin < first + count; begin += at_once) {
        block_sums narrow;
        begin_sums(rows, narrow);
#else
    const int at_once = count;
    {
        const int begin = first;
#define narrow sum
#endif
        UNROLL for (int k = begin; k < begin + at_once; k++) {
            vi quad[HALVES];
            UNROLL for (int h = 0; h < HALVES; h++) quad[h] = block_quad(s->values, front, table, k, h);
            UNROLL for (int r = 0; r < rows; r++) {
                const vi four = vi_set1(pair_at(s->x + r * s->x_stride + k * 4));
                UNROLL for (int h = 0; h < HALVES; h++) vi_add_quads(&narrow[r][h], quad[h], four);
            }
        }
#ifdef HALF_STEPS
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int h = 0; h < HALVES; h++) sum[r][h] = added_up(sum[r][h], narrow[r][h]);
#else
#undef narrow
#endif
    }
    keep_sums(rows, sum, totals);
}
#endif

// What ends the groups of 128 inputs, whose activations share a scale: at most four steps.
typedef struct {
    const char *numbers, *upper;  // of the first step, in one panel
    const int32_t *x_sum;         // of the first group in the first row
    const float *x_scale;
    float *sums;                  // of the panel in the first row
    int64_t parts, blocks;
    int middle, number_bytes;     // of a step's numbers
    int groups, each;             // groups in all, and of a step
} block_end;

enum { MOST_ENDS = FT_BLOCK / 16 };  // groups of 128 inputs
typedef void (*end_function)(const block_end *e, int rows, group_totals *totals);

// Row by row: whole sums times their scales, in order; the sum of these times what all of them share.
// Minima that are bytes are summed up as whole numbers.
ALWAYS void end_groups(const block_end *e, const int form, const int minima, int rows, group_totals *totals) {
    vf scale[MOST_ENDS][HALVES], minimum[MOST_ENDS][HALVES];
    vi least[MOST_ENDS][HALVES];
    const int width = form == FT_HALVES ? 2 * FT_PANEL : FT_PANEL;
    for (int group = 0; group < e->groups; group++) {
        const char *at = e->numbers + group / e->each * e->number_bytes;
        at += group % e->each * width * (minima ? 2 : 1);
        UNROLL for (int h = 0; h < HALVES; h++) {
            if (form == FT_HALVES) {
                scale[group][h] = vf_load_half((const uint16_t *)at + h * W);
                if (minima) minimum[group][h] = vf_load_half((const uint16_t *)(at + width) + h * W);
            } else if (form == FT_POWERS) {
                scale[group][h] = vf_of_powers((const uint8_t *)at + h * W);
            } else {
                scale[group][h] = vf_of_vi(vi_load_bytes(at + h * W));
                if (minima) least[group][h] = vi_load_bytes(at + width + h * W);
            }
        }
    }
    vf upper[HALVES], upper_minimum[HALVES];
    if (form == FT_BYTES) UNROLL for (int h = 0; h < HALVES; h++) {
            upper[h] = vf_load_half((const uint16_t *)e->upper + h * W);
            if (minima) upper_minimum[h] = vf_load_half((const uint16_t *)e->upper + FT_PANEL + h * W);
        }
    for (int r = 0; r < rows; r++) {
        const int32_t *const excess = e->x_sum + r * e->parts;
        vf sum[HALVES], lack[HALVES];
        vi lacking[HALVES];
        UNROLL for (int h = 0; h < HALVES; h++) {
            sum[h] = lack[h] = vf_set1(0);
            lacking[h] = vi_set1(0);
        }
        for (int group = 0; group < e->groups; group++) {
            const int32_t start = minima ? 0 : (int32_t)(0u - (uint32_t)excess[group] * (uint32_t)e->middle);
            UNROLL for (int h = 0; h < HALVES; h++) {
                vi whole = vi_load(totals[group][r] + h * W);
                if (!minima) whole = vi_add(whole, vi_set1(start));
                sum[h] = vf_add(sum[h], vf_mul(vf_of_vi(whole), scale[group][h]));
                if (minima && form == FT_BYTES)
                    lacking[h] = vi_add(lacking[h], vi_mul(least[group][h], vi_set1(excess[group])));
                else if (minima)
                    lack[h] = vf_add(lack[h], vf_mul(minimum[group][h], vf_set1((float)excess[group])));
            }
        }
        const vf x_scale = vf_set1(e->x_scale[r * e->blocks]);
        UNROLL for (int h = 0; h < HALVES; h++) {
            vf term = vf_mul(sum[h], x_scale);
            if (form == FT_BYTES) term = vf_mul(term, upper[h]);
            if (minima) {
                vf less = form == FT_BYTES ? vf_of_vi(lacking[h]) : lack[h];
                less = vf_mul(less, x_scale);
                if (form == FT_BYTES) less = vf_mul(less, upper_minimum[h]);
                term = vf_sub(term, less);
            }
            float *const total = e->sums + r * SUM_STRIDE + h * W;
            vf_store(total, vf_add(vf_load(total), term));
        }
    }
}

#define ENDING(name, form, minima)                                                    \
    static void name(const block_end *e, int rows, group_totals *totals) {            \
        end_groups(e, form, minima, rows, totals);                                    \
    }
ENDING(end_halves, FT_HALVES, 0)
ENDING(end_halves_minima, FT_HALVES, 1)
ENDING(end_bytes, FT_BYTES, 0)
ENDING(end_bytes_minima, FT_BYTES, 1)
ENDING(end_powers, FT_POWERS, 0)

static end_function end_of_form(int form) {
    if ((form & 3) == FT_POWERS) return end_powers;
    if ((form & 3) == FT_HALVES) return form & FT_MINIMA ? end_halves_minima : end_halves;
    return form & FT_MINIMA ? end_bytes_minima : end_bytes;
}

// The products of a step, as pairs or, of `x_bits` 8, as quads.
ALWAYS void sum_block(const block_step *s, const int front, const int x_bits, const vi table, const int rows,
                      const int first, const int count, group_totals totals) {
#if BLOCK_QUADS
    if (x_bits == 8) {
        sum_quads(s, front, table, rows, first, count, totals);
        return;
    }
#endif
    (void)x_bits;
    sum_pairs(s, front, table, rows, first, count, totals);
}

// Panels of a chunk, one after the other.
ALWAYS void block_panels(const chunk *c, const int front, const int x_bits, const int rows, int panels) {
    const ft_linear *const layer = c->layer;
    const int step_bytes = ft_front_bytes(front), form = layer->form;
    const int number_bytes = ft_number_bytes(front, form), upper_bytes = ft_upper_bytes(form);
    const int each = FT_STEP / ft_front_group(front);
    // What ends together has one scale of activations, and upper numbers of its own.
    const int at_once = (layer->unit < FT_BLOCK && upper_bytes ? layer->unit : FT_BLOCK) / FT_STEP;
    const end_function end = end_of_form(form);
    const vi table = vi_table(ft_tables[front]);
    group_totals totals[MOST_ENDS];
    for (int panel = 0; panel < panels; panel++) {
        block_step s = {c->weight + panel * c->panel_stride, c->x, c->x_stride};
        block_end e = {.numbers = c->scale + panel * c->group_stride,
                       .x_sum = c->x_sum,
                       .sums = c->sums + panel * FT_PANEL,
                       .parts = c->parts,
                       .blocks = c->blocks,
                       .middle = ft_middle(front, form),
                       .number_bytes = number_bytes,
                       .each = each};
        const char *const upper = c->zero + panel * c->upper_stride, *fetch = c->fetch[panel];
        for (int first = 0; first < c->steps; first += at_once) {
            const int count = c->steps - first < at_once ? c->steps - first : at_once;
            _Pragma("GCC unroll 1") for (int i = 0; i < count; i++) {
                UNROLL for (int line = 0; line < step_bytes; line += 64) __builtin_prefetch(fetch + line, 0, 3);
                fetch += step_bytes;
                sum_block(&s, front, x_bits, table, rows, 0, 8 / each, totals[each * i]);
                if (each == 2) sum_block(&s, front, x_bits, table, rows, 4, 4, totals[2 * i + 1]);
                s.values += step_bytes;
                s.x += FT_STEP * x_bits / 8;
            }
            e.groups = count * each;
            e.upper = upper + first * FT_STEP / layer->unit * upper_bytes;
            e.x_scale = c->x_scale + first * FT_STEP / FT_BLOCK;
            end(&e, rows, totals);
            e.numbers += count * number_bytes;
            e.x_sum += e.groups;
        }
    }
}

// A front's kernels. A tile and a panel run the same code, in copies for the numbers of rows where sums have
// registers.
#if W == 4
#define ROW_COPIES(front, x_bits) block_panels(c, front, x_bits, rows, panels);
#else
#define ROW_COPY(front, x_bits, number) \
    case number: block_panels(c, front, x_bits, CAP(number, MOST_FIXED_ROWS), panels); break;
#define ROW_COPIES(front, x_bits)                                                           \
    switch (rows) {                                                                         \
        ROW_COPY(front, x_bits, 1) ROW_COPY(front, x_bits, 2) ROW_COPY(front, x_bits, 3)    \
        ROW_COPY(front, x_bits, 4) ROW_COPY(front, x_bits, 5) ROW_COPY(front, x_bits, 6)    \
        default: abort();                                                                   \
    }
#endif
#define BLOCK_KERNEL(name, front, x_bits)                                               \
    static void name(const chunk *c, int rows, int panels) { ROW_COPIES(front, x_bits) } \
    static void name##_tile(const chunk *c, int rows) { name(c, rows, FT_TILE); }       \
    static void name##_panel(const chunk *c, int rows) { name(c, rows, 1); }
#define EVERY_FRONT(what) what(FT_BITS4) what(FT_BITS5) what(FT_BITS6) what(FT_IQ4) what(FT_FP4) what(FT_SHORT4)
#define BLOCK_PAIRS(front) BLOCK_KERNEL(front##_pairs, front, 16)
EVERY_FRONT(BLOCK_PAIRS)
#if BLOCK_QUADS
#define BLOCK_QUADRUPLES(front) BLOCK_KERNEL(front##_quads, front, 8)
EVERY_FRONT(BLOCK_QUADRUPLES)
#endif
