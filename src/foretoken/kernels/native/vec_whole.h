/* Vectors of W whole numbers of 32 bits, beside vec.h's floats: what products of integer weights need.
 *
 * Two 16-bit numbers share 32 bits as a pair. A product of pairs adds both products to a sum, exactly.
 * Four bytes share them as a quad: those of the first factor without a sign, of the second with one.
 * QUAD_BITS is how large the first may be for a product of quads to be exact, 0 without that product.
 * Where HALF_STEPS is defined such products go to sums of 16 bits, two in each 32, which hold those of
 * so many steps of 4-bit weights: 2 x HALF_STEPS quads of at most 2 x 15 x 127. Then they are added up.
 * FEW_ROWS, where it is defined: up to so many rows may be quicker as pairs than as quads.
 */
#ifndef FORETOKEN_VEC_WHOLE_H
#define FORETOKEN_VEC_WHOLE_H

#include "vec.h"

/* Bits of the pair at `at`. */
static inline int32_t pair_at(const void *at) {
    int32_t pair;
    memcpy(&pair, at, 4);
    return pair;
}

#if W == 16

typedef __m512i vi;

static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
/* Of every 16 bits. */
#define vi_shift(x, bits) _mm512_srli_epi16(x, bits)
static inline vf vf_of_vi(vi x) { return _mm512_cvtepi32_ps(x); }
static inline void vi_add_products(vi *sum, vi a, vi b) {
#ifdef __AVX512VNNI__
    // As assembly, because GCC 12 copies and spills the sums around the intrinsic.
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
#else
    *sum = _mm512_add_epi32(*sum, _mm512_madd_epi16(a, b));
#endif
}
#ifdef __AVX512VNNI__
#define QUAD_BITS 8
#define FEW_ROWS 4
static inline void vi_add_quads(vi *sum, vi a, vi b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
}
// Bytes 0 and 2 of each four, or 1 and 3, as 16 bits each.
static inline vi vi_odd_or_even_bytes(vi x, const int odd) {
    return _mm512_srai_epi16(odd ? x : _mm512_slli_epi16(x, 8), 8);
}
#else
#define QUAD_BITS 4
#define HALF_STEPS 4
static inline void vi_add_quads(vi *sum, vi a, vi b) {
    *sum = _mm512_add_epi16(*sum, _mm512_maddubs_epi16(a, b));
}
#endif

#elif W == 8

typedef __m256i vi;

static inline vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
#define vi_shift(x, bits) _mm256_srli_epi16(x, bits)
static inline vf vf_of_vi(vi x) { return _mm256_cvtepi32_ps(x); }
#ifdef __AVXVNNI__
static inline void vi_add_products(vi *sum, vi a, vi b) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
}
#define QUAD_BITS 8
#define FEW_ROWS 4
static inline void vi_add_quads(vi *sum, vi a, vi b) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
}
static inline vi vi_odd_or_even_bytes(vi x, const int odd) {
    return _mm256_srai_epi16(odd ? x : _mm256_slli_epi16(x, 8), 8);
}
#else
// As assembly, because GCC 12 makes all products before it adds the first, and spills the sums for them.
static inline void vi_add_products(vi *sum, vi a, vi b) {
    vi products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(*sum), "=&x"(products) : "x"(a), "x"(b));
}
#define QUAD_BITS 4
#define HALF_STEPS 4
static inline void vi_add_quads(vi *sum, vi a, vi b) {
    vi products;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(*sum), "=&x"(products) : "x"(a), "x"(b));
}
#endif

#elif defined(NEON)

/* What adds products is in linear_neon.h, which takes the second factor by lanes. */
typedef int32x4_t vi;

static inline vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
static inline vf vf_of_vi(vi x) { return vcvtq_f32_s32(x); }
#ifdef DOTS
#define QUAD_BITS 8
#else
#define QUAD_BITS 0
#endif

#else

static inline vi vi_set1(int32_t x) { return (vi){x, x, x, x}; }
static inline vi vi_load(const void *p) {
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}
static inline vi vi_and(vi a, vi b) { return a & b; }
typedef uint16_t vi_halves __attribute__((vector_size(16), aligned(4)));
#define vi_shift(x, bits) ((vi)((vi_halves)(x) >> (bits)))
static inline vf vf_of_vi(vi x) { return __builtin_convertvector(x, vf); }
/* `a` holds no negative numbers. */
static inline void vi_add_products(vi *sum, vi a, vi b) {
    const vi low = (vi)((vi)((__typeof__(vi))b << 16) >> 16), high = b >> 16;
    *sum += (a & 0xffff) * low + (a >> 16) * high;
}
#define QUAD_BITS 0

#endif

#endif
