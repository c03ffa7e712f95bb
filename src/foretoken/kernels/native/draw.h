// The token of each row of logits: the best, or the one that keyed noise draws (Gumbel-max).
//
// The twin is foretoken.ops.sampling over foretoken.ops.noise: the id with the largest
// logit / temperature - log(E), E exponential noise hashed from the row's key and the id, among those
// that min_p, top_k and top_p leave. Logarithms here are not those of the twin to the last bit, so a
// row whose decision is within their error is left to the twin: what is decided is what it decides.
#ifndef FORETOKEN_DRAW_H
#define FORETOKEN_DRAW_H

#include "foretoken.h"

enum {
    FT_DRAW_MOST_K = 1024,  // a larger top_k is left to the twin
    FT_UNDECIDED = -1
};

typedef struct {
    uint64_t key;       // of the row's noise
    float temperature;  // 0: the best id, the lowest of equal ones
    float log_min_p;    // -inf: none
    float top_p;        // above 1: none
    int32_t top_k;      // 0: none
} ft_draw_row;

// logits are [rows, vocabulary] without gaps, and finite or -inf; ids [rows] are written.
FT_EXPORT void ft_draw(const ft_draw_row *rows, int64_t count, const float *logits,
                       int64_t vocabulary, int64_t *ids);

// One row; `room` holds FT_DRAW_ROOM(vocabulary) floats.
typedef int64_t (*ft_draw_one)(const ft_draw_row *row, const float *logits, int64_t vocabulary,
                               float *room);
ft_draw_one ft_draw_in_use(void);

// Each row of logits as a task, shared among the threads where there is enough to do.
void ft_share_rows(ft_task task, void *context, int64_t count, int64_t vocabulary);

// The chance of the best id of a row, temperature and filters aside.
typedef float (*ft_sure_one)(const float *logits, int64_t vocabulary);
void ft_sure(const float *logits, int64_t rows, int64_t vocabulary, float *chances);
#define FT_DRAW_ROOM(vocabulary) (3 * ((size_t)(vocabulary) + 64))

// Of an instruction set; null: this build has none.
extern const ft_draw_one ft_draw_portable, ft_draw_avx2, ft_draw_avx512, ft_draw_neon;
extern const ft_sure_one ft_sure_portable, ft_sure_avx2, ft_sure_avx512, ft_sure_neon;

#endif
