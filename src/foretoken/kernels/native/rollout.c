// See rollout.h.
#include "rollout.h"

#include <string.h>

static inline float widen(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int64_t best_float(const float *values, int64_t count) {
    int64_t best = 0;
    float most = values[0];
    for (int64_t i = 1; i < count; i++)
        if (values[i] > most) most = values[i], best = i;
    return best;
}

static int64_t best_half(const uint16_t *values, int64_t count) {
    int64_t best = 0;
    float most = widen(values[0]);
    for (int64_t i = 1; i < count; i++)
        if (widen(values[i]) > most) most = widen(values[i]), best = i;
    return best;
}

// The index of the largest of `count` values. Blocks are compared by their largest value first, which
// a compiler turns into vector code; the index is then looked for in one block.
enum { BLOCK = 256 };

static float largest_float(const float *values, int64_t count) {
    float most = values[0];
    for (int64_t i = 1; i < count; i++) most = values[i] > most ? values[i] : most;
    return most;
}

// bfloat16 numbers order like signed integers once negative ones are mirrored.
static inline int32_t ordered(uint16_t half) {
    return half & 0x8000 ? -(int32_t)(half & 0x7fff) : (int32_t)half;
}

static int32_t largest_half(const uint16_t *values, int64_t count) {
    int32_t most = ordered(values[0]);
    for (int64_t i = 1; i < count; i++) {
        const int32_t value = ordered(values[i]);
        most = value > most ? value : most;
    }
    return most;
}

static int64_t best(const void *values, int64_t count, int32_t type) {
    int64_t at = 0;
    if (type == FT_FLOAT32) {
        const float *v = values;
        float most = largest_float(v, count < BLOCK ? count : BLOCK);
        for (int64_t i = BLOCK; i < count; i += BLOCK) {
            const float here = largest_float(v + i, count - i < BLOCK ? count - i : BLOCK);
            if (here > most) most = here, at = i;
        }
        return at + best_float(v + at, count - at < BLOCK ? count - at : BLOCK);
    }
    const uint16_t *v = values;
    int32_t most = largest_half(v, count < BLOCK ? count : BLOCK);
    for (int64_t i = BLOCK; i < count; i += BLOCK) {
        const int32_t here = largest_half(v + i, count - i < BLOCK ? count - i : BLOCK);
        if (here > most) most = here, at = i;
    }
    return at + best_half(v + at, count - at < BLOCK ? count - at : BLOCK);
}

void ft_rollout(const ft_rollout_model *model, ft_step *step, ft_span *spans, const int32_t *pages,
                int32_t page_size, int64_t *positions, int64_t *slots, int64_t *tokens,
                void *logits, int64_t steps) {
    const ft_decoder *d = model->decoder;
    const int64_t rows = step->rows, vocabulary = model->head->outputs;
    const size_t item = d->type == FT_BFLOAT16 ? 2 : 4, row_bytes = (size_t)d->hidden * item;
    const size_t logit_bytes = model->head->y_type == FT_BFLOAT16 ? 2 : 4;
    for (int64_t at = 0; at < steps; at++, tokens += rows) {
        for (int64_t r = 0; r < rows; r++) {
            const char *row = (const char *)model->embedding + (size_t)tokens[r] * row_bytes;
            memcpy((char *)step->x + (size_t)r * row_bytes, row, row_bytes);
            const int64_t position = positions[r];
            const int32_t page = pages[spans[r].pages + position / page_size];
            slots[r] = (int64_t)page * page_size + position % page_size;
        }
        ft_decoder_run(d, step, 0, model->num_layers);
        const ft_norm_call norm = {.x = step->x,
                                   .y = step->x,
                                   .weight = model->norm,
                                   .rows = rows,
                                   .width = d->hidden,
                                   .x_stride = d->hidden,
                                   .y_stride = d->hidden,
                                   .type = d->type,
                                   .weight_type = d->norm_type,
                                   .eps = d->eps};
        ft_norm(&norm);
        ft_linear_dense(model->head, step->x, logits, NULL, rows);
        for (int64_t r = 0; r < rows; r++) {
            const char *row = (const char *)logits + (size_t)(r * vocabulary) * logit_bytes;
            tokens[rows + r] = best(row, vocabulary, model->head->y_type);
            positions[r]++;
            spans[r].start++;
        }
    }
}
