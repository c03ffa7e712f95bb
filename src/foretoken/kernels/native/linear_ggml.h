// Matrices of block types (ggml.h) for linear_body.h: one loop for all of them.
//
// Four values of an output are a quad of bytes, made in registers from nibbles, higher bits and tables.
// Where products of quads are exact, activations of 8 bits are multiplied with them, and those of 16 bits,
// if rows are few, as two bytes, the upper ones and the lower ones; elsewhere its halves are widened to
// pairs. Panels are taken by twos where a vector is a whole one, so that a load of activations serves two.
// A group's scales are made once for all rows, whose sums of groups stay in registers where there are enough.

enum {
    BLOCK_CHUNK = 16,  // steps: whole units of 256 inputs
    BLOCK_PANELS = W == 16 ? 2 : 1,  // at once
    VECTORS = BLOCK_PANELS * HALVES,
    BLOCK_FETCH = 16   // how many steps ahead values are fetched
};

typedef struct {
    const char *values;       // of a step, in the first panel
    int64_t stride;           // bytes to the next panel's
    const char *x;            // the step in the first row
    int64_t x_stride;
} block_step;

// Where vector `v` of panels has its numbers, of `bytes` each.
ALWAYS const char *of_vector(const char *first, int64_t stride, const int v, const int bytes) {
    return first + v / HALVES * stride + v % HALVES * W * bytes;
}

// Quad number `k` of a step, of the outputs of vector `v`.
ALWAYS vi block_quad(const block_step *s, const int front, const vi table, const int k, const int v) {
    const char *const at = of_vector(s->values, s->stride, v, 4);
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

typedef vi block_sums[MOST_FIXED_ROWS][VECTORS];
typedef vf block_terms[MOST_FIXED_ROWS][VECTORS];

// For every row and vector of outputs.
#define EACH_SUM(rows)                   \
    UNROLL for (int r = 0; r < rows; r++) \
        UNROLL for (int v = 0; v < VECTORS; v++)

// Add the products of quads [first, first + count), as pairs of 16 bits.
ALWAYS void add_block_pairs(const block_step *s, const int front, const vi table, const int rows,
                            const int first, const int count, block_sums sum) {
    UNROLL for (int k = first; k < first + count; k++) {
        vi quad[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) quad[v] = block_quad(s, front, table, k, v);
        UNROLL for (int part = 0; part < 2; part++) {
            vi w[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++)
                w[v] = part ? vi_shift(quad[v], 8) : vi_and(quad[v], vi_set1(0x00ff00ff));
            UNROLL for (int r = 0; r < rows; r++) {
                const vi pair = vi_set1(pair_at(s->x + r * s->x_stride + (2 * k + part) * 4));
                UNROLL for (int v = 0; v < VECTORS; v++) vi_add_products(&sum[r][v], w[v], pair);
            }
        }
    }
}

#if BLOCK_QUADS
#ifdef HALF_STEPS
// So many quads' products are added in 16 bits: a pair of them is at most 2 x 127 x the largest value.
ALWAYS int quads_of_16_bits(const int front) {
    const int bits = bits_of_front(front);
    return bits == 4 ? 8 : bits == 5 ? 4 : 2;
}
#endif

// The same as quads of bytes. `sets`: 2 for activations of 16 bits, whose upper bytes have the first sums.
ALWAYS void add_block_quads(const block_step *s, const int front, const int sets, const vi table, const int rows,
                            const int first, const int count, block_sums sum[2]) {
#ifdef HALF_STEPS
    const int at_once = quads_of_16_bits(front) < count ? quads_of_16_bits(front) : count;
    UNROLL for (int begin = first; begin < first + count; begin += at_once) {
        block_sums narrow[2];
        UNROLL for (int set = 0; set < sets; set++)
            EACH_SUM(rows) narrow[set][r][v] = vi_set1(0);
#else
    const int at_once = count;
    {
        const int begin = first;
#define narrow sum
#endif
        UNROLL for (int k = begin; k < begin + at_once; k++) {
            vi quad[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) quad[v] = block_quad(s, front, table, k, v);
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int set = 0; set < sets; set++) {
                    const vi four = vi_set1(pair_at(s->x + r * s->x_stride + (sets * k + set) * 4));
                    UNROLL for (int v = 0; v < VECTORS; v++) vi_add_quads(&narrow[set][r][v], quad[v], four);
                }
        }
#ifdef HALF_STEPS
        UNROLL for (int set = 0; set < sets; set++)
            EACH_SUM(rows) sum[set][r][v] = added_up(sum[set][r][v], narrow[set][r][v]);
#else
#undef narrow
#endif
    }
}
#endif

ALWAYS int x_bytes_of(const int x_kind) { return x_kind == X_BYTES ? 1 : 2; }

// Whole sums of a group, from what they start with.
ALWAYS void sum_block(const block_step *s, const int front, const int x_kind, const vi table, const int rows,
                      const int first, const int count, block_sums sum) {
#if BLOCK_QUADS
    if (x_kind != X_PAIRS) {
        const int sets = x_kind == X_SPLIT ? 2 : 1, last = sets - 1;
        block_sums found[2];
        EACH_SUM(rows) {
            if (last) found[0][r][v] = vi_set1(0);
            found[last][r][v] = sum[r][v];
        }
        add_block_quads(s, front, sets, table, rows, first, count, found);
        EACH_SUM(rows) sum[r][v] = last ? vi_add(vi_times_256(found[0][r][v]), found[1][r][v]) : found[0][r][v];
        return;
    }
#endif
    (void)x_kind;
    add_block_pairs(s, front, table, rows, first, count, sum);
}

// Scales of a group, of one vector.
ALWAYS vf block_scales(const char *numbers, int64_t stride, const int form, const int v) {
    const char *const at = of_vector(numbers, stride, v, form == FT_HALVES ? 2 : 1);
    if (form == FT_HALVES) return vf_load_half((const uint16_t *)at);
    if (form == FT_POWERS) return vf_of_powers((const uint8_t *)at);
    return vf_of_vi(vi_load_bytes(at));
}

// What ends the groups of up to 128 inputs, whose activations share a scale: at most four steps.
typedef struct {
    const char *numbers, *upper;  // of the first step, in the first panel
    int64_t stride, upper_stride; // bytes to the next panel's
    const int32_t *x_sum;         // of the first group in the first row
    const float *x_scale;
    float *sums[VECTORS];         // of vectors in the first row
    int64_t parts, blocks;
    int groups;
} block_end;

enum { MOST_ENDS = FT_BLOCK / 16 };  // groups of 128 inputs
typedef void (*end_function)(const block_end *e, int rows, block_terms sums);

// Row by row: the sum of groups' whole sums times their scales, times what all of them share, less their
// minima. Minima that are bytes are summed up as whole numbers.
ALWAYS void end_groups(const block_end *e, const int form, const int minima, int rows, block_terms sums) {
    vf minimum[MOST_ENDS][VECTORS], upper[VECTORS], upper_minimum[VECTORS];
    vi least[MOST_ENDS][VECTORS];
    const int width = form == FT_HALVES ? 2 * FT_PANEL : FT_PANEL;
    for (int group = 0; minima && group < e->groups; group++) {
        const char *const least_of_group = e->numbers + group * 2 * width + width;
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const char *const at = of_vector(least_of_group, e->stride, v, width / FT_PANEL);
            if (form == FT_HALVES)
                minimum[group][v] = vf_load_half((const uint16_t *)at);
            else
                least[group][v] = vi_load_bytes(at);
        }
    }
    UNROLL for (int v = 0; form == FT_BYTES && v < VECTORS; v++) {
        const char *const at = of_vector(e->upper, e->upper_stride, v, 2);
        upper[v] = vf_load_half((const uint16_t *)at);
        if (minima) upper_minimum[v] = vf_load_half((const uint16_t *)at + FT_PANEL);
    }
    for (int r = 0; r < rows; r++) {
        const int32_t *const excess = e->x_sum + r * e->parts;
        const vf x_scale = vf_set1(e->x_scale[r * e->blocks]);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            vf term = vf_mul(sums[r][v], x_scale);
            if (form == FT_BYTES) term = vf_mul(term, upper[v]);
            if (minima) {
                vf lack = vf_set1(0);
                vi lacking = vi_set1(0);
                for (int group = 0; group < e->groups; group++)
                    if (form == FT_BYTES)
                        lacking = vi_add(lacking, vi_mul(least[group][v], vi_set1(excess[group])));
                    else
                        lack = vf_add(lack, vf_mul(minimum[group][v], vf_set1((float)excess[group])));
                lack = vf_mul(form == FT_BYTES ? vf_of_vi(lacking) : lack, x_scale);
                if (form == FT_BYTES) lack = vf_mul(lack, upper_minimum[v]);
                term = vf_sub(term, lack);
            }
            float *const total = e->sums[v] + r * SUM_STRIDE;
            vf_store(total, vf_add(vf_load(total), term));
        }
    }
}

#define ENDING(name, form, minima) \
    static void name(const block_end *e, int rows, block_terms sums) { end_groups(e, form, minima, rows, sums); }
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

// What whole sums start from, of a chunk's groups: without minima values have a middle.
typedef int32_t block_starts[MOST_FIXED_ROWS][BLOCK_CHUNK * 2];

static void find_starts(const chunk *c, int middle, int rows, int groups, block_starts start) {
    for (int r = 0; r < rows; r++)
        for (int group = 0; group < groups; group++)
            start[r][group] = (int32_t)(0u - (uint32_t)c->x_sum[r * c->parts + group] * (uint32_t)middle);
}

// `count` steps from group `group` of the chunk on: what groups' whole sums come to.
ALWAYS void sum_steps(block_step s, const block_end *e, const int front, const int x_kind, const int form,
                      const vi table, const int rows, int count, int group, int width, const block_starts start,
                      block_terms sum) {
    const char *numbers = e->numbers;
    const int each = FT_STEP / ft_front_group(front), quads = 8 / each;
    EACH_SUM(rows) sum[r][v] = vf_set1(0);
    _Pragma("GCC unroll 1") for (int i = 0; i < count; i++) {
        UNROLL for (int part = 0; part < each; part++) {
            block_sums whole;
            EACH_SUM(rows) whole[r][v] = vi_set1(start[r][group]);
            sum_block(&s, front, x_kind, table, rows, part * quads, quads, whole);
            vf scale[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) scale[v] = block_scales(numbers, e->stride, form, v);
            EACH_SUM(rows) sum[r][v] = vf_add(sum[r][v], vf_mul(vf_of_vi(whole[r][v]), scale[v]));
            numbers += width;
            group++;
        }
        s.values += ft_front_bytes(front);
        s.x += FT_STEP * x_bytes_of(x_kind);
    }
}

static inline void bring_nearer(const char *at, int bytes, int near) {
    if (near)
        for (int line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 3);
    else
        for (int line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
}

// Panels of a chunk, one after the other.
ALWAYS void block_panels(const chunk *c, const int front, const int x_kind, const int rows, int panels) {
    const ft_linear *const layer = c->layer;
    const int step_bytes = ft_front_bytes(front), form = layer->form;
    const int number_bytes = ft_number_bytes(front, form), upper_bytes = ft_upper_bytes(form);
    const int each = FT_STEP / ft_front_group(front), width = number_bytes / each;
    // What ends together has one scale of activations, and upper numbers of its own.
    const int at_once = (layer->unit < FT_BLOCK && upper_bytes ? layer->unit : FT_BLOCK) / FT_STEP;
    const end_function end = end_of_form(form);
    const vi table = vi_table(ft_tables[front]);
    block_starts start;
    find_starts(c, ft_middle(front, form), rows, c->steps * each, start);
    float unwanted[MOST_FIXED_ROWS * SUM_STRIDE];
    if (panels % BLOCK_PANELS) memset(unwanted, 0, sizeof unwanted);
    for (int panel = 0; panel < panels; panel += BLOCK_PANELS) {
        // A last one that is alone is taken twice, once for nothing.
        const int pair = panels - panel < BLOCK_PANELS ? 0 : 1;
        block_step s = {c->weight + panel * c->panel_stride, pair * c->panel_stride, c->x, c->x_stride};
        block_end e = {.numbers = c->scale + panel * c->group_stride,
                       .stride = pair * c->group_stride,
                       .upper_stride = pair * c->upper_stride,
                       .x_sum = c->x_sum,
                       .parts = c->parts,
                       .blocks = c->blocks};
        for (int v = 0; v < VECTORS; v++)
            e.sums[v] = v / HALVES > pair ? unwanted : c->sums + panel * FT_PANEL + v * W;
        const char *const upper = c->zero + panel * c->upper_stride;
        const int near = c->fetch_near;
        for (int p = panel; p <= panel + pair * (BLOCK_PANELS - 1); p++) {
            bring_nearer(c->scale + p * c->group_stride + c->scales_ahead, c->steps * number_bytes, near);
            bring_nearer(c->zero + p * c->upper_stride + c->upper_ahead,
                         c->steps * FT_STEP / layer->unit * upper_bytes, near);
        }
        for (int first = 0; first < c->steps; first += at_once) {
            const int count = c->steps - first < at_once ? c->steps - first : at_once;
            for (int p = panel; p <= panel + pair * (BLOCK_PANELS - 1); p++)
                bring_nearer(c->fetch[p] + first * step_bytes, count * step_bytes, near);
            e.groups = count * each;
            e.upper = upper + first * FT_STEP / layer->unit * upper_bytes;
            e.x_scale = c->x_scale + first * FT_STEP / FT_BLOCK;
            block_terms sum;
            if (front == FT_BITS6 || front == FT_SHORT4 || (front != FT_FP4 && (form & 3) == FT_BYTES))
                sum_steps(s, &e, front, x_kind, FT_BYTES, table, rows, count, first * each, width, start, sum);
            else
                sum_steps(s, &e, front, x_kind, front == FT_FP4 ? FT_POWERS : FT_HALVES, table, rows, count,
                          first * each, width, start, sum);
            end(&e, rows, sum);
            s.values += count * step_bytes;
            s.x += count * FT_STEP * x_bytes_of(x_kind);
            e.numbers += count * number_bytes;
            e.x_sum += e.groups;
        }
    }
}

// A front's kernels. A tile and a panel run the same code, in copies for the numbers of rows where sums have
// registers.
#if W == 4
#define ROW_COPIES(front, x_kind) block_panels(c, front, x_kind, rows, panels);
#else
#define ROW_COPY(front, x_kind, number) \
    case number: block_panels(c, front, x_kind, CAP(number, MOST_FIXED_ROWS), panels); break;
#define ROW_COPIES(front, x_kind)                                                               \
    switch (rows) {                                                                             \
        ROW_COPY(front, x_kind, 1) ROW_COPY(front, x_kind, 2) ROW_COPY(front, x_kind, 3)        \
        ROW_COPY(front, x_kind, 4) ROW_COPY(front, x_kind, 5) ROW_COPY(front, x_kind, 6)        \
        default: abort();                                                                       \
    }
#endif
#define FEW_COPIES(front, x_kind)                                                               \
    if (rows == 1 || MOST_SPLIT == 1)                                                           \
        block_panels(c, front, x_kind, 1, panels);                                              \
    else                                                                                        \
        block_panels(c, front, x_kind, MOST_SPLIT, panels);
#define BLOCK_KERNEL(name, front, x_kind, copies)                                               \
    static void name(const chunk *c, int rows, int panels) { copies(front, x_kind) }            \
    static void name##_tile(const chunk *c, int rows) { name(c, rows, FT_TILE); }               \
    static void name##_panel(const chunk *c, int rows) { name(c, rows, 1); }
#define EVERY_FRONT(what) what(FT_BITS4) what(FT_BITS5) what(FT_BITS6) what(FT_IQ4) what(FT_FP4) what(FT_SHORT4)
#define BLOCK_PAIRS(front) BLOCK_KERNEL(front##_pairs, front, X_PAIRS, ROW_COPIES)
EVERY_FRONT(BLOCK_PAIRS)
#if BLOCK_QUADS
#ifdef HALF_STEPS
#define SPLIT_FRONTS(what) what(FT_BITS4) what(FT_SHORT4)
#else
#define SPLIT_FRONTS EVERY_FRONT
#endif
#define BLOCK_SPLITS(front) BLOCK_KERNEL(front##_split, front, X_SPLIT, FEW_COPIES)
SPLIT_FRONTS(BLOCK_SPLITS)
#define BLOCK_QUADRUPLES(front) BLOCK_KERNEL(front##_quads, front, X_BYTES, ROW_COPIES)
EVERY_FRONT(BLOCK_QUADRUPLES)
#endif
