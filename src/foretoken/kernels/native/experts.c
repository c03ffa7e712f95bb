// Runs a mixture of experts; see experts.h.
#include "experts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "carving.h"
#include "rows.h"
#include "scalar.h"

enum {
    MOST_ROWS = 512,  // at once; with more, weights are read again, which so many rows are worth
    ITEM_ROWS = 8,
    SERIAL_VALUES = 1 << 15
};

typedef struct {
    float weight;
    int32_t expert;
} choice;

// What is known of the rows that go through together.
typedef struct {
    const ft_experts *e;
    const ft_linear_kernels *kernels;
    const char *x;
    char *y;
    const char *residual;
    int32_t *choices;
    int64_t rows, pairs, touched;
    int64_t most;      // pairs of an expert
    size_t item;       // bytes of a number of rows
    float *scores;     // [rows, outputs of the router in whole panels]
    int64_t outputs;
    choice *chosen;    // [rows, chosen], the largest weight first
    int64_t *place;    // [rows, chosen]: the pair that this is
    int64_t *row_of;   // [pairs]: its row
    int32_t *active;   // [touched]: experts that have pairs
    int64_t *first;    // [touched + 1]: their first pair
    char *by_row, *by_pair;  // prepared rows
    char *both, *gated;      // [pairs, 2 inner] and [pairs, inner]
    float *out, *shared;     // [pairs, hidden], [rows, hidden]
    char *shared_both, *shared_between;
} state;

typedef struct {
    state *s;
    ft_linear_job job;  // of all rows, or of all pairs
    const ft_linear *of_first;   // the layer of expert 0
    const ft_linear *const *experts;  // where each expert's chain begins
    int part;                    // how far along its chain this stage begins
    int64_t tiles;               // of the parts that run together
    char *to_pairs;
    ft_prepared by_row;
} stage;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void in_items(ft_task task, void *context, int64_t rows, int64_t width) {
    const int64_t items = (rows + ITEM_ROWS - 1) / ITEM_ROWS;
    if (rows * width > SERIAL_VALUES)
        ft_parallel(task, context, items);
    else
        for (int64_t item = 0; item < items; item++) task(context, item, 0);
}

// The router.

// Whether value `a` comes before value `b` of a later index: what is no number is larger than all.
static int before(float a, float b) { return a != a || a >= b; }

// The `count` largest of values, their indices first to last; what is left out is marked by `taken`.
static void choose_largest(const float *values, int count, int of, const char *open, int32_t *indices) {
    char taken[FT_MOST_EXPERTS] = {0};
    for (int slot = 0; slot < count; slot++) {
        int best = -1;
        for (int i = 0; i < of; i++) {
            if (taken[i] || (open && !open[i])) continue;
            if (best < 0 || !before(values[best], values[i])) best = i;
        }
        indices[slot] = best;
        taken[best] = 1;
    }
}

// Experts of the groups that are worth most.
static void open_groups(const ft_experts *e, const float *worth, char *open) {
    const int size = e->experts / e->groups;
    float groups[FT_MOST_EXPERTS];
    int32_t best[FT_MOST_EXPERTS];
    for (int g = 0; g < e->groups; g++) {
        choose_largest(worth + g * size, e->group_best, size, NULL, best);
        groups[g] = 0.0f;
        for (int i = 0; i < e->group_best; i++) groups[g] += worth[g * size + best[i]];
    }
    choose_largest(groups, e->open_groups, e->groups, NULL, best);
    memset(open, 0, (size_t)e->experts);
    for (int i = 0; i < e->open_groups; i++) memset(open + best[i] * size, 1, (size_t)size);
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static void softmax(float *values, int count) {
    float most = values[0], sum = 0.0f;
    for (int i = 1; i < count; i++) most = values[i] > most ? values[i] : most;
    for (int i = 0; i < count; i++) sum += values[i] = expf(values[i] - most);
    for (int i = 0; i < count; i++) values[i] /= sum;
}

static float rounded(float x) {
    uint16_t bits;
    ft_put(&bits, 0, x, FT_BFLOAT16);
    return x == x ? ft_value(&bits, 0, FT_BFLOAT16) : x;
}

static void adjust_scores(const ft_experts *e, float *score) {
    for (int i = 0; i < e->experts; i++) {
        if (e->router_bias) score[i] += e->router_bias[i];
        if (e->rounds_router) score[i] = rounded(score[i]);
        if (e->softcap > 0.0f) score[i] = e->softcap * tanhf(score[i] / e->softcap);
        if (e->score == FT_SCORE_SIGMOID) score[i] = sigmoid(score[i]);
    }
    if (e->score == FT_SCORE_SOFTMAX) softmax(score, e->experts);
}

static void weigh(const ft_experts *e, float *weights) {
    float sum = 0.0f;
    for (int i = 0; i < e->chosen; i++) sum += weights[i];
    if (sum < e->floor) sum = e->floor;
    sum += e->added;
    if (e->weights == FT_WEIGHTS_SOFTMAX) softmax(weights, e->chosen);
    for (int i = 0; i < e->chosen; i++) {
        if (e->weights == FT_WEIGHTS_NORMED) weights[i] /= sum;
        if (e->weights == FT_WEIGHTS_SIGMOID) weights[i] = sigmoid(weights[i]);
        weights[i] *= e->scale;
    }
}

static void sort_indices(int32_t *indices, int count) {
    for (int i = 1; i < count; i++) {
        const int32_t moved = indices[i];
        int at = i;
        for (; at && indices[at - 1] > moved; at--) indices[at] = indices[at - 1];
        indices[at] = moved;
    }
}

static void choose_row(const state *s, int64_t r) {
    const ft_experts *e = s->e;
    float *const score = s->scores + r * s->outputs;
    float worth[FT_MOST_EXPERTS], weights[FT_MOST_CHOSEN];
    int32_t indices[FT_MOST_CHOSEN], order[FT_MOST_CHOSEN];
    char open[FT_MOST_EXPERTS];
    adjust_scores(e, score);
    for (int i = 0; i < e->experts; i++) worth[i] = e->choice_bias ? score[i] + e->choice_bias[i] : score[i];
    if (e->groups) open_groups(e, worth, open);
    choose_largest(worth, e->chosen, e->experts, e->groups ? open : NULL, indices);
    sort_indices(indices, e->chosen);
    for (int i = 0; i < e->chosen; i++) weights[i] = score[indices[i]];
    weigh(e, weights);
    // From the largest weight on; a bias or a scale may have chosen in another order.
    choice *const found = s->chosen + r * e->chosen;
    float sorted[FT_MOST_EXPERTS];
    for (int i = 0; i < e->experts; i++) sorted[i] = -INFINITY;
    char is_chosen[FT_MOST_EXPERTS] = {0};
    for (int i = 0; i < e->chosen; i++) {
        sorted[indices[i]] = weights[i];
        is_chosen[indices[i]] = 1;
    }
    choose_largest(sorted, e->chosen, e->experts, is_chosen, order);
    for (int i = 0; i < e->chosen; i++) found[i] = (choice){sorted[order[i]], order[i]};
    if (s->choices)
        for (int i = 0; i < e->chosen; i++) s->choices[r * e->chosen + i] = indices[i];
}

static void choose_item(void *context, int64_t item, int worker) {
    (void)worker;
    const state *s = context;
    const int64_t end = least((item + 1) * ITEM_ROWS, s->rows);
    for (int64_t r = item * ITEM_ROWS; r < end; r++) choose_row(s, r);
}

// Pairs of a row and a chosen expert, by expert and then by row.
static void sort_pairs(state *s) {
    const int chosen = s->e->chosen;
    int64_t count[FT_MOST_EXPERTS] = {0}, next[FT_MOST_EXPERTS];
    for (int64_t i = 0; i < s->pairs; i++) count[s->chosen[i].expert]++;
    int64_t at = 0;
    s->touched = s->most = 0;
    for (int i = 0; i < s->e->experts; i++) {
        next[i] = at;
        if (!count[i]) continue;
        if (count[i] > s->most) s->most = count[i];
        s->active[s->touched] = i;
        s->first[s->touched++] = at;
        at += count[i];
    }
    s->first[s->touched] = at;
    for (int64_t i = 0; i < s->pairs; i++) {
        s->place[i] = next[s->chosen[i].expert]++;
        s->row_of[s->place[i]] = i / chosen;
    }
}

// The matrices.

static const ft_linear *part_of(const ft_linear *layer, int part) {
    while (part--) layer = layer->next;
    return layer;
}

// Whether rows that were prepared for one layer serve the other.
static int prepared_alike(const ft_linear *a, const ft_linear *b) {
    return a->weight_type == b->weight_type && a->x_bits == b->x_bits && a->front == b->front &&
           ft_part(a) == ft_part(b);
}

static void prepare_item(void *context, int64_t item, int worker) {
    (void)worker;
    const stage *g = context;
    const int64_t end = least((item + 1) * ITEM_ROWS, g->job.rows->rows);
    for (int64_t r = item * ITEM_ROWS; r < end; r++) g->s->kernels->prepare(&g->job, r);
}

// Bytes from one prepared row to the next: not whole pages, whose lines share sets of a cache.
static int64_t row_stride(const ft_linear_kernels *kernels, const ft_linear *layer) {
    const int64_t stride = ft_round_up((int64_t)kernels->row_bytes(layer), 64);
    return stride % 4096 ? stride : stride + 64;
}

// Rows as the kernels want them, one after the other in `memory`.
static void prepare(stage *g, const ft_linear_rows *rows, char *memory) {
    const ft_linear *layer = g->of_first;
    ft_prepared *x = &g->job.x;
    const int64_t padded = ft_padded_inputs(layer);
    g->job.layer = layer;
    g->job.rows = rows;
    // Layouts differ by how many rows an expert has, and those of few take no more; bits do not.
    x->rows = g->s->most;
    x->chunk_shift = g->s->kernels->chunk_shift(layer);
    x->chunk_stride = (int64_t)1 << x->chunk_shift;
    x->stride = row_stride(g->s->kernels, layer);
    x->blocks = ft_round_up(padded, FT_BLOCK) / FT_BLOCK;
    x->parts = x->blocks * (FT_BLOCK / ft_part(layer));
    x->values = memory;
    x->scales = (const float *)(memory + x->stride * rows->rows);
    x->sums = (const int32_t *)(x->scales + rows->rows * x->blocks);
    in_items(prepare_item, g, rows->rows, layer->inputs);
}

// What prepare() takes of memory for a row.
static int64_t prepared_bytes(const ft_linear_kernels *kernels, const ft_linear *layer) {
    const int64_t blocks = ft_round_up(ft_padded_inputs(layer), FT_BLOCK) / FT_BLOCK;
    return row_stride(kernels, layer) + blocks * (1 + FT_BLOCK / 16) * 4;
}

// Each pair its row's copy, so that an expert's lie together.
static void copy_item(void *context, int64_t item, int worker) {
    (void)worker;
    const stage *g = context;
    const ft_prepared *from = &g->by_row, *to = &g->job.x;
    const int integer = g->of_first->weight_type >= FT_WEIGHT_INT8;
    const int64_t end = least((item + 1) * ITEM_ROWS, g->s->pairs);
    for (int64_t p = item * ITEM_ROWS; p < end; p++) {
        const int64_t r = g->s->row_of[p];
        memcpy(g->to_pairs + p * from->stride, (const char *)from->values + r * from->stride,
               (size_t)from->stride);
        if (!integer) continue;
        memcpy((float *)to->scales + p * from->blocks, from->scales + r * from->blocks,
               (size_t)from->blocks * 4);
        memcpy((int32_t *)to->sums + p * from->parts, from->sums + r * from->parts, (size_t)from->parts * 4);
    }
}

static void copy_to_pairs(stage *g, char *memory) {
    ft_prepared *to = &g->job.x;
    g->by_row = *to;
    g->to_pairs = memory;
    to->values = memory;
    to->scales = (const float *)(memory + to->stride * g->s->pairs);
    to->sums = (const int32_t *)(to->scales + g->s->pairs * to->blocks);
    in_items(copy_item, g, g->s->pairs, to->stride);
}

static int64_t tiles_of(const ft_linear *layer) { return ft_round_up(ft_panels(layer), FT_TILE) / FT_TILE; }

// One tile of one expert over all of its pairs.
static void tile_item(void *context, int64_t item, int worker) {
    (void)worker;
    const stage *g = context;
    const state *s = g->s;
    const int64_t at = item / g->tiles, first = s->first[at];
    const ft_linear *layer = part_of(g->experts[s->active[at]], g->part);
    int64_t tile = item % g->tiles, column = 0;
    for (; tile >= tiles_of(layer); layer = layer->next) {
        tile -= tiles_of(layer);
        column += layer->outputs;
    }
    ft_linear_rows rows = *g->job.rows;
    rows.rows = s->first[at + 1] - first;
    rows.y = (char *)rows.y + (first * rows.y_stride + column) * (layer->y_type == FT_BFLOAT16 ? 2 : 4);
    ft_linear_job job = {.layer = layer, .rows = &rows, .x = g->job.x};
    job.x.values = (const char *)job.x.values + first * job.x.stride;
    job.x.scales += first * job.x.blocks;
    job.x.sums += first * job.x.parts;
    const int64_t panel = tile * FT_TILE;
    s->kernels->tile(&job, panel, least(FT_TILE, ft_panels(layer) - panel));
}

static void multiply(stage *g, const ft_linear_rows *rows) {
    g->job.rows = rows;
    ft_parallel(tile_item, g, g->tiles * g->s->touched);
}

// What follows one another in a chain and takes rows prepared alike runs together.
static void run_gate_up(state *s) {
    const ft_experts *e = s->e;
    const int64_t width = e->activation == FT_RELU_SQUARED ? e->inner : 2 * e->inner;
    const ft_linear_rows by_row = {.x = s->x, .rows = s->rows, .x_stride = e->hidden};
    ft_linear_rows rows = {.y = s->both, .rows = s->pairs, .y_stride = width};
    stage g = {.s = s, .experts = e->gate_up};
    for (const ft_linear *layer = e->gate_up[0]; layer;) {
        g.of_first = layer;
        prepare(&g, &by_row, s->by_row);
        copy_to_pairs(&g, s->by_pair);
        int parts = 0;
        int64_t columns = 0;
        g.tiles = 0;
        for (; layer && prepared_alike(g.of_first, layer); layer = layer->next, parts++) {
            g.tiles += tiles_of(layer);
            columns += layer->outputs;
        }
        multiply(&g, &rows);
        rows.y = (char *)rows.y + (size_t)columns * s->item;
        g.part += parts;
    }
}

static void run_down(state *s) {
    const ft_experts *e = s->e;
    const ft_linear_rows rows = {.x = s->gated, .y = s->out, .rows = s->pairs,
                                 .x_stride = e->inner, .y_stride = e->hidden};
    stage g = {.s = s, .experts = e->down, .of_first = e->down[0]};
    prepare(&g, &rows, s->by_pair);
    g.tiles = tiles_of(g.of_first);
    multiply(&g, &rows);
}

// Between the matrices.

static float clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

static void activate_rows(const ft_experts *e, const void *both, void *gated, int64_t rows, int64_t inner,
                          int32_t activation) {
    const int64_t count = rows * inner;
    if (activation == FT_RELU_SQUARED) {
        for (int64_t i = 0; i < count; i++) {
            const float x = ft_value(both, i, e->type), above = x < 0.0f ? 0.0f : x;
            ft_put(gated, i, above * above, e->type);
        }
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inner; i++) {
            float gate = ft_value(both, 2 * r * inner + i, e->type);
            const float up = clamp(ft_value(both, (2 * r + 1) * inner + i, e->type), e->limit);
            if (gate > e->limit) gate = e->limit;
            ft_put(gated, r * inner + i, (up + 1.0f) * (gate * sigmoid(e->alpha * gate)), e->type);
        }
}

typedef struct {
    const ft_experts *e;
    const char *both;
    char *gated;
    int64_t inner;
    int32_t activation;
    size_t item;
} activation_call;

static void activate_row(void *context, int64_t row, int worker) {
    (void)worker;
    const activation_call *c = context;
    const int64_t each = c->activation == FT_RELU_SQUARED ? 1 : 2;
    activate_rows(c->e, c->both + (size_t)(row * each * c->inner) * c->item,
                  c->gated + (size_t)(row * c->inner) * c->item, 1, c->inner, c->activation);
}

static void activate(const state *s, const char *both, char *gated, int64_t rows, int64_t inner,
                     int32_t activation) {
    if (activation <= FT_GELU_TANH) {
        const ft_gate_call gate = {.x = both, .y = gated, .rows = rows, .width = inner,
                                   .x_stride = 2 * inner, .y_stride = inner, .type = s->e->type,
                                   .activation = activation};
        ft_gate(&gate);
        return;
    }
    // A row has a power for each of its numbers, so that each is worth a turn.
    activation_call call = {s->e, both, gated, inner, activation, s->item};
    ft_parallel(activate_row, &call, rows);
}

static void run_shared(const state *s) {
    const ft_experts *e = s->e;
    ft_linear_dense(e->shared_gate_up, s->x, s->shared_both, NULL, s->rows);
    activate(s, s->shared_both, s->shared_between, s->rows, e->shared_inner, e->shared_activation);
    ft_linear_dense(e->shared_down, s->shared_between, s->shared, NULL, s->rows);
}

// Results.

static void combine_row(const state *s, int64_t r) {
    const ft_experts *e = s->e;
    const int64_t hidden = e->hidden;
    const choice *const found = s->chosen + r * e->chosen;
    const int64_t *const place = s->place + r * e->chosen;
    float gate = 1.0f;
    if (s->shared && e->shared_gated) {
        gate = s->scores[r * s->outputs + e->experts];
        gate = sigmoid(e->type == FT_BFLOAT16 ? rounded(gate) : gate);
    }
    enum { AT_ONCE = 64 };
    for (int64_t d = 0; d < hidden; d += AT_ONCE) {
        const int count = (int)least(AT_ONCE, hidden - d);
        float sum[AT_ONCE] = {0};
        for (int i = 0; i < e->chosen; i++) {
            const float *const from = s->out + place[i] * hidden + d;
            for (int j = 0; j < count; j++) sum[j] += found[i].weight * from[j];
        }
        for (int j = 0; s->shared && j < count; j++) sum[j] += gate * s->shared[r * hidden + d + j];
        for (int j = 0; s->residual && j < count; j++) sum[j] += ft_value(s->residual, r * hidden + d + j, e->type);
        for (int j = 0; j < count; j++) {
            // Its bits as they come would round to something else.
            if (sum[j] != sum[j]) sum[j] = NAN;
            ft_put(s->y, r * hidden + d + j, sum[j], e->type);
        }
    }
}

static void combine_item(void *context, int64_t item, int worker) {
    (void)worker;
    const state *s = context;
    const int64_t end = least((item + 1) * ITEM_ROWS, s->rows);
    for (int64_t r = item * ITEM_ROWS; r < end; r++) combine_row(s, r);
}

// Room for `rows` rows; called with null it counts the bytes.
static int64_t lay_out(state *s, char *memory) {
    const ft_experts *e = s->e;
    const int64_t rows = s->rows, pairs = s->pairs, item = (int64_t)s->item;
    const int64_t each = e->activation == FT_RELU_SQUARED ? 1 : 2;
    const int64_t shared_each = e->shared_activation == FT_RELU_SQUARED ? 1 : 2;
    int64_t prepared = prepared_bytes(s->kernels, e->down[0]);
    for (const ft_linear *layer = e->gate_up[0]; layer; layer = layer->next) {
        const int64_t bytes = prepared_bytes(s->kernels, layer);
        prepared = bytes > prepared ? bytes : prepared;
    }
    char *at = memory;
    s->scores = ft_carve(&at, rows * s->outputs * 4);
    s->chosen = ft_carve(&at, pairs * (int64_t)sizeof *s->chosen);
    s->place = ft_carve(&at, pairs * 8);
    s->row_of = ft_carve(&at, pairs * 8);
    s->active = ft_carve(&at, e->experts * 4);
    s->first = ft_carve(&at, (e->experts + 1) * 8);
    s->by_row = ft_carve(&at, rows * prepared);
    s->by_pair = ft_carve(&at, pairs * prepared);
    s->both = ft_carve(&at, pairs * each * e->inner * item);
    s->gated = ft_carve(&at, pairs * e->inner * item);
    s->out = ft_carve(&at, pairs * e->hidden * 4);
    if (e->shared_down) {
        s->shared = ft_carve(&at, rows * e->hidden * 4);
        s->shared_both = ft_carve(&at, rows * shared_each * e->shared_inner * item);
        s->shared_between = ft_carve(&at, rows * e->shared_inner * item);
    }
    return at - memory;
}

static void run_rows(state *s) {
    const ft_experts *e = s->e;
    const ft_scores_call scores = {.router = e->router, .x = s->x, .scores = s->scores, .rows = s->rows,
                                   .hidden = e->hidden, .outputs = s->outputs, .type = e->type};
    ft_scores(&scores);
    in_items(choose_item, s, s->rows, e->experts * e->chosen);
    sort_pairs(s);
    run_gate_up(s);
    activate(s, s->both, s->gated, s->pairs, e->inner, e->activation);
    run_down(s);
    if (e->shared_down) run_shared(s);
    in_items(combine_item, s, s->rows, e->hidden * e->chosen);
}

void ft_experts_run(const ft_experts *e, const ft_experts_rows *rows) {
    state s = {.e = e, .kernels = ft_linear_kernels_in_use(), .item = e->type == FT_BFLOAT16 ? 2 : 4};
    s.outputs = ft_round_up(e->experts + (e->shared_gated ? 1 : 0), FT_PANEL);
    const size_t row_bytes = (size_t)e->hidden * s.item;
    for (int64_t done = 0; done < rows->rows; done += MOST_ROWS) {
        s.rows = least(MOST_ROWS, rows->rows - done);
        s.pairs = s.rows * e->chosen;
        s.x = (const char *)rows->x + (size_t)done * row_bytes;
        s.y = (char *)rows->y + (size_t)done * row_bytes;
        s.residual = rows->residual ? (const char *)rows->residual + (size_t)done * row_bytes : NULL;
        s.choices = rows->choices ? rows->choices + done * e->chosen : NULL;
        char *memory = ft_scratch(4, (size_t)lay_out(&s, NULL));
        if (!memory) abort();
        lay_out(&s, memory);
        run_rows(&s);
        if (rows->distinct) *rows->distinct += s.touched;
    }
}
