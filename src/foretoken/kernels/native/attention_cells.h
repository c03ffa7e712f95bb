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

#if defined(NEON)
// Four cells of four keys.
ALWAYS void transpose_4x4(vf r[4]) {
    const float32x4_t a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
    const float32x4_t c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
    r[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
    r[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
    r[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
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

ALWAYS vf load_cells(const work *w, const char *row, int cell) {
    return vreinterpretq_f32_u16(pairs(w, row, 2 * cell, w->shape->head_dim));
}

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
    for (int j = 0; j < w->end_key; j++) {
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

#if defined(NEON)
ALWAYS vf load_cells(const work *w, const char *row, int cell) {
    return load_some(w, row, cell, w->shape->head_dim - cell);
}
#elif W == 16
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
    for (int key = 0; key < w->end_key; key += 16)
        for (int cell = 0; cell < w->steps; cell += 16) {
            __m512i r[16];
            fetch(&w->fetch, w->fetch.per_keys);
            load_cells(w, head, cell, key, r);
            transpose_16x16(r);
            float *to = w->keys + (int64_t)cell * STRIP + key;
            const int count = w->steps - cell;
            UNROLL for (int i = 0; i < 16; i++)
                if (i < count) _mm512_storeu_si512(to + (int64_t)i * STRIP, r[i]);
        }
#elif defined(NEON)
    const int64_t at = head * w->head_bytes;
    for (int key = 0; key < w->end_key; key += 4)
        for (int cell = 0; cell < w->steps; cell += 4) {
            vf r[4];
            if (key % 16 == 0 && cell % 16 == 0) fetch(&w->fetch, w->fetch.per_keys);
            UNROLL for (int i = 0; i < 4; i++)
                r[i] = key + i < w->num_keys ? load_cells(w, w->slots[key + i] + at, cell)
                                             : vf_set1(0.0f);
            transpose_4x4(r);
            float *to = w->keys + (int64_t)cell * STRIP + key;
            const int count = w->steps - cell;
            UNROLL for (int i = 0; i < 4; i++)
                if (i < count) vf_store(to + (int64_t)i * STRIP, r[i]);
        }
#else
    float row[W];
    for (int key = 0; key < w->end_key; key++) {
        for (int d = 0; d < w->steps; d += W) {
            const int count = least(W, w->steps - d);
            vf x = vf_set1(0.0f);
            if (key < w->num_keys)
                x = load_some(w, w->slots[key] + head * w->head_bytes, d, count);
            vf_store(row, x);
            if (key % 16 == 0 && d % 16 == 0) fetch(&w->fetch, w->fetch.per_keys);
            for (int i = 0; i < count; i++) w->keys[(int64_t)(d + i) * STRIP + key] = row[i];
        }
    }
#endif
}

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

