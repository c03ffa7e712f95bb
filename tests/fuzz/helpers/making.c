// See making.h.
#include "making.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vec.h"

enum { MOST_MADE = 4096 };
static uint64_t state = 1;
static void *made[MOST_MADE];
static int num_made;

void begin_making(uint64_t seed) { state = 1 + seed; }

int pick(int least, int most) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int)((state >> 33) % (uint64_t)(most - least + 1));
}

float uniform(float most) { return (float)pick(-1000, 1000) / 1000.0f * most; }

void *make_bytes(size_t bytes) {
    void *start = malloc(bytes ? bytes : 1);
    if (!start || num_made == MOST_MADE) abort();
    made[num_made++] = start;
    return start;
}

void *make_copy(const void *from, size_t bytes) { return memcpy(make_bytes(bytes), from, bytes); }

void free_made(void) {
    while (num_made) free(made[--num_made]);
}

size_t item_bytes(int type) { return type == FT_BFLOAT16 ? 2 : 4; }

void *make_numbers(int type, int64_t count, float most) {
    void *all = make_bytes((size_t)count * item_bytes(type));
    for (int64_t i = 0; i < count; i++)
        if (type == FT_BFLOAT16)
            ((bf16 *)all)[i] = float_to_bf16(uniform(most));
        else
            ((float *)all)[i] = uniform(most);
    return all;
}

ft_features make_features(int type, int64_t slots, int64_t width) {
    const int64_t item = (int64_t)item_bytes(type), count = pick(1, 3);
    const int64_t pieces = width % count ? 1 : count, piece = width / pieces;
    const int64_t columns = width + 2 * pick(0, 5);
    int64_t *begins = make_bytes((size_t)pieces * sizeof *begins);
    for (int64_t i = 0; i < pieces; i++) begins[i] = item * pick(0, (int)(columns - piece));
    return (ft_features){.slots = make_numbers(type, slots * columns, 1.0f), .pieces = begins,
                         .stride = columns * item, .piece_bytes = piece * item, .num_pieces = pieces};
}

ft_linear *make_linear(int type, int y_type, int64_t inputs, int64_t outputs) {
    ft_linear *l = make_bytes(sizeof *l);
    *l = (ft_linear){.x_type = type, .y_type = y_type, .inputs = inputs, .outputs = outputs};
    l->weight_type = pick(type == FT_FLOAT32 ? FT_WEIGHT_FLOAT32 : FT_WEIGHT_BFLOAT16, FT_WEIGHT_INT4);
    if (l->weight_type == FT_WEIGHT_INT4) l->group = 32;
    l->x_bits = pick(0, 1) ? 8 : 16;
    if (l->group && inputs % l->group) l->group = 0, l->weight_type = FT_WEIGHT_INT8;
    const int64_t padded = ft_padded_inputs(l), room = ft_panels(l) * FT_PANEL;
    const float most = 2.0f / sqrtf((float)inputs);
    if (l->weight_type <= FT_WEIGHT_BFLOAT16) {
        const int kept = l->weight_type == FT_WEIGHT_BFLOAT16 ? FT_BFLOAT16 : FT_FLOAT32;
        l->weight = make_numbers(kept, room * padded, most);
    } else {
        const int64_t bytes = room * padded / (l->weight_type == FT_WEIGHT_INT4 ? 2 : 1);
        uint8_t *weight = make_bytes((size_t)bytes);
        for (int64_t i = 0; i < bytes; i++) weight[i] = (uint8_t)pick(0, 255);
        l->weight = weight;
        const float steps = l->weight_type == FT_WEIGHT_INT4 ? 8.0f : 128.0f;
        const int64_t groups = l->group ? padded / l->group : 1;
        l->scale = make_numbers(FT_FLOAT32, room * groups, most / steps);
    }
    if (!pick(0, 3)) l->bias = make_numbers(FT_FLOAT32, room, 0.1f);
    return l;
}

const ft_embedding *make_embedding(int type, int64_t tokens, int64_t width) {
    ft_embedding *table = make_bytes(sizeof *table);
    *table = (ft_embedding){.tokens = tokens, .width = width, .type = type};
    if (pick(0, 1))
        table->floats = make_numbers(type, tokens * width, 1.0f);
    else
        table->packed = make_linear(type, FT_FLOAT32, width, tokens);
    return table;
}

static const float *floats(int64_t count, float most) { return make_numbers(FT_FLOAT32, count, most); }

// Layers of all experts; they share one matrix of each kind.
static const ft_linear *const *layers(const ft_linear *one, int32_t count) {
    const ft_linear **all = make_bytes((size_t)count * sizeof *all);
    for (int32_t i = 0; i < count; i++) all[i] = one;
    return all;
}

// One with or without a gate.
static int pick_activation(void) {
    static const int all[] = {FT_SILU, FT_GELU_TANH, FT_CLAMPED_SWISH, FT_RELU_SQUARED};
    return all[pick(0, 3)];
}

const ft_experts *make_experts(int type, int64_t hidden) {
    const int activation = pick_activation();
    const int64_t inner = 32 * pick(1, 3), each = activation == FT_RELU_SQUARED ? 1 : 2;
    const int32_t size = pick(2, 9), groups = pick(1, 4);
    ft_experts *made = make_bytes(sizeof *made), e = {.hidden = hidden, .inner = inner, .experts = size * groups, .type = type,
                    .activation = activation, .score = pick(FT_SCORE_NONE, FT_SCORE_SIGMOID),
                    .weights = pick(FT_WEIGHTS_KEPT, FT_WEIGHTS_SIGMOID), .scale = 1.5f, .limit = 2.0f,
                    .alpha = 1.7f, .floor = pick(0, 1) ? 0.3f : 0.0f, .softcap = pick(0, 3) ? 0.0f : 2.0f,
                    .rounds_router = pick(0, 1)};
    if (groups > 1) e.groups = groups, e.open_groups = pick(1, groups);
    const int32_t reached = groups > 1 ? size * e.open_groups : e.experts;
    e.chosen = pick(1, reached < FT_MOST_CHOSEN ? reached : FT_MOST_CHOSEN);
    e.shared_gated = pick(0, 1);
    const int64_t panels = ft_round_up(e.experts + e.shared_gated, FT_PANEL) / FT_PANEL;
    e.router = floats(panels * hidden * FT_PANEL, 0.3f);
    if (pick(0, 1)) e.router_bias = floats(e.experts, 1.0f);
    if (pick(0, 1)) e.choice_bias = floats(e.experts, 1.0f);
    if (pick(0, 1)) e.weight_scale = floats(e.experts, 2.0f);
    e.gate_up = layers(make_linear(type, type, hidden, each * inner), e.experts);
    e.down = layers(make_linear(type, FT_FLOAT32, inner, hidden), e.experts);
    if (!e.shared_gated && pick(0, 1)) {
        *made = e;
        return made;
    }
    e.shared_activation = pick_activation();
    e.shared_inner = 32 * pick(1, 2);
    const int64_t halves = e.shared_activation == FT_RELU_SQUARED ? 1 : 2;
    e.shared_gate_up = make_linear(type, type, hidden, halves * e.shared_inner);
    e.shared_down = make_linear(type, FT_FLOAT32, e.shared_inner, hidden);
    *made = e;
    return made;
}

static ft_layer make_layer(const ft_decoder *d, const ft_attention_shape *shape, int beside, int64_t inputs) {
    const int64_t heads = shape->num_heads * shape->head_dim, keys = shape->num_kv_heads * shape->head_dim;
    const int64_t hidden = d->hidden, inner = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90);
    const int keeps = pick(0, 5) > 0;
    ft_layer l = {.qkv = make_linear(d->type, d->type, (beside ? 2 : 1) * hidden, heads + 2 * keeps * keys),
                  .keeps = keeps,
                  .out = make_linear(d->type, d->type, heads, hidden),
                  .gate_up = make_linear(d->type, d->type, hidden, 2 * inner),
                  .down = make_linear(d->type, d->type, inner, hidden),
                  .attention_norm = make_numbers(d->norm_type, hidden, 1.0f),
                  .mlp_norm = make_numbers(d->norm_type, hidden, 1.0f),
                  .scale = pick(0, 2) ? 1.0f : 0.75f};
    if (inputs && pick(0, 1)) {
        l.input_gate = make_linear(d->type, d->type, hidden, inputs);
        l.input_back = make_linear(d->type, d->type, inputs, hidden);
        l.input_norm = make_numbers(d->norm_type, hidden, 1.0f);
    }
    if (!beside && !pick(0, 2)) l.gate = make_linear(d->type, d->type, hidden, heads);
    if (!pick(0, 2)) {
        l.after_attention = make_numbers(d->norm_type, hidden, 1.0f);
        l.after_mlp = make_numbers(d->norm_type, hidden, 1.0f);
        if (!beside && !pick(0, 2)) l.attention_norm = l.mlp_norm = NULL;
    }
    if (!pick(0, 2)) l.experts = make_experts(d->type, hidden);
    if (l.experts && (!l.after_mlp || pick(0, 1))) l.gate_up = l.down = NULL;
    if (l.experts && l.gate_up) {
        l.after_plain = make_numbers(d->norm_type, hidden, 1.0f);
        l.experts_norm = make_numbers(d->norm_type, hidden, 1.0f);
        l.after_experts = make_numbers(d->norm_type, hidden, 1.0f);
        l.router_norm = make_numbers(d->norm_type, hidden, 1.0f);
    }
    if (!pick(0, 2)) {
        l.whole_norms = keeps && !pick(0, 2), l.turns_first = pick(0, 1);
        l.query_norm = make_numbers(d->norm_type, l.whole_norms ? heads : shape->head_dim, 1.0f);
        l.key_norm = make_numbers(d->norm_type, l.whole_norms ? keys : shape->head_dim, 1.0f);
        if (pick(0, 1)) l.value_norm = make_numbers(d->norm_type, shape->head_dim, 1.0f);
    }
    if (beside) l.beside_norm = make_numbers(d->norm_type, hidden, 1.0f), l.from_norm = pick(0, 1);
    return l;
}

ft_decoder *make_decoder(ft_attention_shape *const *shapes, int kinds, int64_t hidden, int64_t layers, int beside,
                         int64_t inputs) {
    ft_decoder *d = make_bytes(sizeof *d);
    *d = (ft_decoder){.hidden = hidden, .type = shapes[0]->type, .norm_type = pick(0, 1), .activation = pick(0, 1),
                      .eps = 1e-5f, .branch_scale = pick(0, 3) ? 1.0f : 0.5f};
    ft_layer *all = make_bytes((size_t)layers * sizeof *all);
    for (int64_t i = 0; i < layers; i++) {
        const int kind = pick(0, kinds - 1);
        all[i] = make_layer(d, shapes[kind], beside, inputs);
        all[i].kind = kind;
    }
    d->layers = all;
    return d;
}

ft_attention_shape *make_shape(int type, int kv_type, int page_size) {
    ft_attention_shape *shape = make_bytes(sizeof *shape);
    const int32_t keys = pick(1, 3);
    *shape = (ft_attention_shape){.num_heads = keys * pick(1, 3), .num_kv_heads = keys,
                                  .head_dim = 2 * pick(1, 40), .page_size = page_size, .type = type,
                                  .kv_type = kv_type, .window = pick(0, 2) ? 0 : pick(1, 30),
                                  .scale = 0.2f, .softcap = pick(0, 2) ? 0.0f : 4.0f};
    return shape;
}

int64_t slot_numbers(const ft_attention_shape *shape) {
    const int scale = shape->kv_type == FT_INT8 ? FT_SCALE_BYTES : 0;
    return 2 * shape->num_kv_heads * (shape->head_dim + scale);
}

int64_t slot_bytes(const ft_attention_shape *shape) {
    return slot_numbers(shape) * (shape->kv_type == FT_INT8 ? 1 : (int64_t)item_bytes(shape->type));
}

ft_draw_row make_draw(int greedy) {
    const uint64_t key = (uint64_t)pick(0, 1 << 30) << 33 | (uint64_t)pick(0, 1 << 30);
    ft_draw_row how = {.key = key, .log_min_p = -INFINITY, .top_p = 2.0f};
    if (greedy) return how;
    how.temperature = (float)pick(1, 30) / 10.0f;
    if (!pick(0, 2)) how.log_min_p = logf((float)pick(1, 99) / 100.0f);
    if (!pick(0, 2)) how.top_p = (float)pick(1, 100) / 100.0f;
    if (!pick(0, 2)) how.top_k = pick(0, 9) ? pick(1, 60) : pick(1000, 1100);
    return how;
}

ft_stop make_stop(int64_t steps, int64_t spans) {
    ft_stop stop = {.least_sure = pick(0, 1) ? 0.0f : (float)pick(0, 100) / 100.0f,
                    .least = pick(0, 3) ? 0 : pick(1, (int)steps + 1)};
    stop.sure = make_bytes((size_t)(steps * spans) * sizeof(float));
    stop.lengths = make_bytes((size_t)spans * sizeof(int64_t));
    for (int64_t i = 0; i < spans; i++) stop.lengths[i] = 0;
    return stop;
}

void wanted(int holds, const char *what) {
    if (holds) return;
    printf("not so: %s\n", what);
    exit(1);
}

void same_bytes(const void *a, const void *b, size_t bytes, const char *what) {
    wanted(!memcmp(a, b, bytes), what);
}

void check_drafted(int64_t done, int64_t steps, int64_t spans, const int64_t *tokens,
                   int64_t vocabulary, const ft_stop *stop) {
    wanted(done >= 0 && done <= steps, "as many steps as were asked for, or fewer");
    for (int64_t i = 0; i < done * spans; i++)
        wanted(tokens[i] >= 0 && tokens[i] < vocabulary, "tokens of the vocabulary");
    if (!stop) return;
    int64_t longest = 0;
    for (int64_t r = 0; r < spans; r++) {
        wanted(stop->lengths[r] >= 0 && stop->lengths[r] <= done, "drafts of steps that were done");
        if (stop->lengths[r] > longest) longest = stop->lengths[r];
    }
    wanted(longest >= done - 1, "no step once all have ended");
}

int at_every_level(const char *name, int count, char **arguments, void (*one)(void)) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 100;
    begin_making(count > 2 ? strtoull(arguments[2], NULL, 10) : 0);
    for (int level = FT_PORTABLE; level <= ft_cpu_level(); level++) {
        ft_set_level(level);
        for (int i = 0; i < rounds; i++) {
            ft_set_threads(pick(1, 3));
            one();
            free_made();
        }
    }
    printf("%s: ok\n", name);
    return 0;
}
