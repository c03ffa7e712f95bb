// The attention kernel, written once over vec.h; see attention.h for what it computes.
//
// A file that includes this one has defined NAME, its ft_attention_kernel, and, for processors
// that multiply bfloat16, PAIRS: then keys, queries, weights and values are handled as pairs of
// bfloat16 in 32-bit cells. Otherwise a cell is one float.
//
// Per block of 16 keys and key head: K is transposed and V copied into cells that lie as the
// multiplication reads them, then tiles of up to SCORE_ROWS query rows go through scores, softmax
// and values. Scores and values are the same little matrix product (`product_of`). A block of all
// heads of the unit is some 32 KB: it is fetched in the order of memory while the one before is
// computed, and stays in the L1 cache.
#include "attention.h"

#include <float.h>
#include <math.h>

#include "vec.h"

#define BLOCK 16
#define SECTION 512
#define LOG2_E 1.4426950408889634f
#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if W == 16
#define TILE_ROWS 6
#define TILE_VECS 4
#define SCORE_ROWS 24
#else
#define TILE_ROWS 4
#define TILE_VECS 2
#define SCORE_ROWS 4
#endif

#ifdef PAIRS
#define PER_CELL 2
#else
#define PER_CELL 1
#endif
#define VALUE_STEPS (BLOCK / PER_CELL)

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }
static inline int round_up(int number, int multiple) {
    return (number + multiple - 1) / multiple * multiple;
}

// Keys and values to be brought nearer a few lines at a time among other work: processors drop, or
// wait for, what they cannot queue. They are those of the next block, all heads of the unit, slot
// by slot in the order of memory: one head's alone lie too far apart to be read fast.
typedef struct {
    const char *const *slots;      // the next ones
    int count;                     // how many are left
    const char *slot, *at, *end;   // lines [at, end) of a slot's keys or values
    int64_t keys, values, bytes;   // where in a slot the pieces lie; values 0: one piece has both
    int per_keys, per_values, per_steps;  // lines for each part of the work
} fetcher;

ALWAYS void fetch_piece(fetcher *f) {
    if (f->slot && f->values) {
        f->at = f->slot + f->values;
        f->slot = NULL;
    } else if (f->count > 0) {
        f->slot = *f->slots++;
        f->count--;
        f->at = f->slot + f->keys;
    } else {
        return;
    }
    f->end = f->at + f->bytes;
}

// Inlined always: GCC takes a function that only prefetches for one without effect.
ALWAYS void fetch(fetcher *f, int lines) {
    if (f->at >= f->end) fetch_piece(f);
    for (; lines > 0 && f->at < f->end; lines--, f->at += 64) __builtin_prefetch(f->at, 0, 3);
}

// State of a unit's rows. Arrays over [heads, rows] unless said otherwise.
typedef struct {
    const ft_attention_call *call;
    const ft_attention_shape *shape;
    const ft_span *span;
    const ft_attention_unit *unit;
    int group, rows, heads; // rows: tokens * group
    int steps;              // cells of a query
    int width;              // floats of an output row, a multiple of W
    float *q;               // cells, see query_at
    float *peak, *sum;      // the section's largest score; its sum of weights, in W lanes
    float *acc;             // [heads, rows, width]: the section's weighted values
    float *all_peak, *all_sum, *all_acc; // the same of the sections merged so far
    float *keys;            // cells [steps, BLOCK]
    float *values;          // cells [VALUE_STEPS, width]
    float *scores;          // [SCORE_ROWS, BLOCK]
    float *weights;         // cells [SCORE_ROWS, VALUE_STEPS]
    int32_t *highs;         // [rows] position of each row: of the last key that it sees
    int64_t slot_bytes, head_bytes;
    const char *slots[BLOCK]; // where the block's keys are stored: their slots
    int num_keys;             // of the block; beyond it cells are zero
    const char *next[BLOCK];  // the slots of what will be read after it
    fetcher fetch;
} work;

static size_t scratch_floats(const ft_attention_shape *shape, int num_rows, int heads) {
    const size_t group = (size_t)(shape->num_heads / shape->num_kv_heads);
    const size_t rows = group * (size_t)num_rows * (size_t)heads;
    const size_t width = (size_t)round_up(shape->head_dim, W);
    const size_t steps = (size_t)round_up(shape->head_dim, PER_CELL) / PER_CELL;
    const size_t queries = (size_t)(heads * round_up((int)group * num_rows, SCORE_ROWS)) * steps;
    return queries + rows * (2 * width + W + 4) + steps * BLOCK + VALUE_STEPS * width +
           SCORE_ROWS * (BLOCK + VALUE_STEPS) + 16 * 16;
}

static float *carve(float **at, size_t count) {
    float *start = *at;
    *at += (count + 15) / 16 * 16;
    return start;
}

static void lay_out(work *w, float *scratch) {
    const size_t all = (size_t)w->rows * (size_t)w->heads;
    w->keys = carve(&scratch, (size_t)w->steps * BLOCK);
    w->values = carve(&scratch, (size_t)VALUE_STEPS * (size_t)w->width);
    w->scores = carve(&scratch, SCORE_ROWS * BLOCK);
    w->weights = carve(&scratch, SCORE_ROWS * VALUE_STEPS);
    w->q = carve(&scratch, (size_t)(w->heads * round_up(w->rows, SCORE_ROWS) * w->steps));
    w->acc = carve(&scratch, all * (size_t)w->width);
    w->all_acc = carve(&scratch, all * (size_t)w->width);
    w->sum = carve(&scratch, all * W);
    w->peak = carve(&scratch, all);
    w->all_peak = carve(&scratch, all);
    w->all_sum = carve(&scratch, all);
    w->highs = (int32_t *)carve(&scratch, (size_t)w->rows);
}

// ---- Positions --------------------------------------------------------------------------

static inline const int32_t *path_of(const work *w, int row) {
    return w->call->paths + w->span->paths + (int64_t)row * (w->span->known + w->span->num_rows + 1);
}

static inline int position(const work *w, int row) {
    return w->span->start + (w->span->paths < 0 ? row : path_of(w, row)[0]);
}

// Where the keys of a span are, from its page table.
typedef struct {
    const ft_attention_call *call;
    const ft_span *span;
    int64_t slot_bytes;
} places;

static inline const char *slot_at(const places *p, int place) {
    const int size = p->call->shape->page_size;
    const int64_t page = p->call->pages[p->span->pages + place / size];
    return (const char *)p->call->kv + (page * size + place % size) * p->slot_bytes;
}

// Slots of keys [base, base + num_keys) of committed text or of a chain.
static void find_chain(const places *p, int base, int num_keys, const char **slots) {
    const int size = p->call->shape->page_size;
    for (int i = 0; i < num_keys;) {
        const int run = least(num_keys - i, size - (base + i) % size);
        const char *slot = slot_at(p, base + i);
        for (int j = 0; j < run; j++) slots[i + j] = slot + j * p->slot_bytes;
        i += run;
    }
}

// Slots of keys [base, base + num_keys); those of `row`'s ancestors where it has a path.
static void find_slots(const work *w, int base, int num_keys, int row, const char **slots) {
    const places here = {w->call, w->span, w->slot_bytes};
    const int start = w->span->start;
    const int chain = w->span->paths < 0 ? num_keys : most(0, least(num_keys, start - base));
    find_chain(&here, base, chain, slots);
    for (int i = chain; i < num_keys; i++)
        slots[i] = slot_at(&here, start + path_of(w, row)[1 + base + i - start]);
}

// ---- Cells ------------------------------------------------------------------------------

#if W == 16
ALWAYS void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
#endif

#ifdef PAIRS

static inline __m512i pairs(const char *at, int count) {
    if (count >= 32) return _mm512_loadu_si512(at);
    return _mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), at);
}

// `count` numbers of a head that is kept as FT_INT8, from `first` on, multiplied out.
ALWAYS __m512i rounded_pairs(const work *w, const char *head, int first, int count) {
    const int8_t *at = (const int8_t *)head + first;
    const vf scale = vf_set1(load_float(head + w->shape->head_dim));
    const vf low = vf_mul(vf_load_int8_n(at, count), scale);
    const vf high = count > 16 ? vf_mul(vf_load_int8_n(at + 16, count - 16), scale) : vf_set1(0.0f);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// 16 cells of 16 keys, beginning at a cell and a key.
ALWAYS void load_cells(const work *w, int head, int cell, int key, __m512i r[16]) {
    const int64_t at = head * w->head_bytes + 4 * cell;
    const int count = w->shape->head_dim - 2 * cell;
    if (w->shape->kv_type == FT_INT8)
        UNROLL for (int i = 0; i < 16; i++)
            r[i] = key + i < w->num_keys
                       ? rounded_pairs(w, w->slots[key + i] + head * w->head_bytes, 2 * cell, count)
                       : _mm512_setzero_si512();
    else if (key + 16 <= w->num_keys && count >= 32)
        UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(w->slots[key + i] + at);
    else
        UNROLL for (int i = 0; i < 16; i++)
            r[i] = key + i < w->num_keys ? pairs(w->slots[key + i] + at, count)
                                         : _mm512_setzero_si512();
}

// Values of two keys, side by side for every dimension.
ALWAYS void put_pair(float *to, int width, __m512i a, __m512i b) {
    const __m512i low = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004,
                                          0x250005, 0x260006, 0x270007, 0x280008, 0x290009,
                                          0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e,
                                          0x2f000f);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
    if (width > 16) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
}

static void pack_rounded_values(work *w, int head) {
    float *to = w->values;
    const int size = w->shape->head_dim, width = w->width;
    const int64_t at = head * w->head_bytes;
    const char *const *slots = w->slots;
    for (int key = 0; key < BLOCK; key += 2, to += width) {
        fetch(&w->fetch, w->fetch.per_values);
        for (int d = 0; d < size; d += 32) {
            __m512i a = _mm512_setzero_si512(), b = a;
            if (key < w->num_keys) a = rounded_pairs(w, slots[key] + at, d, size - d);
            if (key + 1 < w->num_keys) b = rounded_pairs(w, slots[key + 1] + at, d, size - d);
            put_pair(to + d, width - d, a, b);
        }
    }
}

static void pack_values(work *w, int head) {
    if (w->shape->kv_type == FT_INT8) {
        pack_rounded_values(w, head);
        return;
    }
    float *to = w->values;
    const int size = w->shape->head_dim, width = w->width, num_keys = w->num_keys;
    const int64_t at = head * w->head_bytes;
    const int lines = w->fetch.per_values;
    fetcher next = w->fetch;
    const char *const *slots = w->slots;
    int key = 0;
    if (size % 32 == 0)
        for (; key + 2 <= num_keys; key += 2, to += width) {
            fetch(&next, lines);
            for (int d = 0; d < size; d += 32)
                put_pair(to + d, 32, _mm512_loadu_si512(slots[key] + at + 2 * d),
                         _mm512_loadu_si512(slots[key + 1] + at + 2 * d));
        }
    for (; key < BLOCK; key += 2, to += width) {
        fetch(&next, lines);
        for (int d = 0; d < size; d += 32) {
            __m512i a = _mm512_setzero_si512(), b = a;
            if (key < num_keys) a = pairs(slots[key] + at + 2 * d, size - d);
            if (key + 1 < num_keys) b = pairs(slots[key + 1] + at + 2 * d, size - d);
            put_pair(to + d, width - d, a, b);
        }
    }
    w->fetch = next;
}

#else

// `count` numbers of a head's keys or values, from `first` on.
static inline vf load_some(const work *w, const char *row, int first, int count) {
    if (w->shape->kv_type == FT_INT8) {
        const vf scale = vf_set1(load_float(row + w->shape->head_dim));
        const vf x = vf_mul(vf_load_int8_n((const int8_t *)row + first, count), scale);
        return w->shape->type == FT_BFLOAT16 ? vf_as_bf16(x) : x;
    }
    if (w->shape->type == FT_BFLOAT16) {
        const bf16 *at = (const bf16 *)row + first;
        return count >= W ? vf_load_bf16(at) : vf_load_bf16_n(at, count);
    }
    const float *at = (const float *)row + first;
    return count >= W ? vf_load(at) : vf_load_n(at, count);
}

static void pack_values(work *w, int head) {
    float *to = w->values;
    for (int j = 0; j < BLOCK; j++) {
        for (int d = 0; d < w->width; d += W) {
            vf x = vf_set1(0.0f);
            if (j < w->num_keys)
                x = load_some(w, w->slots[j] + head * w->head_bytes, d, w->shape->head_dim - d);
            vf_store(to + d, x);
        }
        fetch(&w->fetch, w->fetch.per_values);
        to += w->width;
    }
}

#if W == 16
ALWAYS void load_cells(const work *w, int head, int cell, int key, __m512i r[16]) {
    UNROLL for (int i = 0; i < 16; i++) {
        r[i] = _mm512_setzero_si512();
        if (key + i < w->num_keys) {
            const char *row = w->slots[key + i] + head * w->head_bytes;
            r[i] = _mm512_castps_si512(load_some(w, row, cell, w->shape->head_dim - cell));
        }
    }
}
#endif
#endif

static void pack_keys(work *w, int head) {
#if W == 16
    for (int key = 0; key < BLOCK; key += 16)
        for (int cell = 0; cell < w->steps; cell += 16) {
            __m512i r[16];
            fetch(&w->fetch, w->fetch.per_keys);
            load_cells(w, head, cell, key, r);
            transpose_16x16(r);
            float *to = w->keys + (int64_t)cell * BLOCK + key;
            const int count = w->steps - cell;
            UNROLL for (int i = 0; i < 16; i++)
                if (i < count) _mm512_storeu_si512(to + (int64_t)i * BLOCK, r[i]);
        }
#else
    float row[W];
    for (int key = 0; key < BLOCK; key++) {
        for (int d = 0; d < w->steps; d += W) {
            const int count = least(W, w->steps - d);
            vf x = vf_set1(0.0f);
            if (key < w->num_keys)
                x = load_some(w, w->slots[key] + head * w->head_bytes, d, count);
            vf_store(row, x);
            if (key % 16 == 0 && d % 16 == 0) fetch(&w->fetch, w->fetch.per_keys);
            for (int i = 0; i < count; i++) w->keys[(int64_t)(d + i) * BLOCK + key] = row[i];
        }
    }
#endif
}

// Cells of the query of row m of the unit's head h: [head][m / SCORE_ROWS][steps][SCORE_ROWS].
static inline float *query_at(const work *w, int h, int m) {
    const int64_t tiles = round_up(w->rows, SCORE_ROWS) / SCORE_ROWS;
    return w->q + (h * tiles + m / SCORE_ROWS) * w->steps * SCORE_ROWS + m % SCORE_ROWS;
}

// One query as cells; a cell's unused half is zero.
static void pack_query(const work *w, int64_t at, float *to) {
    const int size = w->shape->head_dim;
#ifdef PAIRS
    const bf16 *from = (const bf16 *)w->call->q + at;
    for (int d = 0; d < size; d += 2, to += SCORE_ROWS) {
        *to = 0.0f;
        memcpy(to, from + d, d + 2 <= size ? 4 : 2);
    }
#else
    for (int d = 0; d < size; d++, to += SCORE_ROWS)
        *to = w->shape->type == FT_BFLOAT16 ? bf16_to_float(((const bf16 *)w->call->q)[at + d])
                                            : ((const float *)w->call->q)[at + d];
#endif
}

static void pack_queries(const work *w) {
    const ft_attention_shape *shape = w->shape;
    for (int h = 0; h < w->heads; h++)
        for (int m = 0; m < w->rows; m++) {
            const int row = w->span->row + w->unit->first_row + m / w->group;
            const int head = m % w->group * shape->num_kv_heads + w->unit->first_head + h;
            pack_query(w, (int64_t)row * w->call->q_stride + (int64_t)head * shape->head_dim,
                       query_at(w, h, m));
        }
}

// ---- Arithmetic -------------------------------------------------------------------------

static inline vf multiply(vf sum, vf a, vf b) {
#ifdef PAIRS
    return _mm512_dpbf16_ps(sum, (__m512bh)b, (__m512bh)a);
#else
    return vf_fma(a, b, sum);
#endif
}

typedef struct {
    const float *a;     // cells [rows, steps] of weights, or [steps, SCORE_ROWS] of queries
    const float *b;     // cells [steps, n]
    float *c;           // [rows, n]
    const float *decay; // c = c * decay[row] + a b; NULL: all 1
    int64_t stride;     // of b and c
    int steps;
    fetcher *fetch;
} factors;

enum { SCORES, VALUES };

// Where a row and a step of `a` are: constants, so that no register holds them.
#define A_AT(kind, row, step) \
    ((kind) == SCORES ? (step) * SCORE_ROWS + (row) : (row) * VALUE_STEPS + (step))

ALWAYS void product_of(const factors *f, int column, const int kind, const int rows,
                       const int vecs) {
    vf sum[SCORE_ROWS][TILE_VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++)
            sum[r][v] = kind == SCORES ? vf_set1(0.0f)
                                       : vf_load(f->c + r * f->stride + column + v * W);
    if (kind == VALUES && f->decay)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vecs; v++)
                sum[r][v] = vf_mul(sum[r][v], vf_set1(f->decay[r]));
    const float *a = f->a, *b = f->b + column;
    fetcher next = *f->fetch;
    for (int s = f->steps; s > 0; s--, b += kind == SCORES ? BLOCK : f->stride) {
        if (s % 2) fetch(&next, next.per_steps);
        vf right[TILE_VECS];
        UNROLL for (int v = 0; v < vecs; v++) right[v] = vf_load(b + v * W);
        UNROLL for (int r = 0; r < rows; r++) {
            const vf left = vf_set1(a[A_AT(kind, r, 0)]);
            UNROLL for (int v = 0; v < vecs; v++) sum[r][v] = multiply(sum[r][v], left, right[v]);
        }
        a += A_AT(kind, 0, 1);
    }
    *f->fetch = next;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++)
            vf_store(f->c + (kind == SCORES ? r * BLOCK : r * f->stride) + column + v * W,
                     sum[r][v]);
}

ALWAYS void values_of_rows(const factors *f, int n, const int rows) {
    int column = 0;
    for (; column + TILE_VECS * W <= n; column += TILE_VECS * W)
        product_of(f, column, VALUES, rows, TILE_VECS);
#if TILE_VECS == 4
    switch ((n - column) / W) {
    case 3: product_of(f, column, VALUES, rows, 3); break;
    case 2: product_of(f, column, VALUES, rows, 2); break;
    case 1: product_of(f, column, VALUES, rows, 1); break;
    default: break;
    }
#else
    if (column < n) product_of(f, column, VALUES, rows, 1);
#endif
}

static void values_of(const factors *f, int n, int rows) {
#define CASE(rows) case rows: values_of_rows(f, n, rows); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if TILE_ROWS == 6
        CASE(5) CASE(6)
#endif
        default: break;
    }
#undef CASE
}

ALWAYS void scores_of_rows(const factors *f, const int rows) {
    const int vecs = BLOCK / W < TILE_VECS ? BLOCK / W : TILE_VECS;
    for (int column = 0; column < BLOCK; column += vecs * W)
        product_of(f, column, SCORES, rows, vecs);
}

// How many of `left` rows to take at once: what there is a copy of below.
static inline int rows_of_scores(int left) {
    if (SCORE_ROWS < 24) return least(SCORE_ROWS, left);
    return left >= 20 ? least(left & ~3, 24) : left >= 16 ? 16 : left >= 12 ? 12 : least(left, 8);
}

static void scores_of(const factors *f, int rows) {
#define CASE(rows) case rows: scores_of_rows(f, rows); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if SCORE_ROWS == 24
        CASE(5) CASE(6) CASE(7) CASE(8) CASE(12) CASE(16) CASE(20) CASE(24)
#endif
        default: break;
    }
#undef CASE
}

#ifdef PAIRS
// 2^x for x <= 100, for results that become bfloat16: within 1.1e-4 of its value, and at the least
// 2^-126. The whole part, moved to the lowest bits by adding 1.5 * 2^23, becomes the exponent.
ALWAYS vf exp2_of_weight(vf x) {
    const vf magic = vf_set1(12582912.0f);
    x = vf_max(vf_set1(-126.0f), x);
    const vf moved = vf_add(x, magic), f = vf_sub(x, vf_sub(moved, magic));
    vf p = vf_fma(vf_set1(0.05500869f), f, vf_set1(0.24221063f));
    p = vf_fma(p, f, vf_set1(0.69328292f));
    p = vf_fma(p, f, vf_set1(1.0f));
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(moved), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
}
#else
ALWAYS vf exp2_of_weight(vf x) { return vf_exp2(x); }
#endif

typedef vf row_scores[BLOCK / W];

// c * tanh(x / c), with x = raw * scale, in units of log2.
static inline vf capped(const ft_attention_shape *shape, vf raw) {
    // tanh(y) = 1 - 2 / (1 + e^2y)
    const float rate = shape->scale / shape->softcap * 2.0f * LOG2_E;
    const vf grown = vf_exp2(vf_min(vf_set1(120.0f), vf_mul(raw, vf_set1(rate))));
    const vf part = vf_div(vf_set1(2.0f), vf_add(vf_set1(1.0f), grown));
    return vf_mul(vf_sub(vf_set1(1.0f), part), vf_set1(shape->softcap * LOG2_E));
}

// Whether the softmax multiplies scores itself; otherwise `change_scores` has to.
static inline int scales_later(const ft_attention_shape *shape) {
    return shape->softcap <= 0.0f && shape->scale >= 0.0f;
}

static inline int sees_all(const work *w, int base, int high) {
    const int low = w->shape->window > 0 ? high - w->shape->window + 1 : 0;
    return base >= low && base + BLOCK - 1 <= high;
}

// Cap a row's scores, and make those of keys that it does not see -inf.
static void change_scores(const work *w, int base, int high, float *scores) {
    const ft_attention_shape *shape = w->shape;
    const int low = shape->window > 0 ? high - shape->window + 1 : 0;
    for (int v = 0; v < BLOCK / W; v++) {
        vf x = vf_load(scores + v * W);
        if (shape->softcap > 0.0f)
            x = capped(shape, x);
        else if (!scales_later(shape))
            x = vf_mul(x, vf_set1(shape->scale * LOG2_E));
        vf_store(scores + v * W, vf_within(x, base + v * W, low, high, vf_set1(-INFINITY)));
    }
}

// Weights, unseen keys' exactly zero, as cells, added to the row's sum.
ALWAYS void put_weights(const row_scores weight, float *weights, float *sum) {
#ifdef PAIRS
    // Sums take the rounded weights, so that rounding cancels where one key has most of the weight.
    const __m256bh cells = _mm512_cvtneps_pbh(weight[0]);
    const __m256bh ones = (__m256bh)_mm256_set1_epi16(0x3f80);
    _mm256_storeu_ps(sum, _mm256_dpbf16_ps(_mm256_loadu_ps(sum), cells, ones));
    _mm256_storeu_si256((__m256i *)weights, (__m256i)cells);
#else
    vf total = vf_load(sum);
    UNROLL for (int v = 0; v < BLOCK / W; v++) {
        total = vf_add(total, weight[v]);
        vf_store(weights + v * W, weight[v]);
    }
    vf_store(sum, total);
#endif
}

// A row's peak becomes its block's highest score. Returns what its sums so far are scaled by.
static float move_peak(vf rate, const float *scores, float *peak, float *sum) {
    vf best = vf_mul(vf_load(scores), rate);
    for (int v = 1; v < BLOCK / W; v++) best = vf_max(best, vf_mul(vf_load(scores + v * W), rate));
    float decay[W];
    const float after = vf_peak(best);
    vf_store(decay, vf_exp2(vf_set1(*peak - after)));
    *peak = after;
    vf_store(sum, vf_mul(vf_load(sum), vf_set1(decay[0])));
    return decay[0];
}

// Weights may grow to 2^8 before a row's peak moves, which scales what was summed: seldom.
#define ROOM 8.0f

ALWAYS void scores_less_peak(const float *scores, vf rate, float peak, row_scores x) {
    UNROLL for (int v = 0; v < BLOCK / W; v++)
        x[v] = vf_fms(vf_load(scores + v * W), rate, vf_set1(peak));
}

// Softmax of a tile: from scores to weights. Returns whether any row's sums are to be scaled.
static int soften(const work *w, int base, int64_t at, int m, int rows, float *decay) {
    const int later = scales_later(w->shape);
    const vf rate = vf_set1(later ? w->shape->scale * LOG2_E : 1.0f);
    int moved = 0;
    for (int r = 0; r < rows; r++) {
        float *scores = w->scores + r * BLOCK, *peak = w->peak + at + r;
        float *sum = w->sum + (at + r) * W;
        const int all = sees_all(w, base, w->highs[m + r]);
        if (!all || !later) change_scores(w, base, w->highs[m + r], scores);
        row_scores x;
        scores_less_peak(scores, rate, *peak, x);
        vf best = x[0];
        UNROLL for (int v = 1; v < BLOCK / W; v++) best = vf_max(best, x[v]);
        decay[r] = 1.0f;
        if (vf_any_above(best, ROOM)) {
            decay[r] = move_peak(rate, scores, peak, sum);
            moved = 1;
            scores_less_peak(scores, rate, *peak, x);
        }
        row_scores weight;
        UNROLL for (int v = 0; v < BLOCK / W; v++) weight[v] = exp2_of_weight(x[v]);
        if (!all)
            UNROLL for (int v = 0; v < BLOCK / W; v++) weight[v] = vf_where_finite(x[v], weight[v]);
        put_weights(weight, w->weights + r * VALUE_STEPS, sum);
    }
    return moved;
}

// One block of packed keys and values for rows [m, end) of the unit's head h.
static void attend_rows(work *w, int base, int h, int m, int end) {
    const int window = w->shape->window;
    for (int rows; m < end; m += rows) {
        rows = rows_of_scores(least(end, (m / SCORE_ROWS + 1) * SCORE_ROWS) - m);
        int high = 0, low = INT32_MAX;
        for (int r = 0; r < rows; r++) {
            high = most(high, w->highs[m + r]);
            low = least(low, w->highs[m + r]);
        }
        if (high < base || (window > 0 && low - window + 1 > base + BLOCK - 1)) continue;
        const int64_t at = (int64_t)h * w->rows + m;
        const factors scores = {.a = query_at(w, h, m), .b = w->keys, .c = w->scores,
                                .steps = w->steps, .fetch = &w->fetch};
        scores_of(&scores, rows);
        float decay[SCORE_ROWS];
        const int moved = soften(w, base, at, m, rows, decay);
        factors values = {.b = w->values, .stride = w->width, .fetch = &w->fetch,
                          .steps = (w->num_keys + PER_CELL - 1) / PER_CELL};
        for (int r = 0; r < rows; r += TILE_ROWS) {
            values.a = w->weights + r * VALUE_STEPS;
            values.c = w->acc + (at + r) * w->width;
            values.decay = moved ? decay + r : NULL;
            values_of(&values, w->width, least(TILE_ROWS, rows - r));
        }
    }
}

// ---- Sections ---------------------------------------------------------------------------

static void clear(const work *w, float *peak, float *sum, float *acc, int lanes) {
    const size_t all = (size_t)w->rows * (size_t)w->heads;
    for (size_t i = 0; i < all; i++) peak[i] = -FLT_MAX;
    memset(sum, 0, all * (size_t)lanes * sizeof(float));
    memset(acc, 0, all * (size_t)w->width * sizeof(float));
}

typedef struct {
    float *peak, *sum, *acc; // of one row
} row_state;

// `into` becomes what both saw. Into an empty state this is an exact copy.
static void merge(row_state into, float peak, float sum, const float *acc, int width) {
    const float best = peak > *into.peak ? peak : *into.peak;
    float ratio[W] = {*into.peak - best, peak - best};
    vf_store(ratio, vf_exp2(vf_load(ratio)));
    const vf old = vf_set1(ratio[0]), new = vf_set1(ratio[1]);
    float sums[W];
    vf_store(sums, vf_fma(vf_set1(*into.sum), old, vf_mul(vf_set1(sum), new)));
    *into.peak = best;
    *into.sum = sums[0];
    for (int d = 0; d < width; d += W) {
        const vf added = vf_mul(vf_load(acc + d), new);
        vf_store(into.acc + d, vf_fma(vf_load(into.acc + d), old, added));
    }
}

static void end_section(const work *w) {
    for (int64_t at = 0; at < (int64_t)w->rows * w->heads; at++) {
        const row_state into = {w->all_peak + at, w->all_sum + at, w->all_acc + at * w->width};
        const float sum = vf_sum(vf_load(w->sum + at * W));
        merge(into, w->peak[at], sum, w->acc + at * w->width, w->width);
    }
}

static void write_row(const work *w, int64_t at, const float *acc, float sum) {
    const ft_attention_shape *shape = w->shape;
    const int m = (int)(at % w->rows), h = (int)(at / w->rows), size = shape->head_dim;
    const int row = w->span->row + w->unit->first_row + m / w->group;
    const int head = m % w->group * shape->num_kv_heads + w->unit->first_head + h;
    const int64_t to = (int64_t)row * w->call->out_stride + (int64_t)head * size;
    for (int d = 0; d < size; d += W) {
        const vf x = vf_div(vf_load(acc + d), vf_set1(sum));
        if (shape->type == FT_BFLOAT16)
            vf_store_bf16_n((bf16 *)w->call->out + to + d, x, size - d);
        else
            vf_store_n((float *)w->call->out + to + d, x, size - d);
    }
}

// ---- Units ------------------------------------------------------------------------------

// Share the fetching of `count` slots among the work on a block of `rows` rows a head.
static void plan_fetching(work *w, int count, int rows) {
    const int64_t keys = w->heads * w->head_bytes, all = w->shape->num_kv_heads * w->head_bytes;
    const int apart = keys < all;
    const int scores = (rows + SCORE_ROWS - 1) / SCORE_ROWS;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    w->fetch = (fetcher){.slots = w->next, .count = count,
                         .keys = w->unit->first_head * w->head_bytes,
                         .values = apart ? all + w->unit->first_head * w->head_bytes : 0,
                         .bytes = apart ? keys : 2 * keys};
    // Lines of a head, shared as the time is: packing takes about as long as two rows.
    const int64_t lines = count * (2 * w->head_bytes + 63) / 64;
    const int64_t packing = lines * 2 / (2 + rows) / 2;
    const int64_t steps = scores * w->steps + tiles * VALUE_STEPS;
    const int blocks = BLOCK / 16 * ((w->steps + 15) / 16);
    w->fetch.per_keys = (int)((packing + blocks - 1) / blocks);
    w->fetch.per_values = (int)((packing + VALUE_STEPS - 1) / VALUE_STEPS);
    w->fetch.per_steps = (int)((2 * (lines - 2 * packing) + steps - 1) / steps);
}

// The block of keys at `base` for tokens [first, end_row), all heads; keys end at `end`, and the
// first `num_next` of w->next are read after them.
static void run_block(work *w, int base, int end, int first, int end_row, int num_next) {
    w->num_keys = least(BLOCK, end - base);
    find_slots(w, base, w->num_keys, first, w->slots);
    const int from = (first - w->unit->first_row) * w->group;
    const int to = (end_row - w->unit->first_row) * w->group;
    plan_fetching(w, num_next, to - from);
    for (int h = 0; h < w->heads; h++) {
        const int head = w->unit->first_head + h;
        pack_keys(w, head);
        pack_values(w, w->shape->num_kv_heads + head);
        attend_rows(w, base, h, from, to);
    }
}

// What follows the block at `base` of a unit whose keys end at `end`: its next block, or the first
// of the unit that this thread will most likely be given next.
static int find_next(work *w, int base, int end, const ft_attention_unit *next) {
    places there = {w->call, w->span, w->slot_bytes};
    int first = base + BLOCK;
    if (first >= end) {
        if (!next) return 0;
        there.span = w->call->spans + next->span;
        const int low = there.span->start + next->first_row - w->shape->window + 1;
        first = w->shape->window > 0 ? most(0, low / BLOCK * BLOCK) : 0;
        end = there.span->start + next->end_row;
    }
    // A tree's drafts lie where a chain's would, in another order.
    const int count = most(0, least(BLOCK, end - first));
    find_chain(&there, first, count, w->next);
    return count;
}

static void run_section(work *w, int section, int low, int end, const ft_attention_unit *next) {
    const ft_attention_unit *unit = w->unit;
    clear(w, w->peak, w->sum, w->acc, W);
    const int stop = least(end, (section + 1) * SECTION);
    for (int base = most(section * SECTION, low / BLOCK * BLOCK); base < stop; base += BLOCK) {
        if (w->span->paths < 0 || base + BLOCK <= w->span->start) {
            const int num_next = find_next(w, base, end, next);
            run_block(w, base, end, unit->first_row, unit->end_row, num_next);
            continue;
        }
        for (int row = unit->first_row; row < unit->end_row; row++)
            if (position(w, row) >= base)
                run_block(w, base, position(w, row) + 1, row, row + 1, 0);
    }
}

static void run_unit(const ft_attention_call *call, const ft_attention_unit *unit,
                     const ft_attention_unit *next, float *scratch) {
    const ft_attention_shape *shape = call->shape;
    work w = {.call = call, .shape = shape, .span = call->spans + unit->span, .unit = unit};
    w.group = shape->num_heads / shape->num_kv_heads;
    w.rows = (unit->end_row - unit->first_row) * w.group;
    w.heads = unit->end_head - unit->first_head;
    w.steps = (shape->head_dim + PER_CELL - 1) / PER_CELL;
    w.width = round_up(shape->head_dim, W);
    const int rounded = shape->kv_type == FT_INT8;
    const int64_t item = rounded ? 1 : shape->type == FT_BFLOAT16 ? 2 : 4;
    w.slot_bytes = call->kv_stride * item;
    w.head_bytes = shape->head_dim * item + (rounded ? FT_SCALE_BYTES : 0);
    lay_out(&w, scratch);
    pack_queries(&w);
    for (int m = 0; m < w.rows; m++) w.highs[m] = position(&w, unit->first_row + m / w.group);
    int low = INT32_MAX, end = 0;
    for (int row = unit->first_row; row < unit->end_row; row++) {
        low = least(low, position(&w, row));
        end = most(end, position(&w, row) + 1);
    }
    low = shape->window > 0 ? most(0, low - shape->window + 1) : 0;
    clear(&w, w.all_peak, w.all_sum, w.all_acc, 1);
    for (int s = low / SECTION; s * SECTION < end; s++) {
        run_section(&w, s, low, end, next);
        end_section(&w);
    }
    for (int64_t at = 0; at < (int64_t)w.rows * w.heads; at++)
        write_row(&w, at, w.all_acc + at * w.width, w.all_sum[at]);
}

const ft_attention_kernel NAME = {1, scratch_floats, run_unit};
