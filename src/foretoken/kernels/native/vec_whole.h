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
#define vi_shift_up(x, bits) _mm512_slli_epi16(x, bits)
static inline vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
static inline vi vi_times_256(vi x) { return _mm512_slli_epi32(x, 8); }
static inline vi vi_load_bytes(const void *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
static inline void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
/* A table of 16 bytes, and what it has for bytes below 16. */
static inline vi vi_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
static inline vi vi_look_up(vi table, vi x) { return _mm512_shuffle_epi8(table, x); }
static inline vf vf_of_powers(const uint8_t *p) {
    const vi power = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    const vi tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), power);
    const __mmask16 small = _mm512_cmplt_epi32_mask(power, _mm512_set1_epi32(2));
    const vi usual = _mm512_slli_epi32(_mm512_sub_epi32(power, _mm512_set1_epi32(1)), 23);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(usual, small, tiny));
}
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
#define vi_shift_up(x, bits) _mm256_slli_epi16(x, bits)
static inline vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
static inline vi vi_times_256(vi x) { return _mm256_slli_epi32(x, 8); }
static inline vi vi_load_bytes(const void *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
static inline void vi_store(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }
static inline vi vi_table(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
static inline vi vi_look_up(vi table, vi x) { return _mm256_shuffle_epi8(table, x); }
static inline vf vf_of_powers(const uint8_t *p) {
    const vi power = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    const vi tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), power);
    const vi usual = _mm256_slli_epi32(_mm256_sub_epi32(power, _mm256_set1_epi32(1)), 23);
    const vi small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), power);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, tiny, small));
}
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
static inline vi vi_load(const void *p) { return vld1q_s32(p); }
static inline vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
static inline vi vi_or(vi a, vi b) { return vorrq_s32(a, b); }
static inline vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
static inline vi vi_mul(vi a, vi b) { return vmulq_s32(a, b); }
static inline vi vi_load_bytes(const void *p) {
    int8_t lanes[8] = {0};
    memcpy(lanes, p, W);
    return vmovl_s16(vget_low_s16(vmovl_s8(vld1_s8(lanes))));
}
static inline void vi_store(void *p, vi x) { vst1q_s32(p, x); }
#define vi_shift_up(x, bits) vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(x), vdupq_n_s16(bits)))
#define vi_shift(x, bits) vi_shift_up(x, -(bits))
static inline void vi_add_products(vi *sum, vi a, vi b) {
    const int16x8_t first = vreinterpretq_s16_s32(a), second = vreinterpretq_s16_s32(b);
    const int32x4_t low = vmull_s16(vget_low_s16(first), vget_low_s16(second));
    *sum = vaddq_s32(*sum, vpaddq_s32(low, vmull_high_s16(first, second)));
}
static inline vi vi_table(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
static inline vi vi_look_up(vi table, vi x) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(x)));
}
static inline vf vf_of_powers(const uint8_t *p) {
    float lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = power_of_two(p[i]);
    return vf_load(lanes);
}
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
#define vi_shift_up(x, bits) ((vi)((vi_halves)(x) << (bits)))
static inline vi vi_or(vi a, vi b) { return a | b; }
static inline vi vi_add(vi a, vi b) { return a + b; }
static inline vi vi_mul(vi a, vi b) { return a * b; }
static inline vi vi_load_bytes(const void *p) {
    const int8_t *const at = p;
    return (vi){at[0], at[1], at[2], at[3]};
}
static inline void vi_store(void *p, vi x) { memcpy(p, &x, sizeof x); }
static inline vi vi_table(const uint8_t *p) { return vi_load(p); }
static inline vi vi_look_up(vi table, vi x) {
    const uint8_t *const from = (const uint8_t *)&table;
    uint8_t *const at = (uint8_t *)&x;
    for (size_t i = 0; i < sizeof x; i++) at[i] = from[at[i]];
    return x;
}
static inline vf vf_of_powers(const uint8_t *p) {
    vf x;
    for (int i = 0; i < W; i++) x[i] = power_of_two(p[i]);
    return x;
}
static inline vf vf_of_vi(vi x) { return __builtin_convertvector(x, vf); }
/* `a` holds no negative numbers. */
static inline void vi_add_products(vi *sum, vi a, vi b) {
    const vi low = (vi)((vi)((__typeof__(vi))b << 16) >> 16), high = b >> 16;
    *sum += (a & 0xffff) * low + (a >> 16) * high;
}
#define QUAD_BITS 0

#endif

#endif
