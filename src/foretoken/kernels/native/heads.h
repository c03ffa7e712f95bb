// Drafting with heads that need one hidden state of the target: MLP speculator and Medusa.
//
// A call is a whole chain: states, outputs, and the choice of every token. Values between the
// operations are rounded to the heads' type where PyTorch's twins round them.
#ifndef FORETOKEN_HEADS_H
#define FORETOKEN_HEADS_H

#include "draw.h"
#include "stop.h"
#include "linear.h"

// s = gelu(norm(project(s) + token_scale * embedding[token]) * weight + bias), logits = head(s).
typedef struct {
    const ft_linear *project, *head;  // results of the head are float32
    const void *embedding;            // [vocabulary, inner]
    const void *weight, *bias;        // [inner]
} ft_mlp_stage;

typedef struct {
    const ft_mlp_stage *stages;
    int64_t hidden, inner, vocabulary;  // widths of the target's state and of the stages'
    float token_scale;
    int32_t type;
    int64_t norms_input;  // s = norm(s) * sqrt(1 / 2) before the first stage
} ft_mlp;

// z = z + silu(linear(z)), or silu(linear(down(z))).
typedef struct {
    const ft_linear *down, *linear;
} ft_medusa_block;

typedef struct {
    const ft_medusa_block *blocks;   // [heads, layers]
    const ft_linear *const *mixers;  // [heads], what makes the last state; or null
    const ft_linear *const *tops;    // [heads], with mixers: [1]; their results are float32
    int64_t hidden, vocabulary, layers;
    int32_t type;
} ft_medusa;

typedef struct {
    const void *features;   // hidden states of the target by slot, feature_bytes apart
    const int64_t *slots;   // [rows]: where each sequence's is
    const int64_t *fed;     // [rows]: the newest tokens
    void *state;            // written: MLP [rows, widest], Medusa [steps, rows, hidden]
    void *room;             // written: MLP [rows, inner], Medusa [2 * rows, hidden]
    const ft_draw_row *draws;  // [steps, rows]
    int64_t *tokens;           // [steps, rows], written
    float *logits;  // [steps, rows, vocabulary], or, if MLP does not keep them, [rows, vocabulary]
    int64_t feature_bytes, rows, steps, keeps_logits;
    const ft_stop *stop;  // or null
} ft_head_call;

// Return how many steps were drafted: fewer than `steps` where a row was left undecided, or
// where `stop` ended all.
FT_EXPORT int64_t ft_mlp_draft(const ft_mlp *net, const ft_head_call *call);
FT_EXPORT int64_t ft_medusa_draft(const ft_medusa *net, const ft_head_call *call);

#endif
