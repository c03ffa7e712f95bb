// Cuts attention into units of work and shares them among the threads; see attention.h.
#include "attention.h"

#include <stdlib.h>

enum {
    MOST_ROWS = 192,        // query rows of a unit and key head: a multiple of every tile
    FEW_ROWS = 6,           // query rows of a unit and key head that the narrow kernels are for
    MOST_VALUES = 96 << 10  // of a unit's output, so that its state stays in the L2 cache
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Where keys are pairs of bfloat16 the best kernel multiplies pairs.
static const ft_attention_kernel *kernel_of(int32_t type) {
#if defined(__aarch64__)
    enum { BEST_OF_FLOATS = FT_NEON };
    const ft_attention_kernel *const all[] = {&ft_attention_portable, &ft_attention_neon,
                                              &ft_attention_neon, &ft_attention_neonbf16};
#else
    enum { BEST_OF_FLOATS = FT_AVX512 };
    const ft_attention_kernel *const all[] = {&ft_attention_portable,   &ft_attention_avx2,
                                              &ft_attention_avx2,       &ft_attention_avx512,
                                              &ft_attention_avx512bf16, &ft_attention_avx512bf16};
#endif
    int level = ft_level();
    if (type == FT_FLOAT32 && level > BEST_OF_FLOATS) level = BEST_OF_FLOATS;
    while (level > FT_PORTABLE && !all[level]->ready) level--;
    return all[level];
}

// That for many rows, where there is one.
static const ft_attention_kernel *wide_of(const ft_attention_kernel *kernel) {
    if (kernel == &ft_attention_avx2) return &ft_attention_wide_avx2;
    if (kernel == &ft_attention_avx512) return &ft_attention_wide_avx512;
    if (kernel == &ft_attention_avx512bf16) return &ft_attention_wide_avx512bf16;
    return kernel;
}

// All key heads together where that leaves enough units: then keys are read as they lie.
static int heads_of_unit(const ft_attention_shape *shape, int64_t rows, int64_t blocks) {
    const int64_t values = rows * (shape->num_heads / shape->num_kv_heads) * shape->head_dim;
    int64_t heads = most(1, least(shape->num_kv_heads, MOST_VALUES / values));
    const int threads = ft_threads();
    if (threads > 1)
        while (heads > 1 && blocks * (shape->num_kv_heads / heads) < 2 * threads)
            heads = (heads + 1) / 2;
    return (int)heads;
}

int64_t ft_attention_plan(const ft_attention_shape *shape, const ft_span *spans, int32_t num_spans,
                          ft_attention_unit *units, int64_t capacity) {
    const int most_rows = (int)most(1, MOST_ROWS / (shape->num_heads / shape->num_kv_heads));
    int64_t count = 0, blocks = 0;
    for (int s = 0; s < num_spans; s++) blocks += (spans[s].num_rows + most_rows - 1) / most_rows;
    for (int s = 0; s < num_spans; s++)
        for (int row = 0; row < spans[s].num_rows; row += most_rows) {
            const int rows = (int)least(most_rows, spans[s].num_rows - row);
            const int heads = heads_of_unit(shape, rows, blocks);
            for (int head = 0; head < shape->num_kv_heads; head += heads, count++) {
                const int end = (int)least(head + heads, shape->num_kv_heads);
                if (count < capacity)
                    units[count] = (ft_attention_unit){s, row, row + rows, head, end};
            }
        }
    return count;
}

typedef struct {
    const ft_attention_call *call;
    const ft_attention_unit *units;
    const ft_attention_kernel *narrow, *wide;
    int64_t num_units;
} run_state;

static void run_item(void *context, int64_t item, int worker) {
    (void)worker;
    const run_state *state = context;
    const ft_attention_unit *unit = state->units + item;
    const ft_attention_shape *shape = state->call->shape;
    const int rows = unit->end_row - unit->first_row, heads = unit->end_head - unit->first_head;
    const int few = rows * (shape->num_heads / shape->num_kv_heads) <= FEW_ROWS;
    const ft_attention_kernel *kernel = few ? state->narrow : state->wide;
    const size_t floats = kernel->scratch(shape, rows, heads);
    float *scratch = ft_scratch(1, floats * sizeof(float));
    if (!scratch) abort();
    const int64_t after = item + ft_threads();
    const ft_attention_unit *next = after < state->num_units ? state->units + after : NULL;
    kernel->run(state->call, unit, next, scratch);
}

void ft_attention_run(const ft_attention_call *call, const ft_attention_unit *units,
                      int64_t num_units) {
    const ft_attention_kernel *kernel = kernel_of(call->shape->type);
    run_state state = {call, units, kernel, wide_of(kernel), num_units};
    ft_parallel(run_item, &state, num_units);
}
