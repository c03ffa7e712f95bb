// One block of memory cut into aligned parts.
#ifndef FORETOKEN_CARVING_H
#define FORETOKEN_CARVING_H

#include "linear.h"

// The next part, of so many bytes; `at` moves behind it.
static inline void *ft_carve(char **at, int64_t bytes) {
    char *start = *at;
    *at += ft_round_up(bytes, 64);
    return start;
}

#endif
