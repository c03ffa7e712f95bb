// The bfloat16 part of linear_body.h for NEON, two steps of pairs at a time.
//
// One row takes products of pairs, a lane an output. More rows take products of matrices: two outputs by
// two rows, each the pairs of the first step, then those of the second, added as the other instruction
// adds them. So a row's bits do not depend on how it went.

enum { CROSSED = FT_PANEL / 2 };  // outputs of a panel, by two

ALWAYS uint32x4_t pairs_at(const char *at) {
    return vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)at));
}

ALWAYS void pair_steps_of_one(const chunk *c, const int panels) {
    group_sums sum;
    load_sums(c, 1, panels, sum);
    for (int i = 0; i < c->steps; i += 2) {
        fetch_ahead(c, 0, panels, i, 1);
        fetch_ahead(c, 0, panels, i + 1, 1);
        const bfloat16x4_t x = vreinterpret_bf16_u8(vld1_u8((const uint8_t *)c->x + i * 4));
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                const char *at = c->weight + p * c->panel_stride + i * STEP_BYTES + h * W * 4;
                const bfloat16x8_t first = vreinterpretq_bf16_u32(pairs_at(at));
                const bfloat16x8_t second = vreinterpretq_bf16_u32(pairs_at(at + STEP_BYTES));
                sum[0][p][h] = vbfdotq_lane_f32(sum[0][p][h], first, x, 0);
                sum[0][p][h] = vbfdotq_lane_f32(sum[0][p][h], second, x, 1);
            }
    }
    store_sums(c, 1, panels, sum);
}

// Sums of two rows and two outputs: of the first output both rows, then of the second.
typedef vf crossed_sums[3][FT_TILE][CROSSED];

ALWAYS void load_crossed(const chunk *c, const int rows, const int panels, crossed_sums sum) {
    UNROLL for (int r = 0; r < rows; r += 2) {
        const float *upper = c->sums + r * SUM_STRIDE;
        const float *lower = r + 1 < rows ? upper + SUM_STRIDE : upper;
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                const vf a = vf_load(upper + p * FT_PANEL + h * W);
                const vf b = vf_load(lower + p * FT_PANEL + h * W);
                sum[r / 2][p][2 * h] = vzip1q_f32(a, b);
                sum[r / 2][p][2 * h + 1] = vzip2q_f32(a, b);
            }
    }
}

ALWAYS void store_crossed(const chunk *c, const int rows, const int panels, crossed_sums sum) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                const vf a = sum[r / 2][p][2 * h], b = sum[r / 2][p][2 * h + 1];
                float *to = c->sums + r * SUM_STRIDE + p * FT_PANEL + h * W;
                vf_store(to, r % 2 ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b));
            }
}

// Four inputs of two rows; an odd last row stands in for the one that is not there.
ALWAYS bfloat16x8_t two_rows(const chunk *c, const int rows, int row, int step) {
    const uint8_t *upper = (const uint8_t *)c->x + row * c->x_stride + step * 4;
    const uint8_t *lower = row + 1 < rows ? upper + c->x_stride : upper;
    return vreinterpretq_bf16_u8(vcombine_u8(vld1_u8(upper), vld1_u8(lower)));
}

ALWAYS void pair_steps_of_more(const chunk *c, const int rows, const int panels) {
    crossed_sums sum;
    load_crossed(c, rows, panels, sum);
    for (int i = 0; i < c->steps; i += 2) {
        bfloat16x8_t x[3];
        fetch_ahead(c, 0, panels, i, 1);
        fetch_ahead(c, 0, panels, i + 1, 1);
        UNROLL for (int r = 0; r < rows; r += 2) x[r / 2] = two_rows(c, rows, r, i);
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int h = 0; h < HALVES; h++) {
                const char *at = c->weight + p * c->panel_stride + i * STEP_BYTES + h * W * 4;
                const uint32x4_t first = pairs_at(at), second = pairs_at(at + STEP_BYTES);
                const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
                const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
                UNROLL for (int r = 0; r < rows; r += 2) {
                    vf *const to = &sum[r / 2][p][2 * h];
                    to[0] = vbfmmlaq_f32(to[0], low, x[r / 2]);
                    to[1] = vbfmmlaq_f32(to[1], high, x[r / 2]);
                }
            }
    }
    store_crossed(c, rows, panels, sum);
}

ALWAYS void pair_steps(const chunk *c, const int rows, const int panels) {
    if (rows == 1)
        pair_steps_of_one(c, panels);
    else
        pair_steps_of_more(c, rows, panels);
}
