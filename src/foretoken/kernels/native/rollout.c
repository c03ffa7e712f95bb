// See rollout.h.
#include "rollout.h"

#include <string.h>

// The index of the largest of `count` values, the lowest of equal ones. Blocks are compared by their
// largest value first, which a compiler turns into vector code; the index is then looked for in one.
enum { BLOCK = 256 };

static float largest(const float *values, int64_t count) {
    float most = values[0];
    for (int64_t i = 1; i < count; i++) most = values[i] > most ? values[i] : most;
    return most;
}

static int64_t best(const float *values, int64_t count) {
    int64_t at = 0;
    float most = largest(values, count < BLOCK ? count : BLOCK);
    for (int64_t i = BLOCK; i < count; i += BLOCK) {
        const float here = largest(values + i, count - i < BLOCK ? count - i : BLOCK);
        if (here > most) most = here, at = i;
    }
    while (at + 1 < count && values[at] < most) at++;
    return at;
}

void ft_rollout(const ft_rollout_model *model, ft_step *step, ft_span *spans, const int32_t *pages,
                int32_t page_size, int64_t *positions, int64_t *slots, int64_t *tokens,
                float *logits, int64_t steps) {
    const ft_decoder *d = model->decoder;
    const int64_t rows = step->rows, vocabulary = model->head->outputs;
    const size_t item = d->type == FT_BFLOAT16 ? 2 : 4, row_bytes = (size_t)d->hidden * item;
    char *const embedded = step->beside ? step->beside : step->x;
    for (int64_t at = 0; at < steps; at++, tokens += rows) {
        for (int64_t r = 0; r < rows; r++) {
            const char *row = (const char *)model->embedding + (size_t)tokens[r] * row_bytes;
            memcpy(embedded + (size_t)r * row_bytes, row, row_bytes);
            const int64_t position = positions[r];
            const int32_t page = pages[spans[r].pages + position / page_size];
            slots[r] = (int64_t)page * page_size + position % page_size;
        }
        ft_decoder_run(d, step, 0, model->num_layers);
        const ft_norm_call norm = {.x = step->x,
                                   .y = embedded,
                                   .weight = model->norm,
                                   .rows = rows,
                                   .width = d->hidden,
                                   .x_stride = d->hidden,
                                   .y_stride = d->hidden,
                                   .type = d->type,
                                   .weight_type = d->norm_type,
                                   .eps = d->eps};
        ft_norm(&norm);
        ft_linear_dense(model->head, embedded, logits, NULL, rows);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t token = best(logits + r * vocabulary, vocabulary);
            tokens[rows + r] = model->ids ? model->ids[token] : token;
            positions[r]++;
            spans[r].start++;
        }
    }
}
