// Chains of drafts through random decoders and around them, in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. A sequence alone must have
// the tokens, logits, keys and values that it has among others. Draft models, heads that continue
// their own outputs beside the tokens, and heads that guess all tokens in one pass take part.
// Arguments: number of rounds, seed.
#include "rollout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "helpers/making.h"

// Sizes of one problem.
typedef struct {
    int type, kv_type, beside, mixed, masked;
    int64_t layers, hidden, vocabulary, outputs, feature;
    int64_t spans, steps, rows, pages, slots, kv_bytes;
} sizes;

typedef struct {
    sizes s;
    ft_rollout_model model;
    ft_rollout_call call;
    int of_all_ids;  // logits are spread over all ids
} problem;

static void make_model(problem *p, int64_t positions) {
    sizes *s = &p->s;
    ft_attention_shape *shape = make_shape(s->type, s->kv_type, pick(1, 20));
    const ft_decoder *d = make_decoder(&shape, 1, s->hidden, s->layers, s->beside, 0);
    const int64_t slot = slot_numbers(shape);
    const int64_t each = (positions + shape->page_size - 1) / shape->page_size;
    s->pages = each * s->spans;
    s->slots = s->pages * shape->page_size;
    s->kv_bytes = s->slots * slot_bytes(shape);
    const int width = 2 * pick(1, shape->head_dim / 2);
    p->model = (ft_rollout_model){.decoder = d, .shape = shape, .width = width, .kv_stride = slot,
                                  .embedding = make_embedding(s->type, s->vocabulary, s->hidden),
                                  .norm = make_numbers(d->norm_type, s->hidden, 1.0f),
                                  .head = make_linear(s->type, FT_FLOAT32, s->hidden, s->outputs),
                                  .cos = make_numbers(s->type, positions * width, 1.0f),
                                  .sin = make_numbers(s->type, positions * width, 1.0f),
                                  .vocabulary = s->vocabulary, .num_layers = (int32_t)s->layers};
    if (s->mixed) {
        p->model.mixer = make_linear(s->type, s->type, s->feature, s->hidden);
        p->model.features = make_features(s->type, s->slots, s->feature);
    }
    if (s->outputs < s->vocabulary) {
        int64_t *ids = make_bytes((size_t)s->outputs * sizeof *ids);
        const int64_t skipped = s->vocabulary - s->outputs, at = pick(0, (int)s->outputs);
        for (int64_t i = 0; i < s->outputs; i++) ids[i] = i < at ? i : i + skipped;
        p->model.ids = ids;
        p->of_all_ids = pick(0, 1);
    }
}

// Layers' stores with old numbers in them, every byte a small one.
static void *const *make_stores(const sizes *s) {
    void **kv = make_bytes((size_t)s->layers * sizeof *kv);
    for (int64_t i = 0; i < s->layers; i++) kv[i] = memset(make_bytes((size_t)s->kv_bytes), 0, (size_t)s->kv_bytes);
    return kv;
}

// Spans [first, first + count) of `whole`, in buffers of their own; stores are fresh.
static problem part_of(const problem *whole, int64_t first, int64_t count) {
    problem p = *whole;
    sizes *s = &p.s;
    const ft_rollout_call *from = &whole->call;
    const size_t row_bytes = (size_t)s->hidden * item_bytes(s->type);
    s->spans = count;
    p.model.kv = make_stores(s);
    ft_span *spans = make_copy(from->spans + first, (size_t)count * sizeof *spans);
    const int32_t begin = spans[0].row;
    s->rows = 0;
    for (int64_t i = 0; i < count; i++) spans[i].row -= begin, s->rows += spans[i].num_rows;
    ft_draw_row *draws = make_bytes((size_t)(s->steps * count) * sizeof *draws);
    for (int64_t k = 0; k < s->steps; k++)
        memcpy(draws + k * count, from->draws + k * whole->s.spans + first, (size_t)count * sizeof *draws);
    const int64_t kept = from->keeps_logits || s->masked ? s->steps : 1;
    p.call = (ft_rollout_call){
        .spans = spans, .pages = from->pages, .draws = draws, .num_spans = count, .rows = s->rows,
        .steps = s->steps, .keeps_logits = from->keeps_logits, .anchored = from->anchored,
        .masks = from->masks,
        .fed = make_copy(from->fed + begin, (size_t)s->rows * sizeof(int64_t)),
        .units = make_bytes((size_t)(s->rows * p.model.shape->num_kv_heads) * sizeof(ft_attention_unit)),
        .positions = make_bytes((size_t)s->rows * sizeof(int64_t)),
        .slots = make_bytes((size_t)s->rows * sizeof(int64_t)),
        .x = make_copy((const char *)from->x + (size_t)begin * row_bytes, (size_t)s->rows * row_bytes),
        .beside = s->beside ? make_bytes((size_t)s->rows * row_bytes) : NULL,
        .gathered = s->mixed ? make_bytes((size_t)(s->rows * s->feature) * item_bytes(s->type)) : NULL,
        .tokens = make_bytes((size_t)(s->steps * count) * sizeof(int64_t)),
        .logits = make_bytes((size_t)(kept * count * s->vocabulary) * sizeof(float)),
        .own = p.of_all_ids ? make_bytes((size_t)((s->masked ? s->steps : 1) * count * s->outputs) * sizeof(float)) : NULL};
    return p;
}

static problem make_problem(void) {
    problem p = {.s = {.type = pick(0, 1), .steps = pick(1, 5), .spans = pick(1, 4), .layers = 1}};
    sizes *s = &p.s;
    s->kv_type = pick(0, 2) ? s->type : FT_INT8;
    s->beside = pick(0, 1), s->masked = s->beside && pick(0, 1), s->mixed = s->beside && pick(0, 1);
    if (!s->beside) s->layers = pick(1, 3);
    s->hidden = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90);
    s->feature = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90);
    s->vocabulary = pick(2, 200);
    s->outputs = pick(0, 1) ? s->vocabulary : pick(1, (int)s->vocabulary);
    ft_span *spans = make_bytes((size_t)s->spans * sizeof *spans);
    int64_t positions = 1;
    for (int64_t i = 0; i < s->spans; i++) {
        spans[i] = (ft_span){.row = (int32_t)s->rows, .start = pick(0, 40), .paths = -1,
                             .num_rows = (s->masked ? (int)s->steps : 1) + pick(0, pick(0, 3) ? 3 : 40)};
        const int64_t end = spans[i].start + spans[i].num_rows + s->steps;
        if (end > positions) positions = end;
        s->rows += spans[i].num_rows;
    }
    make_model(&p, positions);
    int32_t *pages = make_bytes((size_t)s->pages * sizeof *pages);
    for (int64_t i = 0; i < s->pages; i++) pages[i] = (int32_t)(s->pages - 1 - i);
    for (int64_t i = 0; i < s->spans; i++) spans[i].pages = (int32_t)(i * (s->pages / s->spans));
    int64_t *fed = make_bytes((size_t)s->rows * sizeof *fed);
    for (int64_t r = 0; r < s->rows; r++) fed[r] = pick(0, (int)s->vocabulary - 1);
    ft_draw_row *draws = make_bytes((size_t)(s->steps * s->spans) * sizeof *draws);
    const int best = p.model.ids && !p.of_all_ids;
    for (int64_t i = 0; i < s->steps * s->spans; i++) draws[i] = make_draw(best || pick(0, 2));
    p.call = (ft_rollout_call){.spans = spans, .pages = pages, .fed = fed, .draws = draws,
                               .x = make_numbers(s->type, s->rows * s->hidden, 1.0f),
                               .keeps_logits = s->masked || pick(0, 1), .anchored = pick(0, 1),
                               .masks = s->masked ? make_numbers(s->type, (s->steps - 1) * s->hidden, 1.0f)
                                                  : NULL};
    return p;
}

// A slot's keys and values of one layer.
static const char *slot_of(const problem *p, int64_t layer, const ft_span *span, int64_t position) {
    const int64_t size = p->model.shape->page_size, bytes = p->s.kv_bytes / p->s.slots;
    const int64_t page = p->call.pages[span->pages + position / size];
    return (const char *)p->model.kv[layer] + (page * size + position % size) * bytes;
}

static void same_alone(const problem *given, const problem *all, int64_t done, int64_t span) {
    problem own = part_of(given, span, 1);
    wanted(ft_rollout(&own.model, &own.call) >= done, "a span alone is decided where all were");
    const int64_t spans = all->s.spans, size = all->s.vocabulary, bytes = all->s.kv_bytes / all->s.slots;
    const int as_outputs = all->s.masked && all->model.ids && !all->of_all_ids;
    const int64_t pitch = as_outputs ? all->s.outputs : size, counted = as_outputs ? pitch : all->model.ids && !all->of_all_ids ? all->s.outputs : size;
    for (int64_t k = 0; k < done; k++) {
        wanted(own.call.tokens[k] == all->call.tokens[k * spans + span], "tokens depend on other spans");
        if (!all->call.keeps_logits) continue;
        // Where only outputs are written, spans of a step lie closer than its room.
        const float *found = as_outputs || counted == size ? all->call.logits + (k * spans + span) * pitch
                                        : all->call.logits + k * spans * size + span * counted;
        same_bytes(own.call.logits + k * pitch, found, (size_t)counted * sizeof(float),
                   "logits that depend on other spans");
    }
    const ft_span *first = given->call.spans + span;
    for (int64_t i = 0; done && i < all->s.layers; i++)
        for (int64_t at = first->start; at < first->start + first->num_rows; at++)
            same_bytes(slot_of(&own, i, first, at), slot_of(all, i, first, at), (size_t)bytes,
                       "keys and values that depend on other spans");
}

static void one(void) {
    const problem given = make_problem();
    problem p = part_of(&given, 0, given.s.spans);
    const int64_t done = ft_rollout(&p.model, &p.call);
    check_drafted(done, p.s.steps, p.s.spans, p.call.tokens, p.s.vocabulary, NULL);
    for (int64_t span = 0; span < p.s.spans; span++) same_alone(&given, &p, done, span);
    problem stopped = part_of(&given, 0, given.s.spans);
    const ft_stop stop = make_stop(p.s.steps, p.s.spans);
    stopped.call.stop = &stop;
    check_drafted(ft_rollout(&stopped.model, &stopped.call), p.s.steps, p.s.spans,
                  stopped.call.tokens, p.s.vocabulary, &stop);
}

int main(int count, char **arguments) {
    return at_every_level("rollout", count, arguments, one);
}
