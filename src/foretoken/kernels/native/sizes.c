// The size of every structure that callers fill in, by name: Python compares them with its own when it
// loads the library (kernels/structures.py), since neither compiler sees the other side.
#include "allocate.h"
#include "block.h"
#include "decoder.h"
#include "embedding.h"
#include "experts.h"
#include "ggml.h"
#include "group.h"
#include "heads.h"
#include "packing.h"
#include "reject.h"
#include "rollout.h"

typedef struct {
    const char *name;  // null ends the table
    int64_t bytes;
} ft_size;

#define SIZE(type) {#type, sizeof(type)}

FT_EXPORT extern const ft_size ft_sizes[];
const ft_size ft_sizes[] = {
    SIZE(ft_linear),
    SIZE(ft_ggml_matrix),
    SIZE(ft_panel_rows),
    SIZE(ft_linear_rows),
    SIZE(ft_norm_call),
    SIZE(ft_rotary_call),
    SIZE(ft_gate_call),
    SIZE(ft_attention_shape),
    SIZE(ft_attention_call),
    SIZE(ft_attention_unit),
    SIZE(ft_span),
    SIZE(ft_draw_row),
    SIZE(ft_reject_span),
    SIZE(ft_reject_call),
    SIZE(ft_experts),
    SIZE(ft_experts_rows),
    SIZE(ft_layer),
    SIZE(ft_decoder),
    SIZE(ft_step_kind),
    SIZE(ft_step),
    SIZE(ft_stop),
    SIZE(ft_features),
    SIZE(ft_embedding),
    SIZE(ft_rollout_model),
    SIZE(ft_rollout_call),
    SIZE(ft_mlp_stage),
    SIZE(ft_mlp),
    SIZE(ft_medusa_block),
    SIZE(ft_medusa),
    SIZE(ft_head_call),
    SIZE(ft_block_layer),
    SIZE(ft_block_kind),
    SIZE(ft_block_model),
    SIZE(ft_block_call),
    SIZE(ft_draft_option),
    SIZE(ft_allocate_call),
    SIZE(ft_seat),
    SIZE(ft_group),
    {NULL, 0},
};
