// The attention kernel, written once over vec.h; see attention.h for what it computes.
//
// A file that includes this one has defined NAME, its ft_attention_kernel, and, for processors
// that multiply bfloat16, PAIRS: then keys, queries, weights and values are handled as pairs of
// bfloat16 in 32-bit cells. Otherwise a cell is one float.
//
// Per block of 64 keys and key head: K is transposed and V copied into cells that lie as the
// multiplication reads them, then tiles of up to TILE_ROWS query rows go through scores, softmax
// and values. Scores and values are the same little matrix product (`product`).
#include "attention.h"

#include <float.h>
#include <math.h>

#include "vec.h"

#define BLOCK 64
#define SECTION 512
#define LOG2_E 1.4426950408889634f
#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if W == 16
#define TILE_ROWS 6
#define TILE_VECS 4
#else
#define TILE_ROWS 4
#define TILE_VECS 2
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

// The keys and values of the next head, or of the next block's first, to be brought nearer a line at
// a time among other work: processors drop or wait for what they cannot queue.
typedef struct {
    const char *const *slots;
    int64_t keys, values;  // where the head's are in a slot
    int count, lines;      // slots; lines of 64 bytes of a key
    int slot, line;        // the next to be fetched; values follow keys
} fetcher;

// Inlined always: GCC takes a function that only prefetches for one without effect.
ALWAYS void fetch(fetcher *f, const int lines) {
    UNROLL for (int i = 0; i < lines; i++) {
        if (f->slot >= f->count) return;
        const int64_t at = f->line < f->lines ? f->keys : f->values - 64 * (int64_t)f->lines;
        __builtin_prefetch(f->slots[f->slot] + at + 64 * (int64_t)f->line, 0, 2);
        if (++f->line == 2 * f->lines) {
            f->line = 0;
            f->slot++;
        }
    }
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
    float *q;               // cells [heads, rows, steps]
    float *peak, *sum;      // the section's largest score; its sum of weights, in W lanes
    float *acc;             // [heads, rows, width]: the section's weighted values
    float *all_peak, *all_sum, *all_acc; // the same of the sections merged so far
    float *keys;            // cells [steps, BLOCK]
    float *values;          // cells [VALUE_STEPS, width]
    float *scores;          // [TILE_ROWS, BLOCK]
    float *weights;         // cells [TILE_ROWS, VALUE_STEPS]
    int64_t slot_bytes, head_bytes;
    const char *slots[BLOCK]; // where the block's keys are stored: their slots
    int num_keys;             // of the block; beyond it cells are zero
    const char *next[BLOCK];  // the slots of the block after it
    int num_next;
    fetcher fetch;
} work;

static size_t scratch_floats(const ft_attention_shape *shape, int num_rows, int heads) {
    const size_t group = (size_t)(shape->num_heads / shape->num_kv_heads);
    const size_t rows = group * (size_t)num_rows * (size_t)heads;
    const size_t width = (size_t)round_up(shape->head_dim, W);
    const size_t steps = (size_t)round_up(shape->head_dim, PER_CELL) / PER_CELL;
    return rows * (steps + 2 * width + W + 3) + steps * BLOCK + VALUE_STEPS * width +
           TILE_ROWS * (BLOCK + VALUE_STEPS) + 16 * 16;
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
    w->scores = carve(&scratch, TILE_ROWS * BLOCK);
    w->weights = carve(&scratch, TILE_ROWS * VALUE_STEPS);
    w->q = carve(&scratch, all * (size_t)w->steps);
    w->acc = carve(&scratch, all * (size_t)w->width);
    w->all_acc = carve(&scratch, all * (size_t)w->width);
    w->sum = carve(&scratch, all * W);
    w->peak = carve(&scratch, all);
    w->all_peak = carve(&scratch, all);
    w->all_sum = carve(&scratch, all);
}

// ---- Positions --------------------------------------------------------------------------

static inline const int32_t *path_of(const work *w, int row) {
    return w->call->paths + w->span->paths + (int64_t)row * (w->span->known + w->span->num_rows + 1);
}

static inline int position(const work *w, int row) {
    return w->span->start + (w->span->paths < 0 ? row : path_of(w, row)[0]);
}

static inline const char *slot_at(const work *w, int place) {
    const int size = w->shape->page_size;
    const int64_t page = w->call->pages[w->span->pages + place / size];
    return (const char *)w->call->kv + (page * size + place % size) * w->slot_bytes;
}

// Slots of keys [base, base + num_keys); those of `row`'s ancestors where it has a path.
static void find_slots(const work *w, int base, int num_keys, int row,
                       const char **slots) {
    const int size = w->shape->page_size, start = w->span->start;
    const int chain = w->span->paths < 0 ? num_keys : most(0, least(num_keys, start - base));
    for (int i = 0; i < chain;) {
        const int run = least(chain - i, size - (base + i) % size);
        const char *slot = slot_at(w, base + i);
        for (int j = 0; j < run; j++) slots[i + j] = slot + j * w->slot_bytes;
        i += run;
    }
    for (int i = chain; i < num_keys; i++)
        slots[i] = slot_at(w, start + path_of(w, row)[1 + base + i - start]);
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

// 16 cells of 16 keys, beginning at a cell and a key.
ALWAYS void load_cells(const work *w, int head, int cell, int key, __m512i r[16]) {
    const int64_t at = head * w->head_bytes + 4 * cell;
    const int count = w->shape->head_dim - 2 * cell;
    if (key + 16 <= w->num_keys && count >= 32)
        UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(w->slots[key + i] + at);
    else
        UNROLL for (int i = 0; i < 16; i++)
            r[i] = key + i < w->num_keys ? pairs(w->slots[key + i] + at, count)
                                         : _mm512_setzero_si512();
}

static void pack_values(work *w, int head) {
    const int size = w->shape->head_dim, width = w->width, num_keys = w->num_keys;
    const int64_t head_at = head * w->head_bytes;
    fetcher next = w->fetch;
    const char *const *slots = w->slots;
    const __m512i low = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004,
                                          0x250005, 0x260006, 0x270007, 0x280008, 0x290009,
                                          0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e,
                                          0x2f000f);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    float *to = w->values;
    for (int key = 0; key < BLOCK; key += 2, to += width)
        for (int d = 0; d < size; d += 32) {
            const int64_t at = head_at + 2 * d;
            __m512i a = _mm512_setzero_si512(), b = a;
            fetch(&next, 1);
            if (key < num_keys) a = pairs(slots[key] + at, size - d);
            if (key + 1 < num_keys) b = pairs(slots[key + 1] + at, size - d);
            _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, low, b));
            if (d + 16 < width)
                _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, high, b));
        }
    w->fetch = next;
}

#else

static inline vf load_some(const work *w, const char *row, int first, int count) {
    if (w->shape->type == FT_BFLOAT16) {
        const bf16 *at = (const bf16 *)row + first;
        return count >= W ? vf_load_bf16(at) : vf_load_bf16_n(at, count);
    }
    const float *at = (const float *)row + first;
    return count >= W ? vf_load(at) : vf_load_n(at, count);
}

static void pack_values(work *w, int head) {
    for (int j = 0; j < BLOCK; j++) {
        float *to = w->values + (int64_t)j * w->width;
        for (int d = 0; d < w->width; d += W) {
            vf x = vf_set1(0.0f);
            if (j < w->num_keys)
                x = load_some(w, w->slots[j] + head * w->head_bytes, d, w->shape->head_dim - d);
            fetch(&w->fetch, 1);
            vf_store(to + d, x);
        }
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
            fetch(&w->fetch, 8);
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
            fetch(&w->fetch, 1);
            for (int i = 0; i < count; i++) w->keys[(int64_t)(d + i) * BLOCK + key] = row[i];
        }
    }
#endif
}

// The unit's queries as cells; a cell's unused half is zero.
static void pack_queries(const work *w) {
    const ft_attention_shape *shape = w->shape;
    const int kv = shape->num_kv_heads, size = shape->head_dim;
    for (int h = 0; h < w->heads; h++)
        for (int m = 0; m < w->rows; m++) {
            const int row = w->span->row + w->unit->first_row + m / w->group;
            const int head = m % w->group * kv + w->unit->first_head + h;
            const int64_t at = (int64_t)row * w->call->q_stride + (int64_t)head * size;
            float *to = w->q + ((int64_t)h * w->rows + m) * w->steps;
#ifdef PAIRS
            to[w->steps - 1] = 0.0f;
            memcpy(to, (const bf16 *)w->call->q + at, (size_t)size * sizeof(bf16));
#else
            if (shape->type == FT_BFLOAT16)
                for (int d = 0; d < size; d++)
                    to[d] = bf16_to_float(((const bf16 *)w->call->q)[at + d]);
            else
                memcpy(to, (const float *)w->call->q + at, (size_t)size * sizeof(float));
#endif
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
    const float *a, *b; // cells [rows, steps] and [steps, n]
    float *c;           // [rows, n]
    const float *decay; // c = c * decay[row] + a b; NULL: c = a b
    int64_t a_stride, b_stride, c_stride;
    int steps;
    fetcher *fetch;
} factors;

ALWAYS void product_of(const factors *f, int column, const int rows, const int vecs) {
    vf sum[TILE_ROWS][TILE_VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            sum[r][v] = f->decay ? vf_mul(vf_load(f->c + r * f->c_stride + column + v * W),
                                          vf_set1(f->decay[r]))
                                 : vf_set1(0.0f);
    const float *b = f->b + column;
    const float *a = f->a;
    fetcher next = *f->fetch;
    for (int s = 0; s < f->steps; s++, b += f->b_stride) {
        fetch(&next, 2);
        vf right[TILE_VECS];
        for (int v = 0; v < vecs; v++) right[v] = vf_load(b + v * W);
        for (int r = 0; r < rows; r++) {
            const vf left = vf_set1(a[r * f->a_stride + s]);
            for (int v = 0; v < vecs; v++) sum[r][v] = multiply(sum[r][v], left, right[v]);
        }
    }
    *f->fetch = next;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            vf_store(f->c + r * f->c_stride + column + v * W, sum[r][v]);
}

ALWAYS void product_rows(const factors *f, int n, const int rows) {
    int column = 0;
    for (; column + TILE_VECS * W <= n; column += TILE_VECS * W)
        product_of(f, column, rows, TILE_VECS);
#if TILE_VECS == 4
    switch ((n - column) / W) {
    case 3: product_of(f, column, rows, 3); break;
    case 2: product_of(f, column, rows, 2); break;
    case 1: product_of(f, column, rows, 1); break;
    default: break;
    }
#else
    if (column < n) product_of(f, column, rows, 1);
#endif
}

static void product(const factors *f, int n, int rows) {
    switch (rows) {
    case 1: product_rows(f, n, 1); break;
    case 2: product_rows(f, n, 2); break;
    case 3: product_rows(f, n, 3); break;
    case 4: product_rows(f, n, 4); break;
#if TILE_ROWS == 6
    case 5: product_rows(f, n, 5); break;
    case 6: product_rows(f, n, 6); break;
#endif
    default: break;
    }
}

// Scores in units of log2: scaled, capped, and -inf where the row does not see the key.
static inline vf finish_scores(const work *w, vf x, int base, int low, int high) {
    const float cap = w->shape->softcap;
    if (cap > 0.0f) {
        // tanh(y) = 1 - 2 / (1 + e^2y)
        const float rate = w->shape->scale / cap * 2.0f * LOG2_E;
        const vf grown = vf_exp2(vf_min(vf_set1(120.0f), vf_mul(x, vf_set1(rate))));
        const vf part = vf_div(vf_set1(2.0f), vf_add(vf_set1(1.0f), grown));
        x = vf_mul(vf_sub(vf_set1(1.0f), part), vf_set1(cap * LOG2_E));
    } else {
        x = vf_mul(x, vf_set1(w->shape->scale * LOG2_E));
    }
    if (base >= low && base + W - 1 <= high) return x;
    return vf_within(x, base, low, high, vf_set1(-INFINITY));
}

// Weights 2^(score - peak) as cells, added to the row's sum.
static inline void weigh(const vf x[BLOCK / W], vf peak, vf decay, float *weights, float *sum) {
    vf total = vf_mul(vf_load(sum), decay);
#ifdef PAIRS
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int v = 0; v < BLOCK / W; v += 2) {
        const vf even = vf_exp2(vf_sub(x[v], peak)), odd = vf_exp2(vf_sub(x[v + 1], peak));
        const __m512bh cells = _mm512_cvtne2ps_pbh(odd, even);
        total = _mm512_dpbf16_ps(total, cells, ones);
        _mm512_storeu_si512(weights + v * W / 2, (__m512i)cells);
    }
#else
    for (int v = 0; v < BLOCK / W; v++) {
        const vf weight = vf_exp2(vf_sub(x[v], peak));
        total = vf_add(total, weight);
        vf_store(weights + v * W, weight);
    }
#endif
    vf_store(sum, total);
}

// Softmax of a tile's scores: weights, and by how much what was summed so far decays.
static void soften(const work *w, int base, int64_t at, int rows, float decay[W]) {
    const int first = w->unit->first_row, window = w->shape->window;
    const int64_t m = at % w->rows;
    vf x[TILE_ROWS][BLOCK / W];
    float before[W] = {0}, after[W] = {0};
    for (int r = 0; r < rows; r++) {
        const int high = position(w, first + (int)(m + r) / w->group);
        const int low = window > 0 ? high - window + 1 : 0;
        vf best = vf_set1(-INFINITY);
        for (int v = 0; v < BLOCK / W; v++) {
            const vf raw = vf_load(w->scores + r * BLOCK + v * W);
            x[r][v] = finish_scores(w, raw, base + v * W, low, high);
            best = vf_max(best, x[r][v]);
        }
        const float best_score = vf_peak(best);
        before[r] = w->peak[at + r];
        after[r] = best_score > before[r] ? best_score : before[r];
        w->peak[at + r] = after[r];
    }
    for (int i = 0; i < TILE_ROWS; i += W)
        vf_store(decay + i, vf_exp2(vf_sub(vf_load(before + i), vf_load(after + i))));
    for (int r = 0; r < rows; r++)
        weigh(x[r], vf_set1(after[r]), vf_set1(decay[r]), w->weights + r * VALUE_STEPS,
              w->sum + (at + r) * W);
}

// One block of packed keys and values for rows [m, end) of the unit's head h.
static void attend_rows(work *w, int base, int h, int m, int end) {
    float decay[TILE_ROWS > W ? TILE_ROWS : W];
    const int window = w->shape->window;
    for (int rows; m < end; m += rows) {
        rows = least(TILE_ROWS, end - m);
        int high = 0, low = INT32_MAX;
        for (int r = 0; r < rows; r++) {
            const int at = position(w, w->unit->first_row + (m + r) / w->group);
            high = most(high, at);
            low = least(low, at);
        }
        if (high < base || (window > 0 && low - window + 1 > base + BLOCK - 1)) continue;
        const int64_t at = (int64_t)h * w->rows + m;
        const factors scores = {.a = w->q + at * w->steps, .b = w->keys, .c = w->scores,
                                .a_stride = w->steps, .b_stride = BLOCK, .c_stride = BLOCK,
                                .steps = w->steps, .fetch = &w->fetch};
        product(&scores, BLOCK, rows);
        soften(w, base, at, rows, decay);
        const factors values = {.a = w->weights, .b = w->values, .c = w->acc + at * w->width,
                                .decay = decay, .a_stride = VALUE_STEPS,
                                .b_stride = w->width, .c_stride = w->width,
                                .steps = (w->num_keys + PER_CELL - 1) / PER_CELL,
                                .fetch = &w->fetch};
        product(&values, w->width, rows);
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

// The block of keys at `base` for tokens [first, end_row), all heads; keys end at `end`.
static void run_block(work *w, int base, int end, int first, int end_row) {
    w->num_keys = least(BLOCK, end - base);
    find_slots(w, base, w->num_keys, first, w->slots);
    w->num_next = most(0, least(BLOCK, end - base - BLOCK));
    find_slots(w, base + BLOCK, w->num_next, first, w->next);
    const int from = (first - w->unit->first_row) * w->group;
    const int to = (end_row - w->unit->first_row) * w->group;
    for (int h = 0; h < w->heads; h++) {
        const int head = w->unit->first_head + h;
        const int last = h == w->heads - 1;
        const int64_t ahead = last ? w->unit->first_head : head + 1;
        w->fetch = (fetcher){.slots = last ? w->next : w->slots,
                             .keys = ahead * w->head_bytes,
                             .values = (w->shape->num_kv_heads + ahead) * w->head_bytes,
                             .count = last ? w->num_next : w->num_keys,
                             .lines = (int)((w->head_bytes + 63) / 64)};
        pack_keys(w, head);
        pack_values(w, w->shape->num_kv_heads + head);
        attend_rows(w, base, h, from, to);
    }
}

static void run_section(work *w, int section, int low, int end) {
    const ft_attention_unit *unit = w->unit;
    clear(w, w->peak, w->sum, w->acc, W);
    const int stop = least(end, (section + 1) * SECTION);
    for (int base = most(section * SECTION, low / BLOCK * BLOCK); base < stop; base += BLOCK) {
        if (w->span->paths < 0 || base + BLOCK <= w->span->start) {
            run_block(w, base, end, unit->first_row, unit->end_row);
            continue;
        }
        for (int row = unit->first_row; row < unit->end_row; row++)
            if (position(w, row) >= base)
                run_block(w, base, position(w, row) + 1, row, row + 1);
    }
}

static void run_unit(const ft_attention_call *call, const ft_attention_unit *unit,
                     float *scratch) {
    const ft_attention_shape *shape = call->shape;
    work w = {.call = call, .shape = shape, .span = call->spans + unit->span, .unit = unit};
    w.group = shape->num_heads / shape->num_kv_heads;
    w.rows = (unit->end_row - unit->first_row) * w.group;
    w.heads = unit->end_head - unit->first_head;
    w.steps = (shape->head_dim + PER_CELL - 1) / PER_CELL;
    w.width = round_up(shape->head_dim, W);
    const int64_t item = shape->type == FT_BFLOAT16 ? 2 : 4;
    w.slot_bytes = call->kv_stride * item;
    w.head_bytes = shape->head_dim * item;
    lay_out(&w, scratch);
    pack_queries(&w);
    int low = INT32_MAX, end = 0;
    for (int row = unit->first_row; row < unit->end_row; row++) {
        low = least(low, position(&w, row));
        end = most(end, position(&w, row) + 1);
    }
    low = shape->window > 0 ? most(0, low - shape->window + 1) : 0;
    clear(&w, w.all_peak, w.all_sum, w.all_acc, 1);
    for (int s = low / SECTION; s * SECTION < end; s++) {
        run_section(&w, s, low, end);
        end_section(&w);
    }
    for (int64_t at = 0; at < (int64_t)w.rows * w.heads; at++)
        write_row(&w, at, w.all_acc + at * w.width, w.all_sum[at]);
}

const ft_attention_kernel NAME = {1, scratch_floats, run_unit};
