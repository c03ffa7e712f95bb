// Shares rows among the threads; see rows.h.
#include "rows.h"

enum {
    SERIAL_VALUES = 1 << 14,  // so few are not worth waking another thread for
    ITEM_ROWS = 8
};

static const ft_row_kernels *kernels(void) {
#if defined(__aarch64__)
    const ft_row_kernels *const all[] = {&ft_rows_portable, &ft_rows_neon, &ft_rows_neon,
                                         &ft_rows_neonbf16};
#else
    const ft_row_kernels *const all[] = {&ft_rows_portable,   &ft_rows_avx2,
                                         &ft_rows_avx2,       &ft_rows_avx512,
                                         &ft_rows_avx512bf16, &ft_rows_avx512bf16};
#endif
    int level = ft_level();
    while (level > FT_PORTABLE && !all[level]->ready) level--;
    return all[level];
}

typedef struct {
    void (*run)(const void *call, int64_t first, int64_t end);
    const void *call;
    int64_t rows;
} share_state;

static void share_item(void *context, int64_t item, int worker) {
    (void)worker;
    const share_state *state = context;
    const int64_t end = (item + 1) * ITEM_ROWS;
    state->run(state->call, item * ITEM_ROWS, end < state->rows ? end : state->rows);
}

static void share(share_state state, int64_t width) {
    if (state.rows * width <= SERIAL_VALUES)
        state.run(state.call, 0, state.rows);
    else
        ft_parallel(share_item, &state, (state.rows + ITEM_ROWS - 1) / ITEM_ROWS);
}

static void run_norm(const void *call, int64_t first, int64_t end) {
    kernels()->norm(call, first, end);
}

static void run_rotary(const void *call, int64_t first, int64_t end) {
    kernels()->rotary(call, first, end);
}

static void run_gate(const void *call, int64_t first, int64_t end) {
    kernels()->gate(call, first, end);
}

void ft_norm(const ft_norm_call *call) {
    share((share_state){run_norm, call, call->rows}, call->width);
}

void ft_rotary(const ft_rotary_call *call) {
    const int64_t heads = call->num_heads + 2 * call->num_kv_heads;
    share((share_state){run_rotary, call, call->rows}, heads * call->head_dim);
}

void ft_gate(const ft_gate_call *call) {
    share((share_state){run_gate, call, call->rows}, 4 * call->width);
}

enum { SCORED_ROWS = 64, SERIAL_SCORES = 1 << 15 };

static void scores_item(void *context, int64_t item, int worker) {
    (void)worker;
    const ft_scores_call *call = context;
    const int64_t panels = call->outputs / 16, first = item / panels * SCORED_ROWS;
    const int64_t end = first + SCORED_ROWS < call->rows ? first + SCORED_ROWS : call->rows;
    kernels()->scores(call, item % panels, first, end);
}

void ft_scores(const ft_scores_call *call) {
    const int64_t items = call->outputs / 16 * ((call->rows + SCORED_ROWS - 1) / SCORED_ROWS);
    if (call->rows * call->hidden * call->outputs > SERIAL_SCORES)
        ft_parallel(scores_item, (void *)call, items);
    else
        for (int64_t item = 0; item < items; item++) scores_item((void *)call, item, 0);
}
