// Exact products of integers for NEON, eight inputs at a time; a part of linear_fixed.h.
//
// With DOTS four bytes are multiplied with four bytes: activations of 16 bits are two bytes, so the group
// is gone through twice, first for 256 times the upper ones. With PAIRS too, two rows and two outputs are
// multiplied as matrices of eight inputs. Without DOTS weights are widened to 16 bits, eight outputs
// together, and multiplied with one activation of every row.

ALWAYS void fetch_eight(const chunk *c, const int bits, const int panels, const place *at, int step) {
    for (int i = step; i < step + (bits == 8 ? 2 : 1); i++)
        UNROLL for (int p = 0; p < panels; p++)
            __builtin_prefetch(c->fetch[at->panel + p] + i * c->fetch_step);
}

#ifdef DOTS

// Bytes 0 to 3 and 4 to 7 of four outputs' inputs.
typedef struct {
    uint8x16_t first, second;
} eight_inputs;

ALWAYS eight_inputs weights_at(const char *at, const int bits) {
    const uint8x16_t first = vld1q_u8((const uint8_t *)at);
    if (bits == 4) return (eight_inputs){vandq_u8(first, vdupq_n_u8(15)), vshrq_n_u8(first, 4)};
    const uint8x16_t second = vld1q_u8((const uint8_t *)at + STEP_BYTES);
#ifdef PAIRS
    return (eight_inputs){first, second};
#else
    // Both factors have a sign: the bytes lose the 128 that they were packed with.
    const uint8x16_t sign = vdupq_n_u8(128);
    return (eight_inputs){veorq_u8(first, sign), veorq_u8(second, sign)};
#endif
}

#ifdef PAIRS
#define MIDDLE_OF_8 128
#define DOT(sum, w, x, lane) vusdotq_lane_s32(sum, w, x, lane)
#else
#define MIDDLE_OF_8 0
#define DOT(sum, w, x, lane) vdotq_lane_s32(sum, vreinterpretq_s8_u8(w), x, lane)
#endif

// Eight bytes of a row: of its activations, or the upper or lower ones of those of 16 bits.
ALWAYS int8x8_t bytes_of(const chunk *c, const int x_bits, int row, int input, const int lower) {
    const char *x = c->x + row * c->x_stride + input * (x_bits / 8) + (lower && x_bits == 16 ? 8 : 0);
    return vld1_s8((const int8_t *)x);
}

ALWAYS void add_dots(const chunk *c, const int bits, const int x_bits, const int rows,
                     const int panels, const place *at, const int lower, whole_sums sum) {
    const int step_inputs = 32 / bits;
    for (int i = at->step; i < at->end; i += 8 / step_inputs) {
        if (lower || x_bits == 8) fetch_eight(c, bits, panels, at, i);
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                const char *from = c->weight + (at->panel + p) * c->panel_stride + h * W * 4;
                const eight_inputs w = weights_at(from + i * STEP_BYTES, bits);
                UNROLL for (int r = 0; r < rows; r++) {
                    const int8x8_t x = bytes_of(c, x_bits, r, i * step_inputs, lower);
                    sum[r][p][h] = DOT(sum[r][p][h], w.first, x, 0);
                    sum[r][p][h] = DOT(sum[r][p][h], w.second, x, 1);
                }
            }
    }
}

ALWAYS void dot_group(const chunk *c, const int bits, const int x_bits, const int rows,
                      const int panels, const place *at, whole_sums sum) {
    if (x_bits == 16) {
        whole_sums upper;
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int h = 0; h < HALVES; h++) upper[r][p][h] = vi_set1(0);
        add_dots(c, bits, x_bits, rows, panels, at, 0, upper);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int h = 0; h < HALVES; h++)
                    sum[r][p][h] = vaddq_s32(sum[r][p][h], vshlq_n_s32(upper[r][p][h], 8));
    }
    add_dots(c, bits, x_bits, rows, panels, at, 1, sum);
}

#ifdef PAIRS

// Of two outputs and two rows: of the first output both rows, then of the second.
typedef vi crossed_whole[(MOST_FIXED_ROWS + 1) / 2][FIXED_PANELS][CROSSED];

ALWAYS void add_matrices(const chunk *c, const int bits, const int x_bits, const int rows,
                         const int panels, const place *at, const int lower, crossed_whole sum) {
    const int step_inputs = 32 / bits;
    for (int i = at->step; i < at->end; i += 8 / step_inputs) {
        int8x16_t x[(MOST_FIXED_ROWS + 1) / 2];
        if (lower || x_bits == 8) fetch_eight(c, bits, panels, at, i);
        UNROLL for (int r = 0; r < rows; r += 2) {
            const int other = r + 1 < rows ? r + 1 : r;
            x[r / 2] = vcombine_s8(bytes_of(c, x_bits, r, i * step_inputs, lower),
                                   bytes_of(c, x_bits, other, i * step_inputs, lower));
        }
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                const char *from = c->weight + (at->panel + p) * c->panel_stride + h * W * 4;
                const eight_inputs w = weights_at(from + i * STEP_BYTES, bits);
                const uint32x4_t first = vreinterpretq_u32_u8(w.first);
                const uint32x4_t second = vreinterpretq_u32_u8(w.second);
                const uint8x16_t low = vreinterpretq_u8_u32(vzip1q_u32(first, second));
                const uint8x16_t high = vreinterpretq_u8_u32(vzip2q_u32(first, second));
                UNROLL for (int r = 0; r < rows; r += 2) {
                    vi *const to = &sum[r / 2][p][2 * h];
                    to[0] = vusmmlaq_s32(to[0], low, x[r / 2]);
                    to[1] = vusmmlaq_s32(to[1], high, x[r / 2]);
                }
            }
    }
}

ALWAYS void matrix_group(const chunk *c, const int bits, const int x_bits, const int rows,
                         const int panels, const place *at, whole_sums sum) {
    crossed_whole crossed;
    UNROLL for (int r = 0; r < rows; r += 2)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int o = 0; o < CROSSED; o++) crossed[r / 2][p][o] = vi_set1(0);
    if (x_bits == 16) {
        add_matrices(c, bits, x_bits, rows, panels, at, 0, crossed);
        UNROLL for (int r = 0; r < rows; r += 2)
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int o = 0; o < CROSSED; o++)
                    crossed[r / 2][p][o] = vshlq_n_s32(crossed[r / 2][p][o], 8);
    }
    add_matrices(c, bits, x_bits, rows, panels, at, 1, crossed);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                const vi a = crossed[r / 2][p][2 * h], b = crossed[r / 2][p][2 * h + 1];
                const vi whole = r % 2 ? vuzp2q_s32(a, b) : vuzp1q_s32(a, b);
                sum[r][p][h] = vaddq_s32(sum[r][p][h], whole);
            }
}

#endif

ALWAYS void add_group(const chunk *c, const int bits, const int x_bits, const int rows,
                      const int panels, const place *at, whole_sums sum) {
#ifdef PAIRS
    if (rows > 1) {
        matrix_group(c, bits, x_bits, rows, panels, at, sum);
        return;
    }
#endif
    dot_group(c, bits, x_bits, rows, panels, at, sum);
}

#else

#define MIDDLE_OF_8 128

// One input of eight outputs for all rows; `lane` is where the rows have it.
#define ADD_INPUT(weights, lane)                                                             \
    do {                                                                                     \
        const int16x8_t w_ = vreinterpretq_s16_u16(weights);                                 \
        UNROLL for (int r = 0; r < rows; r++) {                                              \
            vi *const to_ = &sum[r][p][h];                                                   \
            to_[0] = vmlal_laneq_s16(to_[0], vget_low_s16(w_), x[r], lane);                  \
            to_[1] = vmlal_high_laneq_s16(to_[1], w_, x[r], lane);                           \
        }                                                                                    \
    } while (0)

// Rows have the inputs of a step as 0 2 1 3, and the weights of eight outputs come as bytes 0 and 1 of
// each, then 2 and 3.
ALWAYS void add_group(const chunk *c, const int bits, const int x_bits, const int rows,
                      const int panels, const place *at, whole_sums sum) {
    const int step_inputs = 32 / bits;
    const uint16x8_t byte = vdupq_n_u16(255), half = vdupq_n_u16(15);
    (void)x_bits;
    for (int i = at->step; i < at->end; i += 8 / step_inputs) {
        int16x8_t x[MOST_FIXED_ROWS];
        fetch_eight(c, bits, panels, at, i);
        UNROLL for (int r = 0; r < rows; r++)
            x[r] = vreinterpretq_s16_u8(
                vld1q_u8((const uint8_t *)c->x + r * c->x_stride + i * step_inputs * 2));
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h += 2) {
                const uint8_t *from = (const uint8_t *)c->weight +
                                      (at->panel + p) * c->panel_stride + i * STEP_BYTES + h * W * 4;
                const uint16x8_t a = vreinterpretq_u16_u8(vld1q_u8(from));
                const uint16x8_t b = vreinterpretq_u16_u8(vld1q_u8(from + W * 4));
                const uint16x8_t even = vuzp1q_u16(a, b), odd = vuzp2q_u16(a, b);
                if (bits == 4) {
                    ADD_INPUT(vandq_u16(even, half), 0);
                    ADD_INPUT(vandq_u16(vshrq_n_u16(even, 8), half), 2);
                    ADD_INPUT(vandq_u16(vshrq_n_u16(even, 4), half), 4);
                    ADD_INPUT(vshrq_n_u16(even, 12), 6);
                    ADD_INPUT(vandq_u16(odd, half), 1);
                    ADD_INPUT(vandq_u16(vshrq_n_u16(odd, 8), half), 3);
                    ADD_INPUT(vandq_u16(vshrq_n_u16(odd, 4), half), 5);
                    ADD_INPUT(vshrq_n_u16(odd, 12), 7);
                    continue;
                }
                from += STEP_BYTES;
                const uint16x8_t d = vreinterpretq_u16_u8(vld1q_u8(from));
                const uint16x8_t e = vreinterpretq_u16_u8(vld1q_u8(from + W * 4));
                const uint16x8_t more_even = vuzp1q_u16(d, e), more_odd = vuzp2q_u16(d, e);
                ADD_INPUT(vandq_u16(even, byte), 0);
                ADD_INPUT(vshrq_n_u16(even, 8), 2);
                ADD_INPUT(vandq_u16(odd, byte), 1);
                ADD_INPUT(vshrq_n_u16(odd, 8), 3);
                ADD_INPUT(vandq_u16(more_even, byte), 4);
                ADD_INPUT(vshrq_n_u16(more_even, 8), 6);
                ADD_INPUT(vandq_u16(more_odd, byte), 5);
                ADD_INPUT(vshrq_n_u16(more_odd, 8), 7);
            }
    }
}

#endif
