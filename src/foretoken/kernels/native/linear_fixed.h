// The integer part of linear_body.h: activations in fixed point, exact sums within a group.
//
// A block of 128 activations is scale * q with whole q in [-32639, 32639], the range of two signed
// digits to base 256. VNNI multiplies digits by unsigned weights; elsewhere q itself is a 16-bit
// number. Weights are unsigned (value + 128, or 0..15): the excess, times the sum of q, is taken off.
enum { MOST_FIXED = 32639 };

#if defined(PAIRS)
enum { PAIR_INPUT_BYTES = 2, DIGIT_BYTES = 1 };
#else
enum { PAIR_INPUT_BYTES = 4, DIGIT_BYTES = 2 };
#endif

static void fix_block(const ft_linear_job *job, int64_t row, int64_t block, const float *values) {
    vf peak = vf_set1(0), odd = vf_set1(0);
    for (int k = 0; k < FT_BLOCK; k += W) {
        const vf value = vf_load(values + k);
        peak = vf_max(vf_max(value, vf_sub(vf_set1(0), value)), peak);
        odd = vf_add(odd, vf_mul(value, vf_set1(0)));  // NaN if any value is NaN or infinite
    }
    const float most = vf_peak(peak), strange = vf_sum(odd);
    const int usable = strange == 0 && most > 0;
    const vf inverse = vf_set1(usable ? (float)MOST_FIXED / most : 0.0f);
    ((float *)job->x.scales)[row * job->x.blocks + block] = most / (float)MOST_FIXED + strange;
    float scaled_values[FT_BLOCK];
    int32_t fixed[FT_BLOCK];
    for (int k = 0; k < FT_BLOCK; k += W) {
        const vf value = vf_round(vf_mul(vf_load(values + k), inverse));
        vf_store(scaled_values + k, value);
    }
    for (int k = 0; k < FT_BLOCK; k++) fixed[k] = usable ? (int32_t)scaled_values[k] : 0;
    int32_t *sums = (int32_t *)job->x.sums + row * job->x.parts + block * (FT_BLOCK / 32);
    for (int part = 0; part < FT_BLOCK / 32; part++) {
        int32_t sum = 0;
        for (int k = 0; k < 32; k++) sum += fixed[part * 32 + k];
        sums[part] = sum;
    }
    char *target = (char *)job->x.values + row * job->x.stride;
#if defined(PAIRS)
    int8_t *high = (int8_t *)target + block * FT_BLOCK, *low = high + job->x.blocks * FT_BLOCK;
    for (int k = 0; k < FT_BLOCK; k++) {
        const int32_t digit = ((fixed[k] + 128) & 255) - 128;
        low[k] = (int8_t)digit;
        high[k] = (int8_t)((fixed[k] - digit) / 256);
    }
#else
    int16_t *whole = (int16_t *)target + block * FT_BLOCK;
    for (int k = 0; k < FT_BLOCK; k++) whole[k] = (int16_t)fixed[k];
#endif
}

// Sum of q over `parts` parts from `part` on.
ALWAYS int32_t sum_of(const chunk *c, int row, int part, int parts) {
    int32_t sum = 0;
    for (int i = 0; i < parts; i++) sum += c->x_sum[row * c->parts + part + i];
    return sum;
}

// Add whole sums of a group of inputs, times the scales of activations and weights.
ALWAYS void add_group(const chunk *c, int row, int panel, int h, int group, int32_t excess, vf whole) {
    const int64_t block = c->layer->group ? group * c->layer->group / FT_BLOCK : group;
    float *at = c->sums + row * SUM_STRIDE + panel * FT_PANEL + h * W;
    if (c->zero) {
        const float *zero = c->zero + panel * c->group_stride + group * FT_PANEL + h * W;
        whole = vf_sub(whole, vf_mul(vf_load(zero), vf_set1((float)excess)));
    }
    vf term = vf_mul(whole, vf_set1(c->x_scale[row * c->blocks + block]));
    if (c->scale) {
        const float *scale = c->scale + panel * c->group_stride + group * FT_PANEL + h * W;
        term = vf_mul(term, vf_load(scale));
    }
    vf_store(at, vf_add(vf_load(at), term));
}

#if defined(PAIRS)

typedef __m512i whole_sums[MOST_FIXED_ROWS][FT_TILE];

ALWAYS __m512i four_inputs(const char *at) {
    int32_t four;
    memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}

// As assembly, because GCC 12 copies and spills the sums around the intrinsic.
ALWAYS void add_products(__m512i *sum, __m512i w, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(w), "v"(x));
}

ALWAYS void clear(const int rows, const int panels, whole_sums high, whole_sums low) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) high[r][p] = low[r][p] = _mm512_setzero_si512();
}

// Four inputs of weights `w` against those at byte `at` of each row.
ALWAYS void add_four(const chunk *c, const int rows, const int panels, const __m512i *w, int64_t at,
                     whole_sums high, whole_sums low) {
    UNROLL for (int r = 0; r < rows; r++) {
        const char *x = c->x + r * c->x_stride + at;
        const __m512i x_high = four_inputs(x), x_low = four_inputs(x + c->digits);
        UNROLL for (int p = 0; p < panels; p++) {
            add_products(&high[r][p], w[p], x_high);
            add_products(&low[r][p], w[p], x_low);
        }
    }
}

ALWAYS void end_group(const chunk *c, const int rows, const int panels, int group, int excess,
                      whole_sums high, whole_sums low) {
    const int parts = (c->layer->group ? c->layer->group : FT_BLOCK) / 32;
    UNROLL for (int r = 0; r < rows; r++) {
        const int32_t sum = sum_of(c, r, group * parts, parts);
        const __m512i off = _mm512_set1_epi32((int32_t)((uint32_t)sum * (uint32_t)excess));
        UNROLL for (int p = 0; p < panels; p++) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[r][p], 8), low[r][p]);
            add_group(c, r, p, 0, group, sum, _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, off)));
        }
    }
}

ALWAYS __m512i load_step(const chunk *c, int panel, int step) {
    return _mm512_loadu_si512(c->weight + panel * c->panel_stride + step * STEP_BYTES);
}

ALWAYS void int8_group(const chunk *c, const int rows, const int panels, int group, int i, int end) {
    whole_sums high, low;
    clear(rows, panels, high, low);
    for (; i < end; i++) {
        __m512i w[FT_TILE];
        fetch_ahead(c, panels, i);
        UNROLL for (int p = 0; p < panels; p++)
            w[p] = load_step(c, p, i);
        add_four(c, rows, panels, w, i * 4, high, low);
    }
    end_group(c, rows, panels, group, 128, high, low);
}

ALWAYS void int8_steps(const chunk *c, const int rows, const int panels) {
    const int steps = c->layer->group ? c->layer->group / 4 : FT_BLOCK / 4;
    for (int group = 0, i = 0; i < c->steps; group++, i += steps)
        int8_group(c, rows, panels, group, i, i + steps < c->steps ? i + steps : c->steps);
}

ALWAYS void int4_group(const chunk *c, const int rows, const int panels, int group, int i, int end) {
    const __m512i mask = _mm512_set1_epi8(15);
    whole_sums high, low;
    clear(rows, panels, high, low);
    for (; i < end; i++) {
        __m512i w[FT_TILE];
        fetch_ahead(c, panels, i);
        UNROLL for (int p = 0; p < panels; p++)
            w[p] = _mm512_and_si512(load_step(c, p, i), mask);
        add_four(c, rows, panels, w, i * 8, high, low);
        // Loaded a second time, which costs less than keeping it.
        UNROLL for (int p = 0; p < panels; p++)
            w[p] = _mm512_and_si512(_mm512_srli_epi16(load_step(c, p, i), 4), mask);
        add_four(c, rows, panels, w, i * 8 + 4, high, low);
    }
    end_group(c, rows, panels, group, c->zero ? 0 : 8, high, low);
}

ALWAYS void int4_steps(const chunk *c, const int rows, const int panels) {
    const int steps = c->layer->group / 8;
    for (int group = 0, i = 0; i < c->steps; group++, i += steps)
        int4_group(c, rows, panels, group, i, i + steps);
}

#else

// Sums of four inputs of 16 unsigned weights each.
ALWAYS void add_four(int32_t whole[FT_PANEL], const uint8_t *w, const int16_t *x) {
#if W == 8
    int64_t four;
    memcpy(&four, x, 8);
    const __m256i inputs = _mm256_set1_epi64x(four);
    for (int n = 0; n < FT_PANEL; n += 8) {
        const __m128i *at = (const __m128i *)(w + n * 4);
        const __m256i first = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(at)), inputs);
        const __m256i second =
            _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(at + 1)), inputs);
        // hadd keeps to 128-bit lanes: 0 1 4 5 | 2 3 6 7.
        const __m256i mixed = _mm256_hadd_epi32(first, second);
        const __m256i sums = _mm256_permute4x64_epi64(mixed, 0xd8);
        __m256i *target = (__m256i *)(whole + n);
        _mm256_storeu_si256(target, _mm256_add_epi32(_mm256_loadu_si256(target), sums));
    }
#else
    for (int n = 0; n < FT_PANEL; n++)
        whole[n] += w[n * 4] * x[0] + w[n * 4 + 1] * x[1] + w[n * 4 + 2] * x[2] + w[n * 4 + 3] * x[3];
#endif
}

ALWAYS void add_whole(const chunk *c, int row, int panel, int group, int excess,
                      const int32_t whole[FT_PANEL]) {
    const int parts = (c->layer->group ? c->layer->group : FT_BLOCK) / 32;
    const int32_t sum = sum_of(c, row, group * parts, parts);
    float values[FT_PANEL];
    for (int n = 0; n < FT_PANEL; n++)
        values[n] = (float)(int32_t)((uint32_t)whole[n] - (uint32_t)sum * (uint32_t)excess);
    for (int h = 0; h < HALVES; h++)
        add_group(c, row, panel, h, group, sum, vf_load(values + h * W));
}

ALWAYS void int8_steps(const chunk *c, const int rows, const int panels) {
    const int steps = c->layer->group ? c->layer->group / 4 : FT_BLOCK / 4;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int group = 0, i = 0; i < c->steps; group++) {
                const int end = i + steps < c->steps ? i + steps : c->steps;
                const int16_t *x = (const int16_t *)(c->x + r * c->x_stride);
                int32_t whole[FT_PANEL] = {0};
                for (; i < end; i++) {
                    const char *w = c->weight + p * c->panel_stride + i * STEP_BYTES;
                    add_four(whole, (const uint8_t *)w, x + i * 4);
                }
                add_whole(c, r, p, group, 128, whole);
            }
}

ALWAYS void int4_steps(const chunk *c, const int rows, const int panels) {
    const int steps = c->layer->group / 8;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int group = 0, i = 0; i < c->steps; group++) {
                const int end = i + steps;
                const int16_t *x = (const int16_t *)(c->x + r * c->x_stride);
                int32_t whole[FT_PANEL] = {0};
                for (; i < end; i++) {
                    const char *w = c->weight + p * c->panel_stride + i * STEP_BYTES;
                    uint8_t first[STEP_BYTES], second[STEP_BYTES];
                    for (int b = 0; b < STEP_BYTES; b++) {
                        first[b] = (uint8_t)w[b] & 15;
                        second[b] = (uint8_t)w[b] >> 4;
                    }
                    add_four(whole, first, x + i * 8);
                    add_four(whole, second, x + i * 8 + 4);
                }
                add_whole(c, r, p, group, c->zero ? 0 : 8, whole);
            }
}

#endif
