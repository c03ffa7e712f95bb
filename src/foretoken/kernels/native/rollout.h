// Drafting token after token of several sequences in one call.
//
// Each step is what a caller would do token by token: look the newest tokens up, run the layers,
// norm, head, choose the token of each row, go on one position later.
#ifndef FORETOKEN_ROLLOUT_H
#define FORETOKEN_ROLLOUT_H

#include "decoder.h"
#include "draw.h"

typedef struct {
    const ft_decoder *decoder;
    const void *embedding;  // [vocabulary, hidden], of the decoder's type
    const void *norm;       // weights of the last norm, of the decoder's norm_type
    const ft_linear *head;  // [vocabulary, hidden]; its results are float32
    const int64_t *ids;     // the token of each of its outputs; null: its number
    int32_t num_layers;
} ft_rollout_model;

typedef struct {
    const ft_draw_row *rows;  // [steps, rows]: how each token is chosen
    int64_t *tokens;          // [steps + 1, rows]: row 0 is fed first, the others are written
    float *logits;            // [steps, rows, vocabulary], or [rows, vocabulary] for all steps
    int64_t keeps_logits;     // whether the former
} ft_rollout_draws;

// Returns how many steps were drafted: fewer than `steps` where a row was left undecided.
// `step` is set for the first token: one row and one span per sequence, all layers of one kind whose
// attention call reads `spans` and `pages`; step->positions and step->slots are the two arrays given
// here again, to be written. A span starts at the token to be fed; its table covers all steps.
// x is [rows, hidden]. With step->beside the embedded tokens are put there, and x goes on from token to
// token: a head that continues its own outputs.
FT_EXPORT int64_t ft_rollout(const ft_rollout_model *model, ft_step *step, ft_span *spans,
                             const int32_t *pages, int32_t page_size, int64_t *positions,
                             int64_t *slots, const ft_rollout_draws *draws, int64_t steps);

#endif
