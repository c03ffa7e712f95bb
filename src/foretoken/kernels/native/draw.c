// Shares rows among the threads; see draw.h.
#include "draw.h"

enum { SERIAL_VALUES = 1 << 14 };  // so few are not worth waking another thread for

ft_draw_one ft_draw_in_use(void) {
#if defined(__aarch64__)
    const ft_draw_one all[] = {ft_draw_portable, ft_draw_neon, ft_draw_neon, ft_draw_neon};
#else
    const ft_draw_one all[] = {ft_draw_portable, ft_draw_avx2,   ft_draw_avx2,
                               ft_draw_avx512,   ft_draw_avx512, ft_draw_avx512};
#endif
    int level = ft_level();
    while (level > FT_PORTABLE && !all[level]) level--;
    return all[level];
}

typedef struct {
    const ft_draw_row *rows;
    const float *logits;
    int64_t vocabulary;
    int64_t *ids;
    ft_draw_one draw;
} state;

static void draw_item(void *context, int64_t row, int worker) {
    (void)worker;
    const state *s = context;
    float *room = ft_scratch(0, FT_DRAW_ROOM(s->vocabulary) * sizeof(float));
    const float *logits = s->logits + row * s->vocabulary;
    s->ids[row] = room ? s->draw(s->rows + row, logits, s->vocabulary, room) : FT_UNDECIDED;
}

void ft_draw(const ft_draw_row *rows, int64_t count, const float *logits, int64_t vocabulary,
             int64_t *ids) {
    state s = {rows, logits, vocabulary, ids, ft_draw_in_use()};
    ft_share_rows(draw_item, &s, count, vocabulary);
}

void ft_share_rows(ft_task task, void *context, int64_t count, int64_t vocabulary) {
    if (count * vocabulary <= SERIAL_VALUES)
        for (int64_t row = 0; row < count; row++) task(context, row, 0);
    else
        ft_parallel(task, context, count);
}

void ft_sure(const float *logits, int64_t rows, int64_t vocabulary, float *chances) {
#if defined(__aarch64__)
    const ft_sure_one all[] = {ft_sure_portable, ft_sure_neon, ft_sure_neon, ft_sure_neon};
#else
    const ft_sure_one all[] = {ft_sure_portable, ft_sure_avx2,   ft_sure_avx2,
                               ft_sure_avx512,   ft_sure_avx512, ft_sure_avx512};
#endif
    int level = ft_level();
    while (level > FT_PORTABLE && !all[level]) level--;
    for (int64_t r = 0; r < rows; r++) chances[r] = all[level](logits + r * vocabulary, vocabulary);
}
