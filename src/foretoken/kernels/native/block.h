// Drafting blocks of several sequences in one call: DFlash and DSpark.
//
// Context rows are hidden states of the target. Every layer makes keys and values of them and nothing
// more. The rows of a block are the newest token and masks behind it; they see the context before
// them and one another, as their layer says. Then every row of a draft gives its token, after the one
// before it where there is a map from that to its logits.
#ifndef FORETOKEN_BLOCK_H
#define FORETOKEN_BLOCK_H

#include "attention.h"
#include "draw.h"
#include "embedding.h"
#include "feature_rows.h"
#include "linear.h"
#include "rows.h"
#include "stop.h"

typedef struct {
    const ft_linear *q, *kv, *out, *gate_up, *down;  // kv: keys, then values
    const void *attention_norm, *mlp_norm;           // weights [hidden]
    const void *query_norm, *key_norm;               // [head_dim]
    int64_t kind;
} ft_block_layer;

// What layers of a kind share.
typedef struct {
    const ft_attention_shape *shape;
    int64_t causal;  // whether a row sees no later row of its block
} ft_block_kind;

// Layers, what stands around them, and their keys and values.
typedef struct {
    const ft_block_layer *layers;
    const ft_block_kind *kinds;
    const ft_linear *mixer;        // from the features of a slot to a context row, before its norm
    const void *context_norm;      // weights [hidden] of that norm
    const ft_embedding *embedding; // rows [hidden]
    const void *norm;              // weights of the last norm
    const ft_linear *head;         // [outputs, hidden]; its results are float32
    const int64_t *ids;            // the token of each output, ascending; null: its number
    const void *shorts;            // [tokens, rank], of the token before a row; or null
    const ft_linear *follow;       // [outputs, rank], float32: what that adds to the logits; or null
    const float *judge;            // [hidden], [rank] with shorts, and a bias: how sure a draft is; or null
    const void *cos, *sin;         // tables of ft_rotary_call
    void *const *kv;               // the layers' stores
    int64_t hidden, inner, rank, vocabulary;
    int64_t width, kv_stride;
    ft_features features;          // as the mixer wants them
    int32_t num_layers, num_kinds, num_heads, num_kv_heads, head_dim;
    int32_t type, norm_type;  // of all activations; of all weights of norms
    float eps, embedding_scale, output_scale;
} ft_block_model;

typedef struct {
    const ft_span *context;  // rows of what is new; pages are those of the blocks
    ft_span *blocks;         // rows count from 0; paths are written
    const int32_t *pages;
    const int64_t *fed;           // [rows]: tokens of the blocks
    ft_attention_unit *units;     // room for num_kinds * rows * num_kv_heads
    int64_t *positions, *slots;   // [num_fed + rows], written: context rows first
    void *joined;    // [num_fed + rows, hidden], written; without `gathered` it has the context rows
    void *gathered;  // [num_fed] of features; or null
    void *x;         // [rows, hidden], written: outputs of the rows before the last norm
    void *outputs;   // [steps, num_blocks, hidden], written; without steps: [rows, hidden]
    void *before;    // [num_blocks, rank], with model->shorts
    float *added;    // [num_blocks, outputs], with model->follow
    const ft_draw_row *draws;  // [steps, num_blocks]
    int64_t *tokens;           // [steps, num_blocks], written
    float *logits;  // [steps, num_blocks, vocabulary], or, without own, of outputs
    float *own;     // [steps, num_blocks, outputs], where logits are to be those of all ids; or null
    int64_t num_context, num_blocks, num_fed, rows;
    int64_t steps;      // drafts of each block; 0: none are chosen
    int64_t first_row;  // the row of a block that gives its first draft
    const ft_stop *stop;  // or null
} ft_block_call;

// Returns how many steps were drafted: fewer than `steps` where a row that counts was left undecided,
// or where `stop` ended all. Without steps: 0.
FT_EXPORT int64_t ft_block_draft(const ft_block_model *model, const ft_block_call *call);

#endif
