// One value of a row of either type at a time, for the few hundred between matrices.
#ifndef FORETOKEN_SCALAR_H
#define FORETOKEN_SCALAR_H

#include <stdint.h>
#include <string.h>

#include "foretoken.h"

static inline float ft_value(const void *row, int64_t at, int32_t type) {
    if (type != FT_BFLOAT16) return ((const float *)row)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)row)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// To nearest, ties to even; not for NaN.
static inline void ft_put(void *row, int64_t at, float x, int32_t type) {
    if (type != FT_BFLOAT16) {
        ((float *)row)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    ((uint16_t *)row)[at] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#endif
