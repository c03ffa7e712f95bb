// Runs layers; see decoder.h.
#include "decoder.h"

#include <stdlib.h>
#include <string.h>

#include "carving.h"
#include "scalar.h"

// Activations between the calls, [rows, width] each.
typedef struct {
    char *normed;  // [hidden], with something beside [2 hidden]; also what a layer's part gives before its own norm
    char *qkv;     // [(H + 2 K) * h]
    char *heads;   // [H * h]
    char *both;    // [2 * inner]
    char *gated;   // [inner]
} buffers;

// The same room for all layers: it stays in the caches from one to the next.
static buffers make_buffers(const ft_decoder *d, int64_t rows) {
    const int64_t item = d->type == FT_BFLOAT16 ? 2 : 4;
    const int64_t heads = d->num_heads, kv = d->num_kv_heads, size = d->head_dim;
    const int64_t widths[] = {2 * d->hidden, (heads + 2 * kv) * size, heads * size, 2 * d->inner,
                              d->inner};
    int64_t bytes = 0;
    for (int i = 0; i < 5; i++) bytes += ft_round_up(rows * widths[i] * item, 64);
    char *at = ft_scratch(2, (size_t)bytes);
    if (!at) abort();
    buffers b;
    char **const all[] = {&b.normed, &b.qkv, &b.heads, &b.both, &b.gated};
    for (int i = 0; i < 5; i++) *all[i] = ft_carve(&at, rows * widths[i] * item);
    return b;
}

// A norm over part of each row of `stride` numbers, in place.
static void norm_part(const ft_decoder *d, const ft_step *step, const void *weight, void *x,
                      int64_t width, int64_t stride) {
    const ft_norm_call call = {.x = x,
                               .y = x,
                               .weight = weight,
                               .rows = step->rows,
                               .width = width,
                               .x_stride = stride,
                               .y_stride = stride,
                               .type = d->type,
                               .weight_type = d->norm_type,
                               .eps = d->eps};
    ft_norm(&call);
}

// Queries grow with their positions, in the type of the rows.
static void scale_queries(const ft_decoder *d, const ft_step *step, const void *scales, char *qkv,
                          int64_t width) {
    const int64_t item = d->type == FT_BFLOAT16 ? 2 : 4, count = (int64_t)d->num_heads * d->head_dim;
    for (int64_t r = 0; r < step->rows; r++) {
        const float scale = ft_value(scales, step->positions[r], d->type);
        char *row = qkv + r * width * item;
        if (scale == 1.0f) continue;
        for (int64_t i = 0; i < count; i++) ft_put(row, i, ft_value(row, i, d->type) * scale, d->type);
    }
}

static void norm(const ft_decoder *d, const ft_step *step, const void *weight, const void *x,
                 void *y, const void *residual) {
    const ft_norm_call call = {.x = x,
                               .y = y,
                               .residual = residual,
                               .weight = weight,
                               .rows = step->rows,
                               .width = d->hidden,
                               .x_stride = d->hidden,
                               .y_stride = d->hidden,
                               .residual_stride = d->hidden,
                               .type = d->type,
                               .weight_type = d->norm_type,
                               .eps = d->eps};
    ft_norm(&call);
}

// x becomes x + scale y, each rounded.
static void add_scaled(const ft_decoder *d, const ft_step *step, const void *y) {
    for (int64_t i = 0; i < step->rows * d->hidden; i++) {
        float scaled;
        ft_put(&scaled, 0, ft_value(y, i, d->type) * d->branch_scale, d->type);
        ft_put(step->x, i, ft_value(step->x, i, d->type) + ft_value(&scaled, 0, d->type), d->type);
    }
}

// x becomes x + y, or x + norm(y), where y is what `linear` makes of `input`.
static void add(const ft_decoder *d, const ft_step *step, const ft_linear *linear,
                const void *after, const void *input, void *room) {
    // Without a norm in between, the sum is made before the matrix' results are rounded.
    if (!after && d->branch_scale == 1.0f) {
        ft_linear_dense(linear, input, step->x, step->x, step->rows);
        return;
    }
    ft_linear_dense(linear, input, room, NULL, step->rows);
    if (!after)
        add_scaled(d, step, room);
    else
        norm(d, step, after, room, step->x, step->x);
}

static void attend(const ft_decoder *d, const ft_step *step, const ft_layer *layer, void *kv,
                   const buffers *b) {
    ft_step_kind *kind = step->kinds + layer->kind;
    const int64_t size = d->head_dim, width = (d->num_heads + 2 * d->num_kv_heads) * size;
    if (layer->whole_norms) {
        const int64_t queries = d->num_heads * size, item = d->type == FT_BFLOAT16 ? 2 : 4;
        norm_part(d, step, layer->query_norm, b->qkv, queries, width);
        norm_part(d, step, layer->key_norm, b->qkv + queries * item, d->num_kv_heads * size, width);
    }
    const ft_rotary_call rotary = {.qkv = b->qkv,
                                   .kv = kv,
                                   .cos = kind->cos,
                                   .sin = kind->sin,
                                   .positions = step->positions,
                                   .slots = step->slots,
                                   .query_norm = layer->whole_norms ? NULL : layer->query_norm,
                                   .key_norm = layer->whole_norms ? NULL : layer->key_norm,
                                   .first_slot = step->first_slot,
                                   .rows = step->rows,
                                   .qkv_stride = width,
                                   .kv_stride = step->kv_stride,
                                   .num_heads = d->num_heads,
                                   .num_kv_heads = d->num_kv_heads,
                                   .head_dim = d->head_dim,
                                   .width = (int32_t)kind->width,
                                   .type = d->type,
                                   .kv_type = kind->attention.shape->kv_type,
                                   .norm_type = d->norm_type,
                                   .eps = d->eps};
    // Keys and values go to the store before attention reads it, so a span's tokens see each other.
    ft_rotary(&rotary);
    if (kind->query_scale) scale_queries(d, step, kind->query_scale, b->qkv, width);
    ft_attention_call *call = &kind->attention;
    call->q = b->qkv;
    call->q_stride = width;
    call->kv = kv;
    call->kv_stride = step->kv_stride;
    call->sinks = layer->sinks;
    call->out = b->heads;
    call->out_stride = d->num_heads * size;
    ft_attention_run(call, kind->units, kind->num_units);
}

// The normed stream, or the stream itself where there is no norm.
static const void *normed(const ft_decoder *d, const ft_step *step, const void *weight, char *room) {
    if (!weight) return step->x;
    norm(d, step, weight, step->x, room, NULL);
    return room;
}

// What qkv is given: the normed stream, behind the normed rows beside it where the layer has some.
static const void *enter(const ft_decoder *d, const ft_step *step, const ft_layer *layer, char *room) {
    if (!layer->beside_norm) return normed(d, step, layer->attention_norm, room);
    const size_t bytes = (size_t)d->hidden * (d->type == FT_BFLOAT16 ? 2 : 4);
    ft_norm_call call = {.x = step->beside,
                         .y = room,
                         .weight = layer->beside_norm,
                         .rows = step->rows,
                         .width = d->hidden,
                         .x_stride = d->hidden,
                         .y_stride = 2 * d->hidden,
                         .type = d->type,
                         .weight_type = d->norm_type,
                         .eps = d->eps};
    ft_norm(&call);
    call.x = step->x;
    call.y = room + bytes;
    call.weight = layer->attention_norm;
    ft_norm(&call);
    // Some heads were trained with the normed rows as what residuals are added to.
    if (!layer->from_norm) return room;
    for (int64_t r = 0; r < step->rows; r++)
        memcpy((char *)step->x + (size_t)r * bytes, room + (size_t)(2 * r + 1) * bytes, bytes);
    return room;
}

// x becomes x + y, or x + norm(y), where y is what the experts make of the normed stream.
static void mix(const ft_decoder *d, const ft_step *step, const ft_layer *layer, const void *input,
                const buffers *b) {
    const size_t bytes = (size_t)(step->rows * d->hidden) * (d->type == FT_BFLOAT16 ? 2 : 4);
    char *const room = b->normed + bytes;
    const int at_once = !layer->after_mlp && d->branch_scale == 1.0f;
    const ft_experts_rows rows = {.x = input,
                                  .y = at_once ? step->x : room,
                                  .residual = at_once ? step->x : NULL,
                                  .rows = step->rows,
                                  .distinct = step->distinct};
    ft_experts_run(layer->experts, &rows);
    if (layer->after_mlp)
        norm(d, step, layer->after_mlp, room, step->x, step->x);
    else if (!at_once)
        add_scaled(d, step, room);
}

static void run_layer(const ft_decoder *d, const ft_step *step, const ft_layer *layer, void *kv,
                      const buffers *b) {
    const void *input = enter(d, step, layer, b->normed);
    ft_linear_dense(layer->qkv, input, b->qkv, NULL, step->rows);
    attend(d, step, layer, kv, b);
    // From here on `normed` is free again: the layer's input has been used.
    add(d, step, layer->out, layer->after_attention, b->heads, b->normed);
    input = normed(d, step, layer->mlp_norm, b->normed);
    if (layer->experts) {
        mix(d, step, layer, input, b);
        return;
    }
    ft_linear_dense(layer->gate_up, input, b->both, NULL, step->rows);
    const ft_gate_call gate = {.x = b->both,
                               .y = b->gated,
                               .rows = step->rows,
                               .width = d->inner,
                               .x_stride = 2 * d->inner,
                               .y_stride = d->inner,
                               .type = d->type,
                               .activation = d->activation};
    ft_gate(&gate);
    add(d, step, layer->down, layer->after_mlp, b->gated, b->normed);
}

// The residual stream as a layer is given it, to where drafters read it.
static void keep(const ft_decoder *d, const ft_step *step, char *kept) {
    const size_t bytes = (size_t)d->hidden * (d->type == FT_BFLOAT16 ? 2 : 4);
    for (int64_t row = 0; row < step->rows; row++) {
        const int64_t slot = step->slots ? step->slots[row] : step->first_slot + row;
        memcpy(kept + slot * step->kept_stride, (const char *)step->x + row * bytes, bytes);
    }
}

void ft_decoder_run(const ft_decoder *decoder, const ft_step *step, int32_t first, int32_t end) {
    const buffers b = make_buffers(decoder, step->rows);
    for (int32_t i = first; i < end; i++) {
        if (step->kept && step->kept[i]) keep(decoder, step, step->kept[i]);
        run_layer(decoder, step, decoder->layers + i, step->kv[i], &b);
    }
}
