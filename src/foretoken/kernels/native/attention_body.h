// The attention kernel, written once over vec.h; see attention.h for what it computes.
//
// A file that includes this one has defined NAME, its ft_attention_kernel, and, for processors
// that multiply bfloat16, PAIRS: then keys, queries, weights and values are handled as pairs of
// bfloat16 in 32-bit cells. Otherwise a cell is one float. It may define STRIP, a multiple of BLOCK: the
// keys that are packed and multiplied together. A block is best for few rows, which wait for memory:
// what was fetched is still in the L1 cache. Many rows want sums and queries loaded less often.
//
// Per strip of keys and key head: K is transposed and V copied into cells that lie as the
// multiplication reads them, then tiles of up to SCORE_ROWS query rows go through scores, softmax
// (in blocks of 16 keys) and values. Scores and values are the same little matrix product
// (`product_of`). A strip of all heads of the unit, 32 KB or more, is fetched in the order of memory
// while the one before is computed.
#include "attention.h"

#include <float.h>
#include <math.h>

#include "vec.h"

#define BLOCK 16
#ifndef STRIP
#define STRIP BLOCK
#endif
#define STRIP_BLOCKS (STRIP / BLOCK)
#define SECTION 512
#define LOG2_E 1.4426950408889634f
#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if W == 16 || defined(NEON)
#define TILE_ROWS 6
#define TILE_VECS 4
#define SCORE_ROWS 24
#elif W == 8
// Sixteen registers: twelve sums.
#define TILE_ROWS 6
#define TILE_VECS 2
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
#define BLOCK_STEPS (BLOCK / PER_CELL)
#define VALUE_STEPS (STRIP / PER_CELL)

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }
static inline int round_up(int number, int multiple) {
    return (number + multiple - 1) / multiple * multiple;
}

// Keys and values to be brought nearer a few lines at a time among other work: processors drop, or
// wait for, what they cannot queue. They are those of the next strip, all heads of the unit, slot
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
    float *keys;            // cells [steps, STRIP]
    float *values;          // cells [VALUE_STEPS, width]
    float *scores;          // [SCORE_ROWS, STRIP]
    float *weights;         // cells [SCORE_ROWS, VALUE_STEPS]
    int32_t *lows, *highs;  // [rows] positions of the first and the last key that each row sees
    int64_t slot_bytes, head_bytes;
    const char *slots[STRIP]; // where the strip's keys are stored: their slots
    int num_keys, end_key;    // of the strip; cells from one to the other, a whole block's, are zero
    const char *next[STRIP];  // the slots of what will be read after it
    fetcher fetch;
} work;

static size_t scratch_floats(const ft_attention_shape *shape, int num_rows, int heads) {
    const size_t group = (size_t)(shape->num_heads / shape->num_kv_heads);
    const size_t rows = group * (size_t)num_rows * (size_t)heads;
    const size_t width = (size_t)round_up(shape->head_dim, W);
    const size_t steps = (size_t)round_up(shape->head_dim, PER_CELL) / PER_CELL;
    const size_t queries = (size_t)(heads * round_up((int)group * num_rows, TILE_ROWS)) * steps;
    return queries + rows * (2 * width + W + 5) + steps * STRIP + VALUE_STEPS * width +
           SCORE_ROWS * (STRIP + VALUE_STEPS) + 16 * 16;
}

static float *carve(float **at, size_t count) {
    float *start = *at;
    *at += (count + 15) / 16 * 16;
    return start;
}

static void lay_out(work *w, float *scratch) {
    const size_t all = (size_t)w->rows * (size_t)w->heads;
    w->keys = carve(&scratch, (size_t)(w->steps * STRIP));
    w->values = carve(&scratch, (size_t)(VALUE_STEPS * w->width));
    w->scores = carve(&scratch, SCORE_ROWS * STRIP);
    w->weights = carve(&scratch, SCORE_ROWS * VALUE_STEPS);
    w->q = carve(&scratch, (size_t)(w->heads * round_up(w->rows, TILE_ROWS) * w->steps));
    w->acc = carve(&scratch, all * (size_t)w->width);
    w->all_acc = carve(&scratch, all * (size_t)w->width);
    w->sum = carve(&scratch, all * W);
    w->peak = carve(&scratch, all);
    w->all_peak = carve(&scratch, all);
    w->all_sum = carve(&scratch, all);
    w->lows = (int32_t *)carve(&scratch, (size_t)w->rows);
    w->highs = (int32_t *)carve(&scratch, (size_t)w->rows);
}

#include "attention_cells.h"
#include "attention_math.h"

// ---- Sections ---------------------------------------------------------------------------

static void clear(const work *w, float *peak, float *sum, float *acc, int lanes) {
    const size_t all = (size_t)w->rows * (size_t)w->heads;
    // Not minus infinity: the difference of two of those is no number.
    for (size_t i = 0; i < all; i++) peak[i] = -FLT_MAX;
    memset(sum, 0, all * (size_t)lanes * sizeof(float));
    memset(acc, 0, all * (size_t)w->width * sizeof(float));
}

// What all sections saw becomes what both saw: of up to W rows from `at` on, a lane each. Into an empty
// state this is an exact copy.
static void merge_rows(const work *w, int64_t at, int count) {
    float sums[W] = {0}, olds[W], news[W];
    for (int i = 0; i < count; i++) sums[i] = vf_sum(vf_load(w->sum + (at + i) * W));
    const vf before = vf_load_n(w->all_peak + at, count), peak = vf_load_n(w->peak + at, count);
    const vf best = vf_max(before, peak), all_sum = vf_load_n(w->all_sum + at, count);
    const vf old = vf_exp2(vf_sub(before, best)), new = vf_exp2(vf_sub(peak, best));
    vf_store_n(w->all_peak + at, best, count);
    vf_store_n(w->all_sum + at, vf_fma(all_sum, old, vf_mul(vf_load(sums), new)), count);
    vf_store(olds, old);
    vf_store(news, new);
    for (int i = 0; i < count; i++) {
        float *into = w->all_acc + (at + i) * w->width;
        const float *acc = w->acc + (at + i) * w->width;
        for (int d = 0; d < w->width; d += W) {
            const vf added = vf_mul(vf_load(acc + d), vf_set1(news[i]));
            vf_store(into + d, vf_fma(vf_load(into + d), vf_set1(olds[i]), added));
        }
    }
}

static void end_section(const work *w) {
    const int64_t all = (int64_t)w->rows * w->heads;
    for (int64_t at = 0; at < all; at += W) merge_rows(w, at, all - at < W ? (int)(all - at) : W);
}

// One more section, of a score without a value: of up to W rows from `at` on, a lane each.
static void merge_sinks(const work *w, int64_t at, int count) {
    float sinks[W] = {0}, olds[W];
    for (int i = 0; i < count; i++) {
        const int m = (int)((at + i) % w->rows), h = (int)((at + i) / w->rows);
        sinks[i] = w->call->sinks[m % w->group * w->shape->num_kv_heads + w->unit->first_head + h];
    }
    const vf sink = vf_mul(vf_load(sinks), vf_set1(LOG2_E)), before = vf_load_n(w->all_peak + at, count);
    const vf best = vf_max(before, sink), all_sum = vf_load_n(w->all_sum + at, count);
    const vf old = vf_exp2(vf_sub(before, best)), new = vf_exp2(vf_sub(sink, best));
    vf_store_n(w->all_sum + at, vf_fma(all_sum, old, new), count);
    vf_store(olds, old);
    for (int i = 0; i < count; i++) {
        float *acc = w->all_acc + (at + i) * w->width;
        for (int d = 0; d < w->width; d += W)
            vf_store(acc + d, vf_mul(vf_load(acc + d), vf_set1(olds[i])));
    }
}

static void write_row(const work *w, int64_t at, const float *acc, float sum) {
    const ft_attention_shape *shape = w->shape;
    const int m = (int)(at % w->rows), h = (int)(at / w->rows), size = shape->head_dim;
    const int row = w->span->row + w->unit->first_row + m / w->group;
    const int head = m % w->group * shape->num_kv_heads + w->unit->first_head + h;
    const int64_t to = (int64_t)row * w->call->out_stride + (int64_t)head * size;
    // The weights were not divided by their sum when they were made: it was not known yet.
    for (int d = 0; d < size; d += W) {
        const vf x = vf_div(vf_load(acc + d), vf_set1(sum));
        if (shape->type == FT_BFLOAT16)
            vf_store_bf16_n((bf16 *)w->call->out + to + d, x, size - d);
        else
            vf_store_n((float *)w->call->out + to + d, x, size - d);
    }
}

// ---- Units ------------------------------------------------------------------------------

// Packing a strip takes about as long as so many rows' scores, softmax and values.
#define PACKING_ROWS 5

// Share the fetching of `count` slots among the work on a strip for `rows` rows a head.
static void plan_fetching(work *w, int count, int rows) {
    const int64_t keys = w->heads * w->head_bytes, all = w->shape->num_kv_heads * w->head_bytes;
    const int apart = keys < all, strip = w->end_key, at_once = TILE_VECS * W;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    w->fetch = (fetcher){.slots = w->next, .count = count,
                         .keys = w->unit->first_head * w->head_bytes,
                         .values = apart ? all + w->unit->first_head * w->head_bytes : 0,
                         .bytes = apart ? keys : 2 * keys};
    // Lines of a head, shared as the time is.
    const int64_t lines = count * (2 * w->head_bytes + 63) / 64;
    const int64_t packing = lines * PACKING_ROWS / (PACKING_ROWS + rows) / 2;
    const int64_t steps = tiles * (w->steps * ((strip + at_once - 1) / at_once) +
                                   strip / PER_CELL * ((w->width + at_once - 1) / at_once));
    const int squares = strip / 16 * ((w->steps + 15) / 16), pairs = strip / PER_CELL;
    w->fetch.per_keys = (int)((packing + squares - 1) / squares);
    w->fetch.per_values = (int)((packing + pairs - 1) / pairs);
    w->fetch.per_steps = (int)((2 * (lines - 2 * packing) + steps - 1) / steps);
}

// The keys at [base, stop), of one strip, for tokens [first, end_row), all heads; the first
// `num_next` of w->next are read after them.
static void run_strip(work *w, int base, int stop, int first, int end_row, int num_next) {
    w->num_keys = stop - base;
    w->end_key = round_up(w->num_keys, BLOCK);
    find_slots(w, base, w->num_keys, first, w->slots);
    const int from = (first - w->unit->first_row) * w->group;
    const int to = (end_row - w->unit->first_row) * w->group;
    plan_fetching(w, num_next, to - from);
    // Keys are packed head by head: a head's cells stay in the L1 cache while all its rows use them.
    for (int h = 0; h < w->heads; h++) {
        const int head = w->unit->first_head + h;
        pack_keys(w, head);
        pack_values(w, w->shape->num_kv_heads + head);
        attend_rows(w, base, h, from, to);
    }
}

// What is read after the keys before `first` of a unit whose keys end at `end`: its next strip, or
// the first of the unit that this thread will most likely be given next.
static int find_next(work *w, int first, int end, const ft_attention_unit *next) {
    places there = {w->call, w->span, w->slot_bytes};
    if (first >= end) {
        if (!next) return 0;
        there.span = w->call->spans + next->span;
        const int low = there.span->start + next->first_row - w->shape->window + 1;
        first = w->shape->window > 0 ? most(0, low / BLOCK * BLOCK) : 0;
        end = there.span->start +
              (there.span->paths == FT_TOGETHER ? there.span->num_rows : next->end_row);
    }
    // A tree's drafts lie where a chain's would, in another order.
    const int count = most(0, least(STRIP - first % STRIP, end - first));
    find_chain(&there, first, count, w->next);
    return count;
}

static void run_section(work *w, int section, int low, int end, const ft_attention_unit *next) {
    const ft_attention_unit *unit = w->unit;
    // Before the block in which a tree begins, all rows see the same keys. That block is each row's own,
    // with the end of the committed text in it: softmax goes by whole blocks.
    const int tree = w->span->paths < 0 ? INT32_MAX : w->span->start / BLOCK * BLOCK;
    const int last = least(end, (section + 1) * SECTION);
    clear(w, w->peak, w->sum, w->acc, W);
    // From a whole block on, below the window too: blocks begin at the same positions in every call, and
    // keys that a row does not see are exact zeros.
    for (int base = most(section * SECTION, low / BLOCK * BLOCK), stop; base < last; base = stop) {
        stop = least(last, (base / STRIP + 1) * STRIP);
        if (base < tree) {
            stop = least(stop, tree);
            const int num_next = find_next(w, stop, end, next);
            run_strip(w, base, stop, unit->first_row, unit->end_row, num_next);
            continue;
        }
        // From here on every row has its own path of keys.
        for (int row = unit->first_row; row < unit->end_row; row++)
            if (position(w, row) >= base)
                run_strip(w, base, least(stop, position(w, row) + 1), row, row + 1, 0);
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
    int low = INT32_MAX, end = 0;
    for (int m = 0; m < w.rows; m++) {
        const int row = unit->first_row + m / w.group;
        w.lows[m] = shape->window > 0 ? most(0, position(&w, row) - shape->window + 1) : 0;
        w.highs[m] = last_key(&w, row);
        low = least(low, w.lows[m]);
        end = most(end, w.highs[m] + 1);
    }
    clear(&w, w.all_peak, w.all_sum, w.all_acc, 1);
    // Each section from a fresh state, then merged: a section's sums do not depend on what was read before
    // it, so a row that begins at a window's edge and one that begins at 0 share their bits.
    for (int s = low / SECTION; s * SECTION < end; s++) {
        run_section(&w, s, low, end, next);
        end_section(&w);
    }
    const int64_t all = (int64_t)w.rows * w.heads;
    if (call->sinks)
        for (int64_t at = 0; at < all; at += W)
            merge_sinks(&w, at, all - at < W ? (int)(all - at) : W);
    for (int64_t at = 0; at < all; at++)
        write_row(&w, at, w.all_acc + at * w.width, w.all_sum[at]);
}

const ft_attention_kernel NAME = {1, scratch_floats, run_unit};
