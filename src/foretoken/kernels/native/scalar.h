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

// A float16, exactly. What is below its normal numbers is made of whole ones: as a float's own bits it would
// be one that some processors take for zero.
static inline float half_to_float(uint16_t value) {
    const uint32_t sign = (uint32_t)(value & 0x8000) << 16, rest = value & 0x7fff;
    const float tiny = (float)rest * 0x1p-24f;
    uint32_t bits = (rest << 13) + ((rest >= 0x7c00 ? 224u : 112u) << 23);
    if (rest < 0x400) memcpy(&bits, &tiny, 4);
    bits |= sign;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// 2 ** (power - 128); the first two are below a float's normal numbers.
static inline float power_of_two(uint8_t power) {
    const uint32_t bits = power < 2 ? 0x00200000u << power : (uint32_t)(power - 1) << 23;
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
