// Scores, softmax and values of tiles of rows; a part of attention_body.h, which defines `work` and
// its constants.

// ---- Products ---------------------------------------------------------------------------

static inline vf multiply(vf sum, vf a, vf b) {
#if defined(PAIRS) && defined(NEON)
    return vbfdotq_f32(sum, vreinterpretq_bf16_f32(b), vreinterpretq_bf16_f32(a));
#elif defined(PAIRS)
    return _mm512_dpbf16_ps(sum, (__m512bh)b, (__m512bh)a);
#else
    vf_add_product(&sum, a, b);
    return sum;
#endif
}

typedef struct {
    const float *a;     // cells [rows, steps] of weights, or [steps, TILE_ROWS] of queries
    const float *b;     // cells [steps, n]
    float *c;           // [rows, n]
    const float *decay; // c = c * decay[row] + a b; NULL: all 1
    int64_t stride;     // of b and c; of scores it is STRIP
    int steps;
    fetcher *fetch;
} factors;

enum { SCORES, VALUES };

// Where a row and a step of `a` are: constants, so that no register holds them.
#define A_AT(kind, row, step) \
    ((kind) == SCORES ? (step) * TILE_ROWS + (row) : (row) * VALUE_STEPS + (step))

ALWAYS void product_of(const factors *f, int column, const int kind, const int rows,
                       const int vecs) {
    vf sum[TILE_ROWS][TILE_VECS];
    const int64_t stride = kind == SCORES ? STRIP : f->stride;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++)
            sum[r][v] = kind == SCORES ? vf_set1(0.0f) : vf_load(f->c + r * stride + column + v * W);
    if (kind == VALUES && f->decay)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vecs; v++)
                sum[r][v] = vf_mul(sum[r][v], vf_set1(f->decay[r]));
    const float *a = f->a, *b = f->b + column;
    fetcher next = *f->fetch;
    for (int s = f->steps; s > 0; s--, b += stride) {
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
            vf_store(f->c + r * stride + column + v * W, sum[r][v]);
}

ALWAYS void product_of_rows(const factors *f, const int kind, int n, const int rows) {
    int column = 0;
    for (; column + TILE_VECS * W <= n; column += TILE_VECS * W)
        product_of(f, column, kind, rows, TILE_VECS);
#if TILE_VECS == 4
    switch ((n - column) / W) {
    case 3: product_of(f, column, kind, rows, 3); break;
    case 2: product_of(f, column, kind, rows, 2); break;
    case 1: product_of(f, column, kind, rows, 1); break;
    default: break;
    }
#else
    if (column < n) product_of(f, column, kind, rows, 1);
#endif
}

ALWAYS void product(const factors *f, const int kind, int n, int rows) {
#define CASE(rows) case rows: product_of_rows(f, kind, n, rows); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if TILE_ROWS == 6
        CASE(5) CASE(6)
#endif
        default: break;
    }
#undef CASE
}

// Copies of their own, so that the numbers of rows and vectors are known to the compiler.
static void scores_of(const factors *f, int n, int rows) { product(f, SCORES, n, rows); }
static void values_of(const factors *f, int n, int rows) { product(f, VALUES, n, rows); }

// ---- Softmax ----------------------------------------------------------------------------

#if defined(PAIRS) && !defined(NEON)
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

// A row's sum of weights, in lanes.
typedef __m256 sum_lanes;
ALWAYS sum_lanes load_lanes(const float *sum) { return _mm256_loadu_ps(sum); }
ALWAYS void store_lanes(float *sum, sum_lanes x) { _mm256_storeu_ps(sum, x); }
#else
ALWAYS vf exp2_of_weight(vf x) { return vf_exp2(x); }
typedef vf sum_lanes;
ALWAYS sum_lanes load_lanes(const float *sum) { return vf_load(sum); }
ALWAYS void store_lanes(float *sum, sum_lanes x) { vf_store(sum, x); }
#endif

typedef vf block_scores[BLOCK / W];

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

static inline int sees_all(int base, int low, int high) {
    return base >= low && base + BLOCK - 1 <= high;
}

// Cap a row's scores, and make those of keys that it does not see -inf.
static void change_scores(const ft_attention_shape *shape, int base, int low, int high, float *scores) {
    for (int v = 0; v < BLOCK / W; v++) {
        vf x = vf_load(scores + v * W);
        if (shape->softcap > 0.0f)
            x = capped(shape, x);
        else if (!scales_later(shape))
            x = vf_mul(x, vf_set1(shape->scale * LOG2_E));
        vf_store(scores + v * W, vf_within(x, base + v * W, low, high, vf_set1(-INFINITY)));
    }
}

// Weights of a block as cells. Returns the row's sum with them.
ALWAYS sum_lanes put_weights(const block_scores weight, float *weights, sum_lanes sum) {
#if defined(PAIRS) && defined(NEON)
    // Sums take the rounded weights, so that rounding cancels where one key has most of the weight.
    uint16x8_t ones = vdupq_n_u16(0x3f80);
    // GCC 12 makes a constant 1 with an instruction of half floats, which this processor may not have.
    __asm__("" : "+w"(ones));
    UNROLL for (int v = 0; v < BLOCK / W; v += 2) {
        const uint16x8_t cells = vcombine_u16(vf_to_bf16(weight[v]), vf_to_bf16(weight[v + 1]));
        vst1q_f32(weights + v * W / 2, vreinterpretq_f32_u16(cells));
        sum = vbfdotq_f32(sum, vreinterpretq_bf16_u16(cells), vreinterpretq_bf16_u16(ones));
    }
    return sum;
#elif defined(PAIRS)
    // Here too.
    const __m256bh cells = _mm512_cvtneps_pbh(weight[0]);
    const __m256bh ones = (__m256bh)_mm256_set1_epi16(0x3f80);
    _mm256_storeu_si256((__m256i *)weights, (__m256i)cells);
    return _mm256_dpbf16_ps(sum, cells, ones);
#else
    UNROLL for (int v = 0; v < BLOCK / W; v++) {
        sum = vf_add(sum, weight[v]);
        vf_store(weights + v * W, weight[v]);
    }
    return sum;
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

ALWAYS vf scores_less_peak(const float *scores, vf rate, float peak, block_scores x) {
    UNROLL for (int v = 0; v < BLOCK / W; v++)
        x[v] = vf_fms(vf_load(scores + v * W), rate, vf_set1(peak));
    vf best = x[0];
    UNROLL for (int v = 1; v < BLOCK / W; v++) best = vf_max(best, x[v]);
    return best;
}

// Rows of one head and the blocks of the strip that some of them see.
typedef struct {
    int base;       // position of the strip's first key
    int first, end; // blocks of the strip
    int row, rows;  // within the unit's head
    int64_t at;     // of the first row's state
    int plain;      // every row sees all of these keys, and scores only have to be multiplied
    vf rate;        // by which softmax multiplies scores
    unsigned moved; // bit b: before block b, sums of rows are to be scaled by decay[b]
    float decay[STRIP_BLOCKS][SCORE_ROWS];
} tile;

// Scores of row r of the tile become weights in block b.
static void soften_block(const work *w, tile *t, int r, int b) {
    const int base = t->base + b * BLOCK, low = w->lows[t->row + r], high = w->highs[t->row + r];
    const int later = scales_later(w->shape), all = sees_all(base, low, high);
    float *scores = w->scores + r * STRIP + b * BLOCK, *peak = w->peak + t->at + r;
    float *sum = w->sum + (t->at + r) * W;
    if (!all || !later) change_scores(w->shape, base, low, high, scores);
    block_scores x, weight;
    if (vf_any_above(scores_less_peak(scores, t->rate, *peak, x), ROOM)) {
        if (!(t->moved >> b & 1))
            for (int i = 0; i < t->rows; i++) t->decay[b][i] = 1.0f;
        t->moved |= 1u << b;
        t->decay[b][r] = move_peak(t->rate, scores, peak, sum);
        scores_less_peak(scores, t->rate, *peak, x);
    }
    UNROLL for (int v = 0; v < BLOCK / W; v++) weight[v] = exp2_of_weight(x[v]);
    if (!all)
        UNROLL for (int v = 0; v < BLOCK / W; v++) weight[v] = vf_where_finite(x[v], weight[v]);
    float *weights = w->weights + r * VALUE_STEPS + b * BLOCK_STEPS;
    store_lanes(sum, put_weights(weight, weights, load_lanes(sum)));
}

// The same for some blocks whose keys the row sees all, unless one moves the peak. Returns whether it
// is done.
ALWAYS int soften_blocks(const int blocks, const float *scores, vf rate, float peak,
                         float *weights, float *sum) {
    block_scores x[STRIP_BLOCKS];
    vf best = scores_less_peak(scores, rate, peak, x[0]);
    UNROLL for (int b = 1; b < blocks; b++)
        best = vf_max(best, scores_less_peak(scores + b * BLOCK, rate, peak, x[b]));
    if (vf_any_above(best, ROOM)) return 0;
    sum_lanes total = load_lanes(sum);
    UNROLL for (int b = 0; b < blocks; b++) {
        block_scores weight;
        UNROLL for (int v = 0; v < BLOCK / W; v++) weight[v] = exp2_of_weight(x[b][v]);
        total = put_weights(weight, weights + b * BLOCK_STEPS, total);
    }
    store_lanes(sum, total);
    return 1;
}

// Softmax of a tile: from scores to weights.
static void soften(const work *w, tile *t) {
    const int whole = t->plain && t->end - t->first == STRIP_BLOCKS;
    for (int r = 0; r < t->rows; r++) {
        const float *scores = w->scores + r * STRIP, *peak = w->peak + t->at + r;
        float *weights = w->weights + r * VALUE_STEPS, *sum = w->sum + (t->at + r) * W;
        if (whole && soften_blocks(STRIP_BLOCKS, scores, t->rate, *peak, weights, sum)) continue;
        for (int b = t->first; b < t->end; b++) {
            float *to = weights + b * BLOCK_STEPS;
            if (t->plain && soften_blocks(1, scores + b * BLOCK, t->rate, *peak, to, sum)) continue;
            soften_block(w, t, r, b);
        }
    }
}

// ---- Tiles ------------------------------------------------------------------------------

// Which blocks of the strip at `base` rows [m, m + rows) of head h see.
static tile tile_of(const work *w, int base, int h, int m, int rows) {
    // The first and the last key that some row sees, and those that all of them do.
    int first = INT32_MAX, last = 0, low = 0, high = INT32_MAX;
    for (int r = 0; r < rows; r++) {
        first = least(first, w->lows[m + r]);
        low = most(low, w->lows[m + r]);
        last = most(last, w->highs[m + r]);
        high = least(high, w->highs[m + r]);
    }
    tile t = {.base = base, .row = m, .rows = rows, .at = (int64_t)h * w->rows + m};
    t.end = last < base ? 0 : least(w->end_key / BLOCK, (last - base) / BLOCK + 1);
    t.first = most(0, first - base) / BLOCK;
    const int later = scales_later(w->shape);
    t.rate = vf_set1(later ? w->shape->scale * LOG2_E : 1.0f);
    t.plain = later && base + t.first * BLOCK >= low && base + t.end * BLOCK - 1 <= high;
    return t;
}

// Weights times values, in pieces that begin where sums are scaled.
static void add_values(work *w, const tile *t) {
    for (int b = t->first, next; b < t->end; b = next) {
        for (next = b + 1; next < t->end && !(t->moved >> next & 1);) next++;
        const int keys = least(w->num_keys, next * BLOCK) - b * BLOCK;
        factors values = {.b = w->values + (int64_t)b * BLOCK_STEPS * w->width,
                          .stride = w->width, .steps = (keys + PER_CELL - 1) / PER_CELL,
                          .fetch = &w->fetch};
        for (int r = 0; r < t->rows; r += TILE_ROWS) {
            values.a = w->weights + r * VALUE_STEPS + b * BLOCK_STEPS;
            values.c = w->acc + (t->at + r) * w->width;
            values.decay = t->moved >> b & 1 ? t->decay[b] + r : NULL;
            values_of(&values, w->width, least(TILE_ROWS, t->rows - r));
        }
    }
}

// A strip of packed keys and values for rows [m, end) of the unit's head h.
static void attend_rows(work *w, int base, int h, int m, int end) {
    for (int rows; m < end; m += rows) {
        rows = least(end, (m / SCORE_ROWS + 1) * SCORE_ROWS) - m;
        tile t = tile_of(w, base, h, m, rows);
        if (t.first >= t.end) continue;
        factors scores = {.b = w->keys + t.first * BLOCK, .steps = w->steps, .fetch = &w->fetch};
        for (int r = 0, count; r < rows; r += count) {
            count = least(TILE_ROWS - (m + r) % TILE_ROWS, rows - r);
            scores.a = query_at(w, h, m + r);
            scores.c = w->scores + r * STRIP + t.first * BLOCK;
            scores_of(&scores, (t.end - t.first) * BLOCK, count);
        }
        soften(w, &t);
        add_values(w, &t);
    }
}
