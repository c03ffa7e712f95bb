// Rows of the embedding table: copied from floats, or multiplied out of a layer that is packed for the
// kernels, which may be the output head of a model whose embeddings are tied.
//
// A row has the values of the table multiplied out in float32 and rounded once to its type, to the bit. It
// is made anew whenever its token is fed: a few microseconds, and no second copy of the weights.
#ifndef FORETOKEN_EMBEDDING_H
#define FORETOKEN_EMBEDDING_H

#include "linear.h"

typedef struct {
    const void *floats;       // [tokens, width], of `type`; or null
    const ft_linear *packed;  // else: not gated, its outputs are the tokens; what it adds is left out
    int64_t tokens, width;
    int32_t type;  // of the rows
} ft_embedding;

// Writes [rows, width] without gaps. Returns 0, and writes nothing, if a token is not in the table.
FT_EXPORT int ft_embed(const ft_embedding *table, const int64_t *tokens, int64_t rows, void *to);

#endif
