// Runs layers; see decoder.h.
#include "decoder.h"

#include <stdlib.h>
#include <string.h>

#include "carving.h"
#include "scalar.h"

// Activations between the calls, [rows, width] each.
typedef struct {
    char *normed;  // [3 hidden], of which q, k, v have one, or two with something beside; also what a
                   // layer's parts give before their own norms
    char *qkv;     // [(H + 2 K) * h]
    char *heads;   // [H * h], also behind their gates: [2 * H * h]
    char *both;    // [2 * inner], or [2 * width] of inputs
    char *gated;   // [inner]
} buffers;

static const ft_attention_shape *shape_of(const ft_step *step, const ft_layer *layer) {
    return step->kinds[layer->kind].attention.shape;
}

static int64_t queries_of(const ft_attention_shape *shape) {
    return (int64_t)shape->num_heads * shape->head_dim;
}

static int64_t keys_of(const ft_attention_shape *shape) {
    return (int64_t)shape->num_kv_heads * shape->head_dim;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The same room for all layers: it stays in the caches from one to the next.
static buffers make_buffers(const ft_decoder *d, const ft_step *step, int32_t first, int32_t end) {
    const int64_t item = d->type == FT_BFLOAT16 ? 2 : 4, rows = step->rows;
    int64_t widths[5] = {3 * d->hidden};
    for (int32_t i = first; i < end; i++) {
        const ft_layer *layer = d->layers + i;
        const int64_t queries = queries_of(shape_of(step, layer));
        widths[1] = larger(widths[1], queries + 2 * keys_of(shape_of(step, layer)));
        widths[2] = larger(widths[2], (layer->gate ? 3 : 1) * queries);
        if (layer->down) widths[4] = larger(widths[4], layer->down->inputs);
        if (layer->input_back) widths[4] = larger(widths[4], layer->input_back->inputs);
    }
    widths[3] = 2 * widths[4];
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
                          int64_t width, int64_t count) {
    const int64_t item = d->type == FT_BFLOAT16 ? 2 : 4;
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

static void gate(const ft_decoder *d, const ft_step *step, const void *both, void *gated, int64_t width,
                 int32_t activation) {
    const ft_gate_call call = {.x = both,
                               .y = gated,
                               .rows = step->rows,
                               .width = width,
                               .x_stride = 2 * width,
                               .y_stride = width,
                               .type = d->type,
                               .activation = activation};
    ft_gate(&call);
}

// What attention gives to `b->heads`, for the `input` of a layer.
static void attend(const ft_decoder *d, const ft_step *step, const ft_layer *layer, void *kv,
                   const void *input, const buffers *b) {
    ft_step_kind *kind = step->kinds + layer->kind;
    const ft_attention_shape *shape = kind->attention.shape;
    const int64_t queries = queries_of(shape), width = queries + (layer->keeps ? 2 * keys_of(shape) : 0);
    const int64_t item = d->type == FT_BFLOAT16 ? 2 : 4;
    ft_linear_dense(layer->qkv, input, b->qkv, NULL, step->rows);
    if (layer->whole_norms) {
        norm_part(d, step, layer->query_norm, b->qkv, queries, width);
        norm_part(d, step, layer->key_norm, b->qkv + queries * item, keys_of(shape), width);
    }
    const ft_rotary_call rotary = {.qkv = b->qkv,
                                   .kv = kv,
                                   .cos = kind->cos,
                                   .sin = kind->sin,
                                   .positions = step->positions,
                                   .slots = step->slots,
                                   .query_norm = layer->whole_norms ? NULL : layer->query_norm,
                                   .key_norm = layer->whole_norms ? NULL : layer->key_norm,
                                   .value_norm = layer->value_norm,
                                   .first_slot = step->first_slot,
                                   .rows = step->rows,
                                   .qkv_stride = width,
                                   .kv_stride = kind->kv_stride,
                                   .num_heads = shape->num_heads,
                                   .num_kv_heads = layer->keeps ? shape->num_kv_heads : 0,
                                   .head_dim = shape->head_dim,
                                   .width = (int32_t)kind->width,
                                   .type = d->type,
                                   .kv_type = shape->kv_type,
                                   .norm_type = d->norm_type,
                                   .turns_first = (int32_t)layer->turns_first,
                                   .eps = d->eps};
    // Keys and values go to the store before attention reads it, so a span's tokens see each other.
    ft_rotary(&rotary);
    if (kind->query_scale) scale_queries(d, step, kind->query_scale, b->qkv, width, queries);
    // With a gate its numbers stand before those of a row.
    char *const gates = b->heads + step->rows * queries * item;
    ft_attention_call *call = &kind->attention;
    call->q = b->qkv;
    call->q_stride = width;
    call->kv = kv;
    call->kv_stride = kind->kv_stride;
    call->sinks = layer->sinks;
    call->out = layer->gate ? gates + queries * item : b->heads;
    call->out_stride = layer->gate ? 2 * queries : queries;
    ft_attention_run(call, kind->units, kind->num_units);
    if (!layer->gate) return;
    const ft_linear_rows rows = {.x = input, .y = gates, .rows = step->rows, .x_stride = d->hidden,
                                 .y_stride = 2 * queries};
    ft_linear_run(layer->gate, &rows);
    gate(d, step, gates, b->heads, queries, FT_SIGMOID);
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

// x becomes x + norm(y), where y is what gate_up and down make of the stream, and the experts, each
// between norms.
static void mix_beside(const ft_decoder *d, const ft_step *step, const ft_layer *layer, const buffers *b) {
    const size_t bytes = (size_t)(step->rows * d->hidden) * (d->type == FT_BFLOAT16 ? 2 : 4);
    char *const plain = b->normed, *const mixed = plain + bytes, *const by = mixed + bytes;
    ft_linear_dense(layer->down, b->gated, plain, NULL, step->rows);
    norm(d, step, layer->after_plain, plain, plain, NULL);
    norm(d, step, layer->experts_norm, step->x, mixed, NULL);
    norm(d, step, layer->router_norm, step->x, by, NULL);
    const ft_experts_rows rows = {.x = mixed, .by = by, .y = mixed, .rows = step->rows,
                                  .distinct = step->distinct};
    ft_experts_run(layer->experts, &rows);
    norm(d, step, layer->after_experts, mixed, plain, plain);
    norm(d, step, layer->after_mlp, plain, step->x, step->x);
}

// x becomes x + norm(back(act(gate(x)) given)), where `given` is what layer `number` gets of each row.
static void take_input(const ft_decoder *d, const ft_step *step, const ft_layer *layer, int32_t number,
                       const buffers *b) {
    const int64_t width = layer->input_back->inputs, item = d->type == FT_BFLOAT16 ? 2 : 4;
    const ft_linear_rows rows = {.x = step->x, .y = b->both, .rows = step->rows, .x_stride = d->hidden,
                                 .y_stride = 2 * width};
    ft_linear_run(layer->input_gate, &rows);
    for (int64_t r = 0; r < step->rows; r++)
        memcpy(b->both + (2 * r + 1) * width * item,
               (const char *)step->inputs + (r * step->inputs_stride + number * width) * item,
               (size_t)(width * item));
    gate(d, step, b->both, b->gated, width, d->activation);
    ft_linear_dense(layer->input_back, b->gated, b->normed, NULL, step->rows);
    norm(d, step, layer->input_norm, b->normed, step->x, step->x);
}

static void run_layer(const ft_decoder *d, const ft_step *step, int32_t number, const buffers *b) {
    const ft_layer *layer = d->layers + number;
    void *const kv = step->kv[number];
    attend(d, step, layer, kv, enter(d, step, layer, b->normed), b);
    // From here on `normed` is free again: the layer's input has been used.
    add(d, step, layer->out, layer->after_attention, b->heads, b->normed);
    const void *input = normed(d, step, layer->mlp_norm, b->normed);
    if (layer->gate_up) {
        ft_linear_dense(layer->gate_up, input, b->both, NULL, step->rows);
        gate(d, step, b->both, b->gated, layer->down->inputs, d->activation);
    }
    if (!layer->experts)
        add(d, step, layer->down, layer->after_mlp, b->gated, b->normed);
    else if (layer->gate_up)
        mix_beside(d, step, layer, b);
    else
        mix(d, step, layer, input, b);
    if (layer->input_gate) take_input(d, step, layer, number, b);
    for (int64_t i = 0; layer->scale != 1.0f && i < step->rows * d->hidden; i++)
        ft_put(step->x, i, ft_value(step->x, i, d->type) * layer->scale, d->type);
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
    const buffers b = make_buffers(decoder, step, first, end);
    for (int32_t i = first; i < end; i++) {
        if (step->kept && step->kept[i]) keep(decoder, step, step->kept[i]);
        run_layer(decoder, step, i, &b);
    }
}
