// Drafting several tokens of several sequences in one call, first pass included.
//
// Each step is what a caller would do token by token: feed what is new, run the layers, norm, head,
// choose the token of each sequence, go on one position later with that token alone.
#ifndef FORETOKEN_ROLLOUT_H
#define FORETOKEN_ROLLOUT_H

#include "decoder.h"
#include "draw.h"
#include "embedding.h"
#include "feature_rows.h"
#include "stop.h"

// Layers of one kind, what stands around them, and their keys and values.
typedef struct {
    const ft_decoder *decoder;
    const ft_embedding *embedding;  // rows [hidden], of the decoder's type
    const void *norm;       // weights of the last norm, of the decoder's norm_type
    const ft_linear *head;  // [outputs, hidden]; its results are float32
    const int64_t *ids;     // the token of each output, ascending; null: its number
    const ft_linear *mixer;  // from the features of a slot to x; or null
    const ft_attention_shape *shape;
    const void *cos, *sin;  // tables of ft_rotary_call
    void *const *kv;        // the layers' stores
    ft_features features;    // as the mixer wants them
    int64_t width, kv_stride, vocabulary;  // width: of cos and sin
    int32_t num_layers;
} ft_rollout_model;

typedef struct {
    ft_span *spans;        // of the first pass, changed; their tables cover all steps
    const int32_t *pages;
    const int64_t *fed;    // [rows]: tokens of the first pass, span after span
    ft_attention_unit *units;    // room for rows * num_kv_heads
    int64_t *positions, *slots;  // [rows], written
    void *x;       // [rows, hidden]: the residual stream, changed; row i ends as span i's newest
    void *beside;  // [rows, hidden], if the layers take the embedded tokens beside x; else null
    void *gathered;  // [rows] of features; null: x is given, where it is not embedded here
    const void *masks;  // [steps - 1, hidden]; or null
    const ft_draw_row *draws;  // [steps, spans]: how each token is chosen
    int64_t *tokens;           // [steps, spans], written
    float *logits;  // [steps, spans, vocabulary], or [spans, vocabulary] for all steps
    float *own;     // [spans, outputs], where logits are to be those of all ids; or null
    int64_t num_spans, rows, steps, keeps_logits;
    const ft_stop *stop;  // or null
    int64_t anchored;  // whether masks are added to what stands before the first of them
} ft_rollout_call;

// Returns how many steps were drafted: fewer than `steps` where a row that counts was left undecided;
// the logits of that step are in their place, and x is what they were made of. With `stop`, fewer
// too where it ended all.
// With `beside`, x goes on from token to token: a head that continues its own outputs. Without `own`
// and with `ids`, draws are to be of the best output, and logits hold the outputs.
// With `masks`, all tokens come of the first pass: each span ends in `steps` - 1 rows whose features
// are not known, for which the masks stand, and logits and own are [steps, spans, ...].
FT_EXPORT int64_t ft_rollout(const ft_rollout_model *model, const ft_rollout_call *call);

#endif
