// Runs a mixture of experts; see experts.h.
#include "experts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "carving.h"
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
_Static_assert(sizeof(choice) == 8, "as ft_experts_rows has routes");

// What is known of the rows that go through together.
typedef struct {
    const ft_experts *e;
    const ft_linear_kernels *kernels;
    const char *x, *by;
    char *y;
    const char *residual;
    int64_t rows, pairs, touched;
    int64_t most;      // pairs of an expert
    size_t item;       // bytes of a number of rows
    float *scores;     // [rows, outputs of the router in whole panels]
    int64_t outputs;
    choice *chosen;    // [rows, chosen + 1], the largest weight first; the last is what the shared
                       // result is multiplied by
    int64_t *place;    // [rows, chosen]: the pair that this is
    int64_t *row_of;   // [pairs]: its row
    int32_t *active;   // [touched]: experts that have pairs
    int64_t *first;    // [touched + 1]: their first pair
    char *by_row, *by_pair;  // prepared rows
    char *both, *gated;      // [pairs, 2 inner] and [pairs, inner]
    float *out, *shared;     // [pairs, width], [rows, width]
    char *shared_both, *shared_between;
    int64_t width;           // outputs of down
    const ft_experts_rows *given;
    int64_t done;            // rows before these
} state;

typedef struct {
    state *s;
    ft_linear_job job;  // of all rows, or of all pairs
    const ft_linear *of_first;   // the layer of expert 0
    const ft_linear *const *experts;  // where each expert's chain begins
    int part;                    // how far along its chain this stage begins
    int64_t tiles;               // of the parts that run together
    ft_prepared by_row;
} stage;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// What is done to each of some rows.
typedef struct {
    void (*of_row)(const void *context, int64_t row);
    const void *context;
    int64_t rows;
} row_call;

static void row_item(void *context, int64_t item, int worker) {
    (void)worker;
    const row_call *c = context;
    const int64_t end = least((item + 1) * ITEM_ROWS, c->rows);
    for (int64_t r = item * ITEM_ROWS; r < end; r++) c->of_row(c->context, r);
}

static void for_rows(void (*of_row)(const void *, int64_t), const void *context, int64_t rows, int64_t width) {
    row_call call = {of_row, context, rows};
    const int64_t items = (rows + ITEM_ROWS - 1) / ITEM_ROWS;
    if (rows * width > SERIAL_VALUES)
        ft_parallel(row_item, &call, items);
    else
        for (int64_t item = 0; item < items; item++) row_item(&call, item, 0);
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
        choose_largest(worth + g * size, 2, size, NULL, best);
        groups[g] = worth[g * size + best[0]] + worth[g * size + best[1]];
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

static void choose_row(const void *context, int64_t r) {
    const state *s = context;
    const ft_experts *e = s->e;
    float *const score = s->scores + r * s->outputs;
    float worth[FT_MOST_EXPERTS], weights[FT_MOST_CHOSEN];
    int32_t indices[FT_MOST_CHOSEN];
    char open[FT_MOST_EXPERTS];
    adjust_scores(e, score);
    for (int i = 0; i < e->experts; i++) worth[i] = e->choice_bias ? score[i] + e->choice_bias[i] : score[i];
    if (e->groups) open_groups(e, worth, open);
    choose_largest(worth, e->chosen, e->experts, e->groups ? open : NULL, indices);
    sort_indices(indices, e->chosen);
    for (int i = 0; i < e->chosen; i++) weights[i] = score[indices[i]];
    weigh(e, weights);
    for (int i = 0; e->weight_scale && i < e->chosen; i++) weights[i] *= e->weight_scale[indices[i]];
    // From the largest weight on; a bias or a scale may have chosen in another order.
    choice *const found = s->chosen + r * (e->chosen + 1);
    for (int i = 0; i < e->chosen; i++) {
        int at = i;
        for (; at && !before(found[at - 1].weight, weights[i]); at--) found[at] = found[at - 1];
        found[at] = (choice){weights[i], indices[i]};
    }
    found[e->chosen] = (choice){1.0f, 0};
    if (e->shared_gated) {
        const float gate = score[e->experts];
        found[e->chosen].weight = sigmoid(e->type == FT_BFLOAT16 ? rounded(gate) : gate);
    }
}

// Pairs of a row and a chosen expert, by expert and then by row.
static void sort_pairs(state *s) {
    const int chosen = s->e->chosen;
    int64_t count[FT_MOST_EXPERTS] = {0}, next[FT_MOST_EXPERTS];
    for (int64_t i = 0; i < s->pairs; i++) count[s->chosen[i + i / chosen].expert]++;
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
        s->place[i] = next[s->chosen[i + i / chosen].expert]++;
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

static void prepare_row(const void *context, int64_t r) {
    const stage *g = context;
    g->s->kernels->prepare(&g->job, r);
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
    for_rows(prepare_row, g, rows->rows, layer->inputs);
}

// What prepare() takes of memory for a row.
static int64_t prepared_bytes(const ft_linear_kernels *kernels, const ft_linear *layer) {
    const int64_t blocks = ft_round_up(ft_padded_inputs(layer), FT_BLOCK) / FT_BLOCK;
    return row_stride(kernels, layer) + blocks * (1 + FT_BLOCK / 16) * 4;
}

// Each pair its row's copy, so that an expert's lie together.
static void copy_row(const void *context, int64_t p) {
    const stage *g = context;
    const ft_prepared *from = &g->by_row, *to = &g->job.x;
    const int64_t r = g->s->row_of[p];
    memcpy((char *)to->values + p * from->stride, (const char *)from->values + r * from->stride,
           (size_t)from->stride);
    if (g->of_first->weight_type < FT_WEIGHT_INT8) return;
    memcpy((float *)to->scales + p * from->blocks, from->scales + r * from->blocks, (size_t)from->blocks * 4);
    memcpy((int32_t *)to->sums + p * from->parts, from->sums + r * from->parts, (size_t)from->parts * 4);
}

static void copy_to_pairs(stage *g, char *memory) {
    ft_prepared *to = &g->job.x;
    g->by_row = *to;
    to->values = memory;
    to->scales = (const float *)(memory + to->stride * g->s->pairs);
    to->sums = (const int32_t *)(to->scales + g->s->pairs * to->blocks);
    for_rows(copy_row, g, g->s->pairs, to->stride);
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
                                 .x_stride = e->down[0]->inputs, .y_stride = s->width};
    stage g = {.s = s, .experts = e->down, .of_first = e->down[0]};
    prepare(&g, &rows, s->by_pair);
    g.tiles = tiles_of(g.of_first);
    multiply(&g, &rows);
}

// Between the matrices.

static float clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

typedef struct {
    const ft_experts *e;
    const char *both;
    char *gated;
    int64_t inner;
    int32_t activation;
} activation_call;

static void activate_row(void *context, int64_t row, int worker) {
    (void)worker;
    const activation_call *c = context;
    const int type = c->e->type;
    const float limit = c->e->limit, alpha = c->e->alpha;
    for (int64_t i = row * c->inner; i < (row + 1) * c->inner; i++) {
        if (c->activation == FT_RELU_SQUARED) {
            const float x = ft_value(c->both, i, type), above = x < 0.0f ? 0.0f : x;
            ft_put(c->gated, i, above * above, type);
            continue;
        }
        const int64_t at = i + row * c->inner;
        float gate = ft_value(c->both, at, type);
        const float up = clamp(ft_value(c->both, at + c->inner, type), limit);
        if (gate > limit) gate = limit;
        ft_put(c->gated, i, (up + 1.0f) * (gate * sigmoid(alpha * gate)), type);
    }
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
    activation_call call = {s->e, both, gated, inner, activation};
    ft_parallel(activate_row, &call, rows);
}

static void run_shared(const state *s) {
    const ft_experts *e = s->e;
    ft_linear_dense(e->shared_gate_up, s->x, s->shared_both, NULL, s->rows);
    activate(s, s->shared_both, s->shared_between, s->rows, e->shared_inner, e->shared_activation);
}

// Results.

static void combine_row(const void *context, int64_t r) {
    const state *s = context;
    const ft_experts *e = s->e;
    const int64_t width = s->width;
    const choice *const found = s->chosen + r * (e->chosen + 1);
    const int64_t *const place = s->place + r * e->chosen;
    const float gate = found[e->chosen].weight;
    enum { AT_ONCE = 64 };
    for (int64_t d = 0; d < width; d += AT_ONCE) {
        const int count = (int)least(AT_ONCE, width - d);
        float sum[AT_ONCE] = {0};
        for (int i = 0; i < e->chosen; i++) {
            const float *const from = s->out + place[i] * width + d;
            for (int j = 0; j < count; j++) sum[j] += found[i].weight * from[j];
        }
        for (int j = 0; s->shared && j < count; j++) sum[j] += gate * s->shared[r * width + d + j];
        for (int j = 0; s->residual && j < count; j++) sum[j] += ft_value(s->residual, r * width + d + j, e->type);
        for (int j = 0; j < count; j++) {
            // Its bits as they come would round to something else.
            if (sum[j] != sum[j]) sum[j] = NAN;
            ft_put(s->y, r * width + d + j, sum[j], e->type);
        }
    }
}

// Room for `rows` rows; called with null it counts the bytes. What a caller has for it lies there.
static int64_t lay_out(state *s, char *memory) {
    const ft_experts *e = s->e;
    const ft_experts_rows *given = s->given;
    const int64_t rows = s->rows, pairs = s->pairs, item = (int64_t)s->item;
    const int64_t each = e->activation == FT_RELU_SQUARED ? 1 : 2;
    const int64_t shared_each = e->shared_activation == FT_RELU_SQUARED ? 1 : 2;
    const int64_t inner = given->half == FT_FROM_GATED ? e->down[0]->inputs : e->inner;
    int64_t prepared = prepared_bytes(s->kernels, e->down[0]);
    for (const ft_linear *layer = e->gate_up[0]; layer; layer = layer->next) {
        const int64_t bytes = prepared_bytes(s->kernels, layer);
        prepared = bytes > prepared ? bytes : prepared;
    }
    char *at = memory;
    s->scores = ft_carve(&at, rows * s->outputs * 4);
    s->chosen = given->routes ? (choice *)given->routes + s->done * (e->chosen + 1)
                              : ft_carve(&at, rows * (e->chosen + 1) * 8);
    s->place = ft_carve(&at, pairs * 8);
    s->row_of = ft_carve(&at, pairs * 8);
    s->active = ft_carve(&at, e->experts * 4);
    s->first = ft_carve(&at, (e->experts + 1) * 8);
    s->by_row = ft_carve(&at, rows * prepared);
    s->by_pair = ft_carve(&at, pairs * prepared);
    s->both = ft_carve(&at, pairs * each * e->inner * item);
    s->gated = given->gated ? (char *)given->gated + s->done * e->chosen * inner * item
                            : ft_carve(&at, pairs * inner * item);
    s->out = ft_carve(&at, pairs * s->width * 4);
    if (e->shared_down) {
        const int64_t between = given->half == FT_FROM_GATED ? e->shared_down->inputs : e->shared_inner;
        s->shared = ft_carve(&at, rows * s->width * 4);
        s->shared_both = ft_carve(&at, rows * shared_each * e->shared_inner * item);
        s->shared_between = given->shared ? (char *)given->shared + s->done * between * item
                                          : ft_carve(&at, rows * between * item);
    }
    return at - memory;
}

static void route(state *s) {
    const ft_experts *e = s->e;
    const ft_scores_call scores = {.router = e->router, .x = s->by, .scores = s->scores, .rows = s->rows,
                                   .hidden = e->hidden, .outputs = s->outputs, .type = e->type};
    ft_scores(&scores);
    for_rows(choose_row, s, s->rows, e->experts * e->chosen);
}

static void run_rows(state *s) {
    const ft_experts *e = s->e;
    const int32_t half = s->given->half;
    if (half != FT_FROM_GATED) route(s);
    sort_pairs(s);
    if (half != FT_FROM_GATED) {
        run_gate_up(s);
        activate(s, s->both, s->gated, s->pairs, e->inner, e->activation);
        if (e->shared_down) run_shared(s);
    }
    if (half == FT_TO_GATED) return;
    run_down(s);
    if (e->shared_down) ft_linear_dense(e->shared_down, s->shared_between, s->shared, NULL, s->rows);
    for_rows(combine_row, s, s->rows, s->width * e->chosen);
}

static const char *rows_from(const void *rows, int64_t row, int64_t width, size_t item) {
    return rows ? (const char *)rows + (size_t)(row * width) * item : NULL;
}

void ft_experts_run(const ft_experts *e, const ft_experts_rows *rows) {
    state s = {.e = e, .kernels = ft_linear_kernels_in_use(), .item = e->type == FT_BFLOAT16 ? 2 : 4,
               .width = e->down[0]->outputs, .given = rows};
    s.outputs = ft_round_up(e->experts + (e->shared_gated ? 1 : 0), FT_PANEL);
    for (; s.done < rows->rows; s.done += s.rows) {
        s.rows = least(MOST_ROWS, rows->rows - s.done);
        s.pairs = s.rows * e->chosen;
        s.x = rows_from(rows->x, s.done, e->hidden, s.item);
        s.by = rows->by ? rows_from(rows->by, s.done, e->hidden, s.item) : s.x;
        s.y = (char *)rows_from(rows->y, s.done, s.width, s.item);
        s.residual = rows_from(rows->residual, s.done, s.width, s.item);
        char *memory = ft_scratch(4, (size_t)lay_out(&s, NULL));
        if (!memory) abort();
        lay_out(&s, memory);
        run_rows(&s);
        if (rows->distinct) *rows->distinct += s.touched;
    }
}
