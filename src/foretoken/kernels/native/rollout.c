// See rollout.h.
#include "rollout.h"

#include <string.h>

int64_t ft_rollout(const ft_rollout_model *model, ft_step *step, ft_span *spans,
                   const int32_t *pages, int32_t page_size, int64_t *positions, int64_t *slots,
                   const ft_rollout_draws *draws, int64_t steps) {
    const ft_decoder *d = model->decoder;
    const int64_t rows = step->rows, vocabulary = model->head->outputs;
    const size_t item = d->type == FT_BFLOAT16 ? 2 : 4, row_bytes = (size_t)d->hidden * item;
    char *const embedded = step->beside ? step->beside : step->x;
    for (int64_t at = 0; at < steps; at++) {
        int64_t *tokens = draws->tokens + at * rows;
        float *logits = draws->logits + (draws->keeps_logits ? at * rows * vocabulary : 0);
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
        ft_draw(draws->rows + at * rows, rows, logits, vocabulary, tokens + rows);
        for (int64_t r = 0; r < rows; r++) {
            if (tokens[rows + r] == FT_UNDECIDED) return at;
            if (model->ids) tokens[rows + r] = model->ids[tokens[rows + r]];
            positions[r]++;
            spans[r].start++;
        }
    }
    return steps;
}
