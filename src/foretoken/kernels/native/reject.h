// Which drafts of a chain or a tree stay when distributions are weighed, and the token after them.
//
// The twins are foretoken.ops.rejection, ops.block and ops.tree over PyTorch, with the same uniforms and
// the same keyed noise. Their arithmetic differs in the last bits, so a test whose outcome is within
// rounding is left to the twin, with all of its span (FT_UNDECIDED): what is decided is what it decides.
#ifndef FORETOKEN_REJECT_H
#define FORETOKEN_REJECT_H

#include "draw.h"

enum { FT_BY_DRAFT = 0, FT_BY_BLOCK = 1 };  // on trees: recursive rejection, traversal

// The drafts of one request and where they lie.
typedef struct {
    ft_draw_row how;   // temperature and filters of all its rows; key: the request's, not a row's
    int64_t position;  // of the first draft in its sequence: how many tokens are committed
    int64_t row;       // of the first draft's logits; a chain's follow each other, node i of a tree has
                       // row + 1 + i for what comes after it
    int64_t drafted;   // row of the first draft's distribution
    int64_t first;     // of its drafts among all ids
    int64_t count;     // of its drafts, 1 or more
} ft_reject_span;

typedef struct {
    const ft_reject_span *spans;
    const int64_t *ids;      // of all drafts; -1 is never kept
    const int64_t *parents;  // of trees: the node each comes after, -1 the root, parents first; or null
    const float *logits;     // [rows, vocabulary], edited, temperature and filters not applied
    const float *drafted;    // [drafts, vocabulary]: what each was drawn from; null: one-hot
    int64_t *kept;           // [spans], written: how many stay
    int64_t *paths;          // of trees: [drafts], written: the nodes that stay, from each span's first on
    int64_t *last;           // [spans], written: the token after them, or FT_UNDECIDED
    int64_t num_spans, vocabulary, rule;
} ft_reject_call;

FT_EXPORT void ft_reject(const ft_reject_call *call);

// The softmax of each row after temperature and filters. Returns 0 where a row has no finite largest
// value, or memory is short; nothing is promised of `probs` then.
FT_EXPORT int32_t ft_distributions(const ft_draw_row *rows, int64_t count, const float *logits,
                                   int64_t vocabulary, float *probs);

// What is done to whole rows, by instruction set. `room` is that of FT_DRAW_ROOM.
typedef struct {
    // As ft_distributions, of one row.
    int (*distribute)(const ft_draw_row *how, const float *logits, int64_t count, float *probs,
                      float *room);
    // max(weight p - q, 0) into `left`, which may be p; the sum.
    double (*subtract)(const float *p, const float *q, float weight, int64_t count, float *left);
    // x * by in place.
    void (*multiply)(float *x, float by, int64_t count);
    // Natural logarithms, -inf of what is not a normal positive number.
    void (*log)(const float *x, int64_t count, float *logs);
} ft_reject_rows;
extern const ft_reject_rows ft_reject_portable, ft_reject_avx2, ft_reject_avx512, ft_reject_neon;

#endif
