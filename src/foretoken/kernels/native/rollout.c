// See rollout.h.
#include "rollout.h"

#include <math.h>
#include <string.h>

#include "scalar.h"

typedef struct {
    const ft_rollout_model *model;
    const ft_rollout_call *call;
    ft_step_kind kind;
    ft_step step;
    size_t row_bytes;
} state;

// Positions, slots and work of the spans' rows.
static void place(state *s, int64_t rows) {
    const ft_rollout_call *call = s->call;
    const ft_attention_shape *shape = s->model->shape;
    for (int64_t i = 0; i < call->num_spans; i++) {
        const ft_span *span = call->spans + i;
        for (int32_t t = 0; t < span->num_rows; t++) {
            const int64_t position = span->start + t, row = span->row + t;
            const int32_t page = call->pages[span->pages + position / shape->page_size];
            call->positions[row] = position;
            call->slots[row] = (int64_t)page * shape->page_size + position % shape->page_size;
        }
    }
    // After the first pass each span has one row, and the plan of the second serves all later ones: it
    // says who computes what, and results do not depend on that.
    if (rows == s->step.rows) return;
    s->step.rows = rows;
    s->kind.num_units = ft_attention_plan(shape, call->spans, (int32_t)call->num_spans, call->units,
                                          rows * shape->num_kv_heads);
}

// The embedded tokens: the stream itself, or what stands beside a head's stream, which goes on from its
// own outputs.
static void embed(const state *s, const int64_t *tokens) {
    ft_embed(s->model->embedding, tokens, s->step.rows, s->step.beside ? s->step.beside : s->step.x);
}

static void mix_features(const state *s) {
    void *gathered = s->call->gathered;
    ft_gather_features(&s->model->features, s->call->slots, s->step.rows, gathered);
    ft_linear_dense(s->model->mixer, gathered, s->step.x, NULL, s->step.rows);
}

// Each span goes on from its last row alone: the others were only fed for their keys and values. Rows move
// to lower places, in order, so none is overwritten before it was moved.
static void keep_last_rows(const state *s) {
    char *x = s->step.x;
    for (int64_t i = 0; i < s->call->num_spans; i++) {
        ft_span *span = s->call->spans + i;
        const int64_t last = span->row + span->num_rows - 1;
        if (last != i) memcpy(x + (size_t)i * s->row_bytes, x + (size_t)last * s->row_bytes, s->row_bytes);
        span->start += span->num_rows;
        span->row = (int32_t)i;
        span->num_rows = 1;
    }
}

// Logits of all ids from those of the head's outputs. Ids that the head does not have get minus infinity:
// the noise of a draw belongs to an id, so ids have to be in their places before it.
static void spread(const state *s, int64_t rows, float *logits) {
    const int64_t outputs = s->model->head->outputs, vocabulary = s->model->vocabulary;
    for (int64_t i = 0; i < rows * vocabulary; i++) logits[i] = -INFINITY;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < outputs; i++)
            logits[r * vocabulary + s->model->ids[i]] = s->call->own[r * outputs + i];
}

// A token for each of `rows` states, which may lie where the normed ones go.
static void choose(const state *s, const void *states, int64_t rows, const ft_draw_row *draws,
                   float *logits, int64_t *tokens) {
    const ft_rollout_model *model = s->model;
    const ft_decoder *d = model->decoder;
    // A head's stream goes on from x, so its norms go where the embedded tokens were, which are used up.
    char *normed = s->step.beside ? s->step.beside : s->step.x;
    const ft_norm_call norm = {.x = states,
                               .y = normed,
                               .weight = model->norm,
                               .rows = rows,
                               .width = d->hidden,
                               .x_stride = d->hidden,
                               .y_stride = d->hidden,
                               .type = d->type,
                               .weight_type = d->norm_type,
                               .eps = d->eps};
    ft_norm(&norm);
    ft_linear_dense(model->head, normed, s->call->own ? s->call->own : logits, NULL, rows);
    if (s->call->own) spread(s, rows, logits);
    // The best output is the best id, so greedy drafts need no logits of all ids.
    const int as_outputs = model->ids && !s->call->own;
    ft_draw(draws, rows, logits,
            as_outputs ? model->head->outputs : model->vocabulary, tokens);
    for (int64_t r = 0; as_outputs && r < rows; r++)
        if (tokens[r] != FT_UNDECIDED) tokens[r] = model->ids[tokens[r]];
}

// Whether a span goes on after the tokens of step `at`.
static int judge(const state *s, int64_t at) {
    const ft_rollout_call *call = s->call;
    const ft_rollout_model *model = s->model;
    const int64_t spans = call->num_spans, outputs = model->head->outputs;
    const float *logits = call->logits + (call->keeps_logits ? at * spans * model->vocabulary : 0);
    if (call->own || model->ids)
        ft_sure(call->own ? call->own : logits, spans, outputs, call->stop->sure + at * spans);
    else
        ft_sure(logits, spans, model->vocabulary, call->stop->sure + at * spans);
    return ft_stop_after(call->stop, at, spans);
}

// The rows of tokens that are not known yet: masks, or masks added to the span's last known features.
static void put_masks(const state *s) {
    const ft_rollout_call *call = s->call;
    const int64_t hidden = s->model->decoder->hidden;
    const int32_t type = s->model->decoder->type;
    for (int64_t i = 0; i < call->num_spans; i++) {
        const ft_span *span = call->spans + i;
        char *known = (char *)s->step.x + (size_t)(span->row + span->num_rows - call->steps) * s->row_bytes;
        for (int64_t k = 0; k < call->steps - 1; k++) {
            const char *mask = (const char *)call->masks + (size_t)k * s->row_bytes;
            char *to = known + (size_t)(k + 1) * s->row_bytes;
            if (!call->anchored) memcpy(to, mask, s->row_bytes);
            for (int64_t j = 0; call->anchored && j < hidden; j++)
                ft_put(to, j, ft_value(mask, j, type) + ft_value(known, j, type), type);
        }
    }
}

// The rows that tokens come from, step by step, where their norms go.
static void gather_guesses(const state *s) {
    const ft_rollout_call *call = s->call;
    char *to = s->step.beside;
    for (int64_t at = 0; at < call->steps; at++)
        for (int64_t i = 0; i < call->num_spans; i++, to += s->row_bytes) {
            const ft_span *span = call->spans + i;
            const size_t row = (size_t)(span->row + span->num_rows - call->steps + at);
            memcpy(to, (const char *)s->step.x + row * s->row_bytes, s->row_bytes);
        }
}

// One pass over known and mask rows, then every token of it: no token waits for the one before.
static int64_t draft_at_once(state *s) {
    const ft_rollout_call *call = s->call;
    const int64_t all = call->steps * call->num_spans;
    place(s, call->rows);
    embed(s, call->fed);
    if (call->gathered) mix_features(s);
    put_masks(s);
    ft_decoder_run(s->model->decoder, &s->step, 0, s->model->num_layers);
    gather_guesses(s);
    choose(s, s->step.beside, all, call->draws, call->logits, call->tokens);
    if (call->stop) {
        const float *logits = call->own ? call->own : call->logits;
        const int outputs = call->own || s->model->ids;
        ft_sure(logits, all, outputs ? s->model->head->outputs : s->model->vocabulary,
                call->stop->sure);
    }
    return ft_stop_through(call->stop, call->steps, call->num_spans, call->tokens);
}

int64_t ft_rollout(const ft_rollout_model *model, const ft_rollout_call *call) {
    const ft_decoder *d = model->decoder;
    state s = {.model = model, .call = call};
    s.row_bytes = (size_t)d->hidden * (d->type == FT_BFLOAT16 ? 2 : 4);
    s.kind = (ft_step_kind){.attention = {.shape = model->shape,
                                          .spans = call->spans,
                                          .pages = call->pages,
                                          .num_spans = (int32_t)call->num_spans},
                            .units = call->units,
                            .cos = model->cos,
                            .sin = model->sin,
                            .width = model->width,
                            .kv_stride = model->kv_stride};
    s.step = (ft_step){.x = call->x,
                       .positions = call->positions,
                       .slots = call->slots,
                       .kv = model->kv,
                       .kinds = &s.kind,
                       .beside = call->beside};
    if (call->masks) return draft_at_once(&s);
    const int64_t *fed = call->fed, size = call->num_spans * model->vocabulary;
    // The first pass feeds what is new of each span, later ones the token that was just chosen.
    for (int64_t at = 0; at < call->steps; at++) {
        int64_t *tokens = call->tokens + at * call->num_spans;
        place(&s, at ? call->num_spans : call->rows);
        embed(&s, fed);
        if (!at && call->gathered) mix_features(&s);
        ft_decoder_run(d, &s.step, 0, model->num_layers);
        keep_last_rows(&s);
        choose(&s, s.step.x, call->num_spans, call->draws + at * call->num_spans,
               call->logits + (call->keeps_logits ? at * size : 0), tokens);
        // A row within rounding of a tie is its twin's to decide, and later tokens depend on it.
        if (ft_stop_open(call->stop, at, call->num_spans, tokens)) return at;
        if (call->stop && !judge(&s, at)) return at + 1;
        fed = tokens;
    }
    return call->steps;
}
