// See block.h.
#include "block.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "carving.h"
#include "scalar.h"

enum { MOST_KINDS = 8 };

typedef struct {
    const ft_block_model *model;
    const ft_block_call *call;
    ft_attention_call attention[MOST_KINDS];
    int64_t num_units[MOST_KINDS];
    size_t item, row_bytes;  // of a number and of a row of hidden
    int64_t all, heads, width;  // rows with the context's; numbers of query heads, and of q, k and v
    char *qkv, *mixed, *normed, *both, *gated;
} state;

static void *at_row(const void *start, int64_t row, size_t bytes) {
    return (char *)start + (size_t)row * bytes;
}

// Positions and slots of the rows of spans, from row `first` on.
static void place(const state *s, const ft_span *spans, int64_t count, int64_t first) {
    const ft_block_call *call = s->call;
    const int32_t size = s->model->kinds->shape->page_size;
    for (int64_t i = 0; i < count; i++)
        for (int32_t t = 0; t < spans[i].num_rows; t++) {
            const int64_t position = spans[i].start + t, row = first + spans[i].row + t;
            const int32_t page = call->pages[spans[i].pages + position / size];
            call->positions[row] = position;
            call->slots[row] = (int64_t)page * size + position % size;
        }
}

static void norm(const state *s, const void *weight, const void *x, void *y, int64_t rows) {
    const ft_block_model *m = s->model;
    const ft_norm_call call = {.x = x, .y = y, .weight = weight, .rows = rows, .width = m->hidden,
                               .x_stride = m->hidden, .y_stride = m->hidden, .type = m->type,
                               .weight_type = m->norm_type, .eps = m->eps};
    ft_norm(&call);
}

// Context rows from the features of their slots.
static void mix_features(const state *s) {
    const ft_block_model *m = s->model;
    const ft_block_call *call = s->call;
    ft_gather_features(&m->features, call->slots, call->num_fed, call->gathered);
    ft_linear_dense(m->mixer, call->gathered, call->joined, NULL, call->num_fed);
    norm(s, m->context_norm, call->joined, call->joined, call->num_fed);
}

static void embed(const state *s) {
    const ft_block_model *m = s->model;
    void *const x = s->call->x;
    ft_embed(m->embedding, s->call->fed, s->call->rows, x);
    if (m->embedding_scale == 1.0f) return;
    for (int64_t i = 0; i < s->call->rows * m->hidden; i++)
        ft_put(x, i, ft_value(x, i, m->type) * m->embedding_scale, m->type);
}

// Room between the matrices, the same for all layers.
static void lay_out(state *s) {
    const ft_block_model *m = s->model;
    const int64_t item = (int64_t)s->item, rows = s->call->rows;
    const int64_t sizes[] = {s->all * s->width, rows * s->heads, rows * m->hidden, rows * 2 * m->inner,
                             rows * m->inner};
    char **const places[] = {&s->qkv, &s->mixed, &s->normed, &s->both, &s->gated};
    int64_t bytes = 0;
    for (int i = 0; i < 5; i++) bytes += ft_round_up(sizes[i] * item, 64);
    char *at = ft_scratch(2, (size_t)bytes);
    if (!at) abort();
    for (int i = 0; i < 5; i++) *places[i] = ft_carve(&at, sizes[i] * item);
}

static void multiply(const state *s, const ft_linear *linear, int64_t row, int64_t column, int64_t rows) {
    const int64_t hidden = s->model->hidden;
    const ft_linear_rows call = {.x = at_row(s->call->joined, row, s->row_bytes),
                                 .y = s->qkv + (size_t)(row * s->width + column) * s->item,
                                 .rows = rows, .x_stride = hidden, .y_stride = s->width};
    if (rows) ft_linear_run(linear, &call);
}

// Turn queries and keys of rows [first, first + rows) and write keys and values to the store; rows of
// the context have no queries.
static void turn(const state *s, const ft_block_layer *layer, void *kv, int64_t first, int64_t rows) {
    const ft_block_model *m = s->model;
    const int context = first < s->call->num_fed;
    const int64_t column = first * s->width + (context ? s->heads : 0);
    const ft_rotary_call call = {.qkv = s->qkv + (size_t)column * s->item, .kv = kv,
                                 .cos = m->cos, .sin = m->sin,
                                 .positions = s->call->positions + first,
                                 .slots = s->call->slots + first, .query_norm = layer->query_norm,
                                 .key_norm = layer->key_norm, .rows = rows, .qkv_stride = s->width,
                                 .kv_stride = m->kv_stride, .num_heads = context ? 0 : m->num_heads,
                                 .num_kv_heads = m->num_kv_heads, .head_dim = m->head_dim,
                                 .width = (int32_t)m->width, .type = m->type,
                                 .kv_type = m->kinds->shape->kv_type, .norm_type = m->norm_type,
                                 .eps = m->eps};
    if (rows) ft_rotary(&call);
}

static void attend(state *s, const ft_block_layer *layer, const void *kv) {
    const ft_block_call *call = s->call;
    ft_attention_call *attention = s->attention + layer->kind;
    // Kinds that are causal and those that are not share the spans.
    for (int64_t i = 0; i < call->num_blocks; i++)
        call->blocks[i].paths = s->model->kinds[layer->kind].causal ? FT_CHAIN : FT_TOGETHER;
    attention->q = s->qkv + (size_t)(call->num_fed * s->width) * s->item;
    attention->q_stride = s->width;
    attention->kv = kv;
    attention->kv_stride = s->model->kv_stride;
    attention->out = s->mixed;
    attention->out_stride = s->heads;
    const ft_attention_unit *units = call->units + layer->kind * call->rows * s->model->num_kv_heads;
    ft_attention_run(attention, units, s->num_units[layer->kind]);
}

static void run_layer(state *s, const ft_block_layer *layer, void *kv) {
    const ft_block_model *m = s->model;
    const ft_block_call *call = s->call;
    const int64_t fed = call->num_fed, rows = call->rows;
    // The context's rows stay as they are in all layers; the blocks' normed rows follow them.
    if (rows) norm(s, layer->attention_norm, call->x, at_row(call->joined, fed, s->row_bytes), rows);
    multiply(s, layer->kv, 0, s->heads, s->all);
    turn(s, layer, kv, 0, fed);
    if (!rows) return;
    multiply(s, layer->q, fed, 0, rows);
    turn(s, layer, kv, fed, rows);
    attend(s, layer, kv);
    ft_linear_dense(layer->out, s->mixed, call->x, call->x, rows);
    norm(s, layer->mlp_norm, call->x, s->normed, rows);
    ft_linear_dense(layer->gate_up, s->normed, s->both, NULL, rows);
    const ft_gate_call gate = {.x = s->both, .y = s->gated, .rows = rows, .width = m->inner,
                               .x_stride = 2 * m->inner, .y_stride = m->inner, .type = m->type,
                               .activation = FT_SILU};
    ft_gate(&gate);
    ft_linear_dense(layer->down, s->gated, call->x, call->x, rows);
}

// The rows that drafts come from, step by step, or all of them, after the last norm.
static void finish(const state *s) {
    const ft_block_model *m = s->model;
    const ft_block_call *call = s->call;
    const int64_t count = call->steps ? call->steps * call->num_blocks : call->rows;
    char *to = call->outputs;
    for (int64_t at = 0; at < call->steps; at++)
        for (int64_t i = 0; i < call->num_blocks; i++, to += s->row_bytes)
            memcpy(to, at_row(call->x, call->blocks[i].row + call->first_row + at, s->row_bytes), s->row_bytes);
    norm(s, m->norm, call->steps ? call->outputs : call->x, call->outputs, count);
    for (int64_t i = 0; m->output_scale != 1.0f && i < count * m->hidden; i++)
        ft_put(call->outputs, i, ft_value(call->outputs, i, m->type) * m->output_scale, m->type);
}

// What tokens before a step's rows add to their logits.
static void follow(const state *s, const int64_t *previous, float *logits) {
    const ft_block_model *m = s->model;
    const int64_t count = s->call->num_blocks, outputs = m->head->outputs;
    const size_t bytes = (size_t)m->rank * s->item;
    for (int64_t i = 0; i < count; i++)
        memcpy(at_row(s->call->before, i, bytes), at_row(m->shorts, previous[i], bytes), bytes);
    if (!m->follow) return;
    ft_linear_dense(m->follow, s->call->before, s->call->added, NULL, count);
    for (int64_t i = 0; i < count * outputs; i++) logits[i] += s->call->added[i];
}

// How sure the drafts of a step are: as the head judges, or the chances of the best outputs.
static void judge(const state *s, int64_t at, const float *logits) {
    const ft_block_model *m = s->model;
    const int64_t count = s->call->num_blocks;
    float *sure = s->call->stop->sure + at * count;
    if (!m->judge) {
        ft_sure(logits, count, m->head->outputs, sure);
        return;
    }
    const int64_t rank = m->shorts ? m->rank : 0;
    for (int64_t i = 0; i < count; i++) {
        const void *row = at_row(s->call->outputs, at * count + i, s->row_bytes);
        const void *before = rank ? at_row(s->call->before, i, (size_t)rank * s->item) : NULL;
        float sum = m->judge[m->hidden + rank];
        for (int64_t d = 0; d < m->hidden; d++) sum += m->judge[d] * ft_value(row, d, m->type);
        for (int64_t d = 0; d < rank; d++) sum += m->judge[m->hidden + d] * ft_value(before, d, m->type);
        sure[i] = 1.0f / (1.0f + expf(-sum));
    }
}

// Logits of all ids from those of the outputs; ids that the head does not have get minus infinity.
static void spread(const state *s, const float *own, float *logits) {
    const ft_block_model *m = s->model;
    const int64_t outputs = m->head->outputs, count = s->call->num_blocks;
    for (int64_t i = 0; i < count * m->vocabulary; i++) logits[i] = -INFINITY;
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < outputs; i++)
            logits[r * m->vocabulary + m->ids[i]] = own[r * outputs + i];
}

// The tokens of a step, after those before them.
static void choose(const state *s, int64_t at, const int64_t *previous) {
    const ft_block_model *m = s->model;
    const ft_block_call *call = s->call;
    const int64_t count = call->num_blocks, outputs = m->head->outputs;
    int64_t *tokens = call->tokens + at * count;
    float *own = (call->own ? call->own : call->logits) + at * count * outputs, *logits = own;
    if (m->shorts) follow(s, previous, own);
    if (call->stop) judge(s, at, own);
    if (call->own) spread(s, own, logits = call->logits + at * count * m->vocabulary);
    const int as_outputs = m->ids && !call->own;
    ft_draw(call->draws + at * count, count, logits, as_outputs ? outputs : m->vocabulary, tokens);
    for (int64_t r = 0; as_outputs && r < count; r++)
        if (tokens[r] != FT_UNDECIDED) tokens[r] = m->ids[tokens[r]];
}

static int64_t draft(const state *s) {
    const ft_block_call *call = s->call;
    const int64_t count = call->num_blocks;
    int64_t *newest = ft_scratch(3, (size_t)count * sizeof *newest);
    if (!newest) abort();
    for (int64_t i = 0; i < count; i++) newest[i] = call->fed[call->blocks[i].row];
    ft_linear_dense(s->model->head, call->outputs, call->own ? call->own : call->logits, NULL,
                    call->steps * count);
    const int64_t *previous = newest;
    for (int64_t at = 0; at < call->steps; at++) {
        int64_t *tokens = call->tokens + at * count;
        choose(s, at, previous);
        // A row within rounding of a tie is its twin's to decide, and later tokens depend on it.
        if (ft_stop_open(call->stop, at, count, tokens)) return at;
        if (call->stop && !ft_stop_after(call->stop, at, count)) return at + 1;
        previous = tokens;
    }
    return call->steps;
}

int64_t ft_block_draft(const ft_block_model *model, const ft_block_call *call) {
    state s = {.model = model, .call = call, .item = model->type == FT_BFLOAT16 ? 2 : 4};
    s.row_bytes = (size_t)model->hidden * s.item;
    s.all = call->num_fed + call->rows;
    s.heads = (int64_t)model->num_heads * model->head_dim;
    s.width = s.heads + 2 * (int64_t)model->num_kv_heads * model->head_dim;
    if (model->num_kinds > MOST_KINDS) abort();
    lay_out(&s);
    place(&s, call->context, call->num_context, 0);
    place(&s, call->blocks, call->num_blocks, call->num_fed);
    const int64_t room = call->rows * model->num_kv_heads;
    for (int64_t k = 0; k < model->num_kinds; k++) {
        const ft_attention_shape *shape = model->kinds[k].shape;
        s.attention[k] = (ft_attention_call){.shape = shape, .spans = call->blocks, .pages = call->pages,
                                             .num_spans = (int32_t)call->num_blocks};
        s.num_units[k] = ft_attention_plan(shape, call->blocks, (int32_t)call->num_blocks,
                                           call->units + k * room, room);
    }
    if (call->gathered && call->num_fed) mix_features(&s);
    embed(&s);
    for (int32_t i = 0; i < model->num_layers; i++) run_layer(&s, model->layers + i, model->kv[i]);
    if (!call->rows) return 0;
    finish(&s);
    return call->steps ? draft(&s) : 0;
}
