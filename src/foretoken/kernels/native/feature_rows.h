// Hidden states of the target by slot, of which a drafter reads some columns as one row.
#ifndef FORETOKEN_FEATURE_ROWS_H
#define FORETOKEN_FEATURE_ROWS_H

#include "foretoken.h"

#include <string.h>

typedef struct {
    const void *slots;      // `stride` bytes apart
    const int64_t *pieces;  // [num_pieces]: where each piece of a row begins in its slot, in bytes
    int64_t stride, piece_bytes, num_pieces;
} ft_features;

// The rows of these slots, one behind the other.
static inline void ft_gather_features(const ft_features *f, const int64_t *slots, int64_t rows, void *to) {
    char *next = to;
    for (int64_t r = 0; r < rows; r++) {
        const char *slot = (const char *)f->slots + slots[r] * f->stride;
        for (int64_t p = 0; p < f->num_pieces; p++, next += f->piece_bytes)
            memcpy(next, slot + f->pieces[p], (size_t)f->piece_bytes);
    }
}

#endif
