// Where keys and values lie and how they become cells; a part of attention_body.h, which defines
// `work` and its constants.

// ---- Positions --------------------------------------------------------------------------

static inline const int32_t *path_of(const work *w, int row) {
    return w->call->paths + w->span->paths + (int64_t)row * (w->span->known + w->span->num_rows + 1);
}

static inline int position(const work *w, int row) {
    return w->span->start + (w->span->paths < 0 ? row : path_of(w, row)[0]);
}

static inline int last_key(const work *w, int row) {
    const ft_span *span = w->span;
    return span->paths == FT_TOGETHER ? span->start + span->num_rows - 1 : position(w, row);
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
ALWAYS void transpose(__m512i r[16]) {
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

#if W == 8
// Eight cells of eight keys.
ALWAYS void transpose(vf r[8]) {
    vf t[8];
    UNROLL for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
}
#endif

#if W == 4
// Four cells of four keys.
ALWAYS void transpose(vf r[4]) {
#if defined(NEON)
    const float32x4_t a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
    const float32x4_t c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
    r[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
    r[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
    r[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
#else
    float cells[4][4], turned[4][4];
    for (int i = 0; i < 4; i++) vf_store(cells[i], r[i]);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) turned[j][i] = cells[i][j];
    for (int i = 0; i < 4; i++) r[i] = vf_load(turned[i]);
#endif
}
#endif

#if defined(PAIRS) && defined(NEON)

// Four cells of a head's keys or values, from number `first` of `count` on.
ALWAYS uint16x8_t pairs(const work *w, const char *row, int first, int count) {
    const int left = count - first;
    if (w->shape->kv_type == FT_INT8) {
        const vf scale = vf_set1(load_float(row + count));
        const int8_t *at = (const int8_t *)row + first;
        const vf low = vf_mul(vf_load_int8_n(at, left), scale);
        const vf high = left > W ? vf_mul(vf_load_int8_n(at + W, left - W), scale) : vf_set1(0.0f);
        return vcombine_u16(vf_to_bf16(low), vf_to_bf16(high));
    }
    const bf16 *at = (const bf16 *)row + first;
    if (left >= 8) return vld1q_u16(at);
    bf16 some[8] = {0};
    for (int i = 0; i < left; i++) some[i] = at[i];
    return vld1q_u16(some);
}

ALWAYS vf load_cells(const work *w, const int kept, const int whole, const char *row, int cell) {
    (void)kept, (void)whole;
    return vreinterpretq_f32_u16(pairs(w, row, 2 * cell, w->shape->head_dim));
}
#define FOR_EACH_KEPT(function) function(w, head, 0, 0);

// Values of two keys, side by side for every dimension.
static void pack_values(work *w, int head) {
    float *to = w->values;
    const int size = w->shape->head_dim;
    const int64_t at = head * w->head_bytes;
    for (int key = 0; key < w->end_key; key += 2, to += w->width) {
        fetch(&w->fetch, w->fetch.per_values);
        for (int d = 0; d < size; d += 8) {
            uint16x8_t a = vdupq_n_u16(0), b = a;
            if (key < w->num_keys) a = pairs(w, w->slots[key] + at, d, size);
            if (key + 1 < w->num_keys) b = pairs(w, w->slots[key + 1] + at, d, size);
            vf_store(to + d, vreinterpretq_f32_u16(vzip1q_u16(a, b)));
            if (d + W < size) vf_store(to + d + W, vreinterpretq_f32_u16(vzip2q_u16(a, b)));
        }
    }
}

#elif defined(PAIRS)

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
    for (int key = 0; key < w->end_key; key += 2, to += width) {
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
    for (; key < w->end_key; key += 2, to += width) {
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

// How numbers are kept: bfloat16, floats, or FT_INT8 that is rounded to `type` or not.
enum { OF_BF16, OF_FLOATS, OF_INT8, OF_INT8_ROUNDED };

static inline int kept_as(const ft_attention_shape *shape) {
    const int narrow = shape->type == FT_BFLOAT16;
    if (shape->kv_type == FT_INT8) return narrow ? OF_INT8_ROUNDED : OF_INT8;
    return narrow ? OF_BF16 : OF_FLOATS;
}

// `count` numbers of a head's keys or values, from `first` on.
ALWAYS vf load_some(const work *w, const int kept, const char *row, int first, int count) {
    if (kept == OF_INT8 || kept == OF_INT8_ROUNDED) {
        const vf scale = vf_set1(load_float(row + w->shape->head_dim));
        const vf x = vf_mul(vf_load_int8_n((const int8_t *)row + first, count), scale);
        return kept == OF_INT8_ROUNDED ? vf_as_bf16(x) : x;
    }
    if (kept == OF_BF16) {
        const bf16 *at = (const bf16 *)row + first;
        return count >= W ? vf_load_bf16(at) : vf_load_bf16_n(at, count);
    }
    const float *at = (const float *)row + first;
    return count >= W ? vf_load(at) : vf_load_n(at, count);
}

// A copy of a function for each way, so that it is not asked for every vector; and for heads of whole
// vectors, of which none is cut.
#define COPIES_OF(function, kept)        \
    if (w->shape->head_dim % W == 0)     \
        function(w, head, kept, 1);      \
    else                                 \
        function(w, head, kept, 0);
#define FOR_EACH_KEPT(function)                                              \
    switch (kept_as(w->shape)) {                                             \
        case OF_BF16: COPIES_OF(function, OF_BF16) break;                    \
        case OF_FLOATS: COPIES_OF(function, OF_FLOATS) break;                \
        case OF_INT8: COPIES_OF(function, OF_INT8) break;                    \
        default: COPIES_OF(function, OF_INT8_ROUNDED)                        \
    }

ALWAYS void pack_kept_values(work *w, int head, const int kept, const int whole) {
    const int size = w->shape->head_dim, width = w->width, lines = w->fetch.per_values;
    const int64_t at = head * w->head_bytes;
    fetcher next = w->fetch;
    float *to = w->values;
    for (int key = 0; key < w->num_keys; key++, to += width) {
        fetch(&next, lines);
        const char *row = w->slots[key] + at;
        for (int d = 0; d < size; d += W)
            vf_store(to + d, load_some(w, kept, row, d, whole ? W : size - d));
    }
    memset(to, 0, (size_t)((w->end_key - w->num_keys) * width) * sizeof(float));
    w->fetch = next;
}

static void pack_values(work *w, int head) { FOR_EACH_KEPT(pack_kept_values) }

#if W == 16
ALWAYS void load_cells(const work *w, int head, int cell, int key, __m512i r[16]) {
    UNROLL for (int i = 0; i < 16; i++) {
        r[i] = _mm512_setzero_si512();
        if (key + i < w->num_keys) {
            const char *row = w->slots[key + i] + head * w->head_bytes;
            r[i] = _mm512_castps_si512(
                load_some(w, kept_as(w->shape), row, cell, w->shape->head_dim - cell));
        }
    }
}
#else
ALWAYS vf load_cells(const work *w, const int kept, const int whole, const char *row, int cell) {
    return load_some(w, kept, row, cell, whole ? W : w->shape->head_dim - cell);
}
#endif
#endif

#if W == 16
static void pack_keys(work *w, int head) {
    for (int key = 0; key < w->end_key; key += 16)
        for (int cell = 0; cell < w->steps; cell += 16) {
            __m512i r[16];
            fetch(&w->fetch, w->fetch.per_keys);
            load_cells(w, head, cell, key, r);
            transpose(r);
            float *to = w->keys + (int64_t)cell * STRIP + key;
            const int count = w->steps - cell;
            UNROLL for (int i = 0; i < 16; i++)
                if (i < count) _mm512_storeu_si512(to + (int64_t)i * STRIP, r[i]);
        }
}
#else
// W cells of W keys, of which the first `keys` are there.
ALWAYS void pack_square(const work *w, const int kept, const int whole, const int keys, int64_t at,
                        int key, int cell) {
    vf r[W];
    UNROLL for (int i = 0; i < W; i++)
        r[i] = i < keys ? load_cells(w, kept, whole, w->slots[key + i] + at, cell) : vf_set1(0.0f);
    transpose(r);
    float *to = w->keys + (int64_t)cell * STRIP + key;
    const int count = whole ? W : w->steps - cell;
    UNROLL for (int i = 0; i < W; i++)
        if (i < count) vf_store(to + (int64_t)i * STRIP, r[i]);
}

ALWAYS void pack_kept_keys(work *w, int head, const int kept, const int whole) {
    const int num_keys = w->num_keys, end_key = w->end_key, steps = w->steps, lines = w->fetch.per_keys;
    const int64_t at = head * w->head_bytes;
    fetcher next = w->fetch;
    for (int key = 0; key < end_key; key += W)
        for (int cell = 0; cell < steps; cell += W) {
            if (key % 16 == 0 && cell % 16 == 0) fetch(&next, lines);
            if (key + W <= num_keys)
                pack_square(w, kept, whole, W, at, key, cell);
            else
                pack_square(w, kept, whole, num_keys - key, at, key, cell);
        }
    w->fetch = next;
}

static void pack_keys(work *w, int head) { FOR_EACH_KEPT(pack_kept_keys) }
#endif

// Cells of the query of row m of the unit's head h: [head][m / TILE_ROWS][steps][TILE_ROWS].
static inline float *query_at(const work *w, int h, int m) {
    const int64_t tiles = round_up(w->rows, TILE_ROWS) / TILE_ROWS;
    return w->q + (h * tiles + m / TILE_ROWS) * w->steps * TILE_ROWS + m % TILE_ROWS;
}

// One query as cells; a cell's unused half is zero.
static void pack_query(const work *w, int64_t at, float *to) {
    const int size = w->shape->head_dim;
#ifdef PAIRS
    const bf16 *from = (const bf16 *)w->call->q + at;
    for (int d = 0; d < size; d += 2, to += TILE_ROWS) {
        *to = 0.0f;
        memcpy(to, from + d, d + 2 <= size ? 4 : 2);
    }
#else
    for (int d = 0; d < size; d++, to += TILE_ROWS)
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

