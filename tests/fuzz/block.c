// Blocks of random heads in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. A sequence alone must have
// the tokens, logits, keys and values that it has among others, and so must its rows when no tokens
// are chosen. Arguments: number of rounds, seed.
#include "block.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "helpers/making.h"

// Sizes of one problem.
typedef struct {
    int type, kv_type, gathers;
    int64_t hidden, feature, vocabulary, outputs, rank;
    int64_t spans, steps, first_row, fed, rows, pages, slots, kv_bytes;
} sizes;

typedef struct {
    sizes s;
    ft_block_model model;
    ft_block_call call;
    int of_all_ids;  // logits are spread over all ids
} problem;

static ft_block_layer make_layer(const ft_block_model *m, int type) {
    const int64_t heads = m->num_heads * m->head_dim, kv = 2 * m->num_kv_heads * m->head_dim;
    return (ft_block_layer){.q = make_linear(type, type, m->hidden, heads),
                            .kv = make_linear(type, type, m->hidden, kv),
                            .out = make_linear(type, type, heads, m->hidden),
                            .gate_up = make_linear(type, type, m->hidden, 2 * m->inner),
                            .down = make_linear(type, type, m->inner, m->hidden),
                            .attention_norm = make_numbers(m->norm_type, m->hidden, 1.0f),
                            .mlp_norm = make_numbers(m->norm_type, m->hidden, 1.0f),
                            .query_norm = make_numbers(m->norm_type, m->head_dim, 1.0f),
                            .key_norm = make_numbers(m->norm_type, m->head_dim, 1.0f),
                            .kind = pick(0, m->num_kinds - 1)};
}

static void make_layers(ft_block_model *m, const sizes *s) {
    const int page_size = pick(1, 20);
    ft_block_kind *kinds = make_bytes((size_t)m->num_kinds * sizeof *kinds);
    for (int k = 0; k < m->num_kinds; k++) {
        ft_attention_shape *shape = make_bytes(sizeof *shape);
        *shape = (ft_attention_shape){.num_heads = m->num_heads, .num_kv_heads = m->num_kv_heads,
                                      .head_dim = m->head_dim, .page_size = page_size, .type = s->type,
                                      .kv_type = s->kv_type, .window = pick(0, 1) ? 0 : pick(1, 30),
                                      .scale = 0.2f};
        kinds[k] = (ft_block_kind){shape, pick(0, 1)};
    }
    m->kinds = kinds;
    ft_block_layer *layers = make_bytes((size_t)m->num_layers * sizeof *layers);
    for (int i = 0; i < m->num_layers; i++) layers[i] = make_layer(m, s->type);
    m->layers = layers;
}

static void make_sequential(problem *p) {
    const sizes *s = &p->s;
    if (pick(0, 1)) {
        p->model.shorts = make_numbers(s->type, s->vocabulary * s->rank, 1.0f);
        p->model.follow = make_linear(s->type, FT_FLOAT32, s->rank, s->outputs);
        p->model.rank = s->rank;
    }
    const int64_t wide = s->hidden + p->model.rank + 1;
    if (pick(0, 1)) p->model.judge = make_numbers(FT_FLOAT32, wide, 1.0f);
    if (s->outputs == s->vocabulary) return;
    int64_t *ids = make_bytes((size_t)s->outputs * sizeof *ids);
    const int64_t skipped = s->vocabulary - s->outputs, at = pick(0, (int)s->outputs);
    for (int64_t i = 0; i < s->outputs; i++) ids[i] = i < at ? i : i + skipped;
    p->model.ids = ids;
    p->of_all_ids = pick(0, 1);
}

static void make_model(problem *p, int64_t positions) {
    sizes *s = &p->s;
    ft_block_model *m = &p->model;
    *m = (ft_block_model){.hidden = s->hidden, .inner = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90),
                          .vocabulary = s->vocabulary, .num_layers = pick(1, 3), .num_kinds = pick(1, 2),
                          .num_kv_heads = pick(1, 3), .head_dim = 2 * pick(1, 40), .type = s->type,
                          .norm_type = pick(0, 1), .eps = 1e-5f,
                          .embedding_scale = pick(0, 1) ? 1.0f : 2.0f,
                          .output_scale = pick(0, 1) ? 1.0f : 0.5f};
    m->num_heads = m->num_kv_heads * pick(1, 3);
    make_layers(m, s);
    const ft_attention_shape *shape = m->kinds->shape;
    m->kv_stride = slot_numbers(shape);
    s->pages = (positions + shape->page_size - 1) / shape->page_size * s->spans;
    s->slots = s->pages * shape->page_size;
    s->kv_bytes = s->slots * slot_bytes(shape);
    m->width = 2 * pick(1, m->head_dim / 2);
    m->embedding = make_embedding(s->type, s->vocabulary, s->hidden);
    m->norm = make_numbers(m->norm_type, s->hidden, 1.0f);
    m->head = make_linear(s->type, FT_FLOAT32, s->hidden, s->outputs);
    m->cos = make_numbers(s->type, positions * m->width, 1.0f);
    m->sin = make_numbers(s->type, positions * m->width, 1.0f);
    m->mixer = make_linear(s->type, s->type, s->feature, s->hidden);
    m->context_norm = make_numbers(m->norm_type, s->hidden, 1.0f);
    m->features = make_features(s->type, s->slots, s->feature);
    make_sequential(p);
}

// Layers' stores with old numbers in them, every byte a small one.
static void *const *make_stores(const problem *p) {
    const size_t bytes = (size_t)p->s.kv_bytes;
    void **kv = make_bytes((size_t)p->model.num_layers * sizeof *kv);
    for (int i = 0; i < p->model.num_layers; i++) kv[i] = memset(make_bytes(bytes), 0, bytes);
    return kv;
}

static int64_t count_rows(ft_span *spans, int64_t count) {
    int64_t rows = 0;
    for (int64_t i = 0; i < count; i++) spans[i].row = (int32_t)rows, rows += spans[i].num_rows;
    return rows;
}

// Spans [first, first + count) of `whole`, in buffers of their own; stores are fresh.
static problem part_of(const problem *whole, int64_t first, int64_t count, int64_t steps) {
    problem p = *whole;
    sizes *s = &p.s;
    const ft_block_call *from = &whole->call;
    p.model.kv = make_stores(&p);
    ft_span *context = make_copy(from->context + first, (size_t)count * sizeof *context);
    ft_span *blocks = make_copy(from->blocks + first, (size_t)count * sizeof *blocks);
    const int32_t before = context[0].row, begin = blocks[0].row;
    s->spans = count, s->fed = count_rows(context, count), s->rows = count_rows(blocks, count);
    ft_draw_row *draws = make_bytes((size_t)(steps * count) * sizeof *draws);
    for (int64_t k = 0; k < steps; k++)
        memcpy(draws + k * count, from->draws + k * whole->s.spans + first, (size_t)count * sizeof *draws);
    const size_t row = (size_t)s->hidden * item_bytes(s->type), all = (size_t)(s->fed + s->rows);
    const int64_t drafts = steps * count, made = steps ? drafts : s->rows;
    const int64_t wide = p.model.ids && !p.of_all_ids ? s->outputs : s->vocabulary;
    p.call = (ft_block_call){
        .context = context, .blocks = blocks, .pages = from->pages, .draws = draws,
        .num_context = count, .num_blocks = count, .num_fed = s->fed, .rows = s->rows, .steps = steps,
        .first_row = from->first_row,
        .fed = make_copy(from->fed + begin, (size_t)s->rows * sizeof(int64_t)),
        .units = make_bytes((size_t)(p.model.num_kinds * s->rows * p.model.num_kv_heads) *
                            sizeof(ft_attention_unit)),
        .positions = make_bytes(all * sizeof(int64_t)), .slots = make_bytes(all * sizeof(int64_t)),
        .joined = make_bytes(all * row), .x = make_bytes((size_t)s->rows * row),
        .gathered = s->gathers ? make_bytes((size_t)(s->fed * s->feature) * item_bytes(s->type)) : NULL,
        .outputs = make_bytes((size_t)made * row),
        .before = p.model.shorts ? make_bytes((size_t)(count * s->rank) * item_bytes(s->type)) : NULL,
        .added = p.model.follow ? make_bytes((size_t)(count * s->outputs) * sizeof(float)) : NULL,
        .tokens = make_bytes((size_t)drafts * sizeof(int64_t)),
        .logits = make_bytes((size_t)(drafts * wide) * sizeof(float)),
        .own = p.of_all_ids ? make_bytes((size_t)(drafts * s->outputs) * sizeof(float)) : NULL};
    if (!s->gathers)
        memcpy(p.call.joined, (const char *)from->joined + (size_t)before * row, (size_t)s->fed * row);
    return p;
}

static problem make_problem(void) {
    problem p = {.s = {.type = pick(0, 1), .steps = pick(1, 5), .spans = pick(1, 4), .gathers = pick(0, 1)}};
    sizes *s = &p.s;
    s->first_row = pick(0, 1);
    s->kv_type = pick(0, 2) ? s->type : FT_INT8;
    s->hidden = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90);
    s->feature = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90);
    s->rank = pick(0, 1) ? 32 : pick(1, 40);
    s->vocabulary = pick(2, 200);
    s->outputs = pick(0, 1) ? s->vocabulary : pick(1, (int)s->vocabulary);
    ft_span *context = make_bytes((size_t)s->spans * sizeof *context);
    ft_span *blocks = make_bytes((size_t)s->spans * sizeof *blocks);
    int64_t positions = 1;
    for (int64_t i = 0; i < s->spans; i++) {
        context[i] = (ft_span){.start = pick(0, 40), .num_rows = pick(0, pick(0, 3) ? 3 : 40)};
        blocks[i] = (ft_span){.start = context[i].start + context[i].num_rows,
                              .num_rows = (int32_t)(s->first_row + s->steps) + pick(0, 2)};
        const int64_t end = blocks[i].start + blocks[i].num_rows;
        if (end > positions) positions = end;
    }
    s->fed = count_rows(context, s->spans), s->rows = count_rows(blocks, s->spans);
    make_model(&p, positions);
    int32_t *pages = make_bytes((size_t)s->pages * sizeof *pages);
    for (int64_t i = 0; i < s->pages; i++) pages[i] = (int32_t)(s->pages - 1 - i);
    for (int64_t i = 0; i < s->spans; i++)
        context[i].pages = blocks[i].pages = (int32_t)(i * (s->pages / s->spans));
    int64_t *fed = make_bytes((size_t)s->rows * sizeof *fed);
    for (int64_t r = 0; r < s->rows; r++) fed[r] = pick(0, (int)s->vocabulary - 1);
    ft_draw_row *draws = make_bytes((size_t)(s->steps * s->spans) * sizeof *draws);
    const int best = p.model.ids && !p.of_all_ids;
    for (int64_t i = 0; i < s->steps * s->spans; i++) draws[i] = make_draw(best || pick(0, 2));
    p.call = (ft_block_call){.context = context, .blocks = blocks, .pages = pages, .fed = fed,
                             .draws = draws, .first_row = s->first_row,
                             .joined = make_numbers(s->type, s->fed * s->hidden, 1.0f)};
    return p;
}

// A slot's keys and values of one layer.
static const char *slot_of(const problem *p, int layer, const ft_span *span, int64_t position) {
    const int64_t size = p->model.kinds->shape->page_size, bytes = p->s.kv_bytes / p->s.slots;
    const int64_t page = p->call.pages[span->pages + position / size];
    return (const char *)p->model.kv[layer] + (page * size + position % size) * bytes;
}

static void same_alone(const problem *given, const problem *all, int64_t done, int64_t span) {
    problem own = part_of(given, span, 1, given->s.steps);
    wanted(ft_block_draft(&own.model, &own.call) >= done, "a span alone is decided where all were");
    const int64_t spans = all->s.spans, slot = all->s.kv_bytes / all->s.slots;
    const int64_t wide = all->model.ids && !all->of_all_ids ? all->s.outputs : all->s.vocabulary;
    for (int64_t k = 0; k < done; k++) {
        wanted(own.call.tokens[k] == all->call.tokens[k * spans + span], "tokens depend on other spans");
        same_bytes(own.call.logits + k * wide, all->call.logits + (k * spans + span) * wide,
                   (size_t)wide * sizeof(float), "logits that depend on other spans");
    }
    const ft_span *first = given->call.context + span, *last = given->call.blocks + span;
    for (int i = 0; i < all->model.num_layers; i++)
        for (int64_t at = first->start; at < last->start + last->num_rows; at++)
            same_bytes(slot_of(&own, i, first, at), slot_of(all, i, first, at), (size_t)slot,
                       "keys and values that depend on other spans");
}

// Without steps all rows are there, those of the drafts among them.
static void same_rows(const problem *given, const problem *all) {
    problem rows = part_of(given, 0, given->s.spans, 0);
    wanted(ft_block_draft(&rows.model, &rows.call) == 0, "nothing was chosen");
    const size_t bytes = (size_t)all->s.hidden * item_bytes(all->s.type);
    for (int64_t k = 0; k < all->s.steps; k++)
        for (int64_t i = 0; i < all->s.spans; i++) {
            const int64_t row = rows.call.blocks[i].row + given->s.first_row + k;
            same_bytes((const char *)rows.call.outputs + (size_t)row * bytes,
                       (const char *)all->call.outputs + (size_t)(k * all->s.spans + i) * bytes, bytes,
                       "outputs that depend on what is chosen");
        }
    problem fed = part_of(given, 0, given->s.spans, 0);
    fed.call.num_blocks = fed.call.rows = 0;
    wanted(ft_block_draft(&fed.model, &fed.call) == 0, "nothing was drafted");
}

static void one(void) {
    const problem given = make_problem();
    problem p = part_of(&given, 0, given.s.spans, given.s.steps);
    const int64_t done = ft_block_draft(&p.model, &p.call);
    check_drafted(done, p.s.steps, p.s.spans, p.call.tokens, p.s.vocabulary, NULL);
    for (int64_t span = 0; span < p.s.spans; span++) same_alone(&given, &p, done, span);
    same_rows(&given, &p);
    problem stopped = part_of(&given, 0, given.s.spans, given.s.steps);
    const ft_stop stop = make_stop(p.s.steps, p.s.spans);
    stopped.call.stop = &stop;
    check_drafted(ft_block_draft(&stopped.model, &stopped.call), p.s.steps, p.s.spans,
                  stopped.call.tokens, p.s.vocabulary, &stop);
}

int main(int count, char **arguments) {
    return at_every_level("block", count, arguments, one);
}
