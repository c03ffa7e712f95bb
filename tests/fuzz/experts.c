// Random mixtures of experts on random rows, in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. A row alone must have the
// bits that it has among others. Arguments: number of rounds, seed.
#include "experts.h"

#include "helpers/making.h"

static const float *floats(int64_t count, float most) { return make_numbers(FT_FLOAT32, count, most); }

// Layers of all experts; they share one matrix of each kind.
static const ft_linear *const *layers(const ft_linear *one, int32_t count) {
    const ft_linear **all = make_bytes((size_t)count * sizeof *all);
    for (int32_t i = 0; i < count; i++) all[i] = one;
    return all;
}

static ft_experts make_experts(void) {
    const int type = pick(0, 1), activation = pick(FT_SILU, FT_RELU_SQUARED);
    const int64_t hidden = 32 * pick(1, 4), inner = 32 * pick(1, 3), each = activation == FT_RELU_SQUARED ? 1 : 2;
    const int32_t size = pick(2, 9), groups = pick(1, 4);
    ft_experts e = {.hidden = hidden, .inner = inner, .experts = size * groups, .type = type,
                    .activation = activation, .score = pick(FT_SCORE_NONE, FT_SCORE_SIGMOID),
                    .weights = pick(FT_WEIGHTS_KEPT, FT_WEIGHTS_SIGMOID), .scale = 1.5f, .limit = 2.0f,
                    .alpha = 1.7f, .floor = pick(0, 1) ? 0.3f : 0.0f, .softcap = pick(0, 3) ? 0.0f : 2.0f,
                    .rounds_router = pick(0, 1)};
    if (groups > 1) e.groups = groups, e.open_groups = pick(1, groups), e.group_best = pick(1, 2);
    const int32_t reached = groups > 1 ? size * e.open_groups : e.experts;
    e.chosen = pick(1, reached < FT_MOST_CHOSEN ? reached : FT_MOST_CHOSEN);
    e.shared_gated = pick(0, 1);
    const int64_t panels = ft_round_up(e.experts + e.shared_gated, FT_PANEL) / FT_PANEL;
    e.router = floats(panels * hidden * FT_PANEL, 0.3f);
    if (pick(0, 1)) e.router_bias = floats(e.experts, 1.0f);
    if (pick(0, 1)) e.choice_bias = floats(e.experts, 1.0f);
    e.gate_up = layers(make_linear(type, type, hidden, each * inner), e.experts);
    e.down = layers(make_linear(type, FT_FLOAT32, inner, hidden), e.experts);
    if (!e.shared_gated && pick(0, 1)) return e;
    e.shared_activation = pick(FT_SILU, FT_RELU_SQUARED);
    e.shared_inner = 32 * pick(1, 2);
    const int64_t halves = e.shared_activation == FT_RELU_SQUARED ? 1 : 2;
    e.shared_gate_up = make_linear(type, type, hidden, halves * e.shared_inner);
    e.shared_down = make_linear(type, FT_FLOAT32, e.shared_inner, hidden);
    return e;
}

static char *run(const ft_experts *e, const char *x, const char *residual, int64_t first, int64_t rows) {
    const size_t row = (size_t)e->hidden * item_bytes(e->type), bytes = (size_t)rows * row;
    char *y = make_bytes(bytes);
    int64_t distinct = 0;
    const ft_experts_rows call = {.x = make_copy(x + (size_t)first * row, bytes), .y = y, .rows = rows,
                                  .residual = make_copy(residual + (size_t)first * row, bytes),
                                  .choices = make_bytes((size_t)(rows * e->chosen) * sizeof(int32_t)),
                                  .distinct = &distinct};
    ft_experts_run(e, &call);
    wanted(distinct >= e->chosen && distinct <= e->experts, "experts that were read");
    for (int64_t i = 0; i < rows * e->chosen; i++)
        wanted(call.choices[i] >= 0 && call.choices[i] < e->experts, "an expert that there is");
    return y;
}

static void one(void) {
    const ft_experts e = make_experts();
    const int64_t rows = pick(1, pick(0, 3) ? 9 : 80);
    const size_t row = (size_t)e.hidden * item_bytes(e.type);
    const char *x = make_numbers(e.type, rows * e.hidden, 1.0f);
    const char *residual = make_numbers(e.type, rows * e.hidden, 1.0f);
    const char *whole = run(&e, x, residual, 0, rows);
    for (int64_t i = 0; i < rows; i++)
        same_bytes(run(&e, x, residual, i, 1), whole + (size_t)i * row, row, "a row that depends on the others");
}

int main(int count, char **arguments) { return at_every_level("experts", count, arguments, one); }
