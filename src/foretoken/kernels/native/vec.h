/* Vectors of W floats for whatever instruction set this file is compiled for.
 *
 * One small vocabulary (load, store, fma, max, exp2, ...) written four times: AVX-512, AVX2 with
 * FMA, NEON where a file defines that name (every aarch64 has it, and its plain C stays plain), and
 * plain C in GCC's vector extension for anything else. Files that include it never name an
 * instruction set. Compile with -ffp-contract=off: where a product and a sum become one
 * instruction is written, not left to the compiler, so that a row's bits cannot depend on which
 * copy of an inlined loop computed it.
 */
#ifndef FORETOKEN_VEC_H
#define FORETOKEN_VEC_H

#include <stdint.h>
#include <string.h>

#include "scalar.h"

typedef uint16_t bf16;

static inline float load_float(const void *at) {
    float x;
    memcpy(&x, at, sizeof x);
    return x;
}

static inline float bf16_to_float(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline bf16 float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>
#define W 16
typedef __m512 vf;

static inline __mmask16 vf_tail(int count) {
    return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
/* The second operand where either is NaN, as the instruction does. */
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_fms(vf a, vf b, vf c) { return _mm512_fmsub_ps(a, b, c); }
static inline float vf_sum(vf x) { return _mm512_reduce_add_ps(x); }
static inline float vf_peak(vf x) { return _mm512_reduce_max_ps(x); }
static inline vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(vf_tail(n), p); }
static inline void vf_store_n(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, vf_tail(n), x); }
static inline vf vf_of_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static inline __m256i vf_to_bf16(vf x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i sum = _mm512_add_epi32(bits, bias);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(sum, nan, quiet), 16));
#endif
}
static inline vf vf_load_bf16(const bf16 *p) {
    return vf_of_bf16(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf vf_load_bf16_n(const bf16 *p, int n) {
    return vf_of_bf16(_mm256_maskz_loadu_epi16(vf_tail(n), p));
}
static inline vf vf_load_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void vf_store_bf16(bf16 *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, vf_to_bf16(x));
}
static inline void vf_store_bf16_n(bf16 *p, vf x, int n) {
    _mm256_mask_storeu_epi16(p, vf_tail(n), vf_to_bf16(x));
}
static inline vf vf_load_int8_n(const int8_t *p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(vf_tail(n), p)));
}
/* Of whole numbers from -127 to 127. */
static inline void vf_store_int8_n(int8_t *p, vf x, int n) {
    _mm_mask_storeu_epi8(p, vf_tail(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
/* x where low <= lane + base <= high, else `other`. */
static inline vf vf_within(vf x, int base, int low, int high, vf other) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(base));
    const __mmask16 seen = _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(high)) &
                           _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(low));
    return _mm512_mask_mov_ps(other, seen, x);
}
static inline int vf_any_above(vf x, float limit) {
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}
/* value where x is not -inf, else 0. */
static inline vf vf_where_finite(vf x, vf value) {
    const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
    return _mm512_maskz_mov_ps(seen, value);
}
/* 2^n * x for the whole numbers n of `power`. */
static inline vf vf_scale(vf x, vf power) { return _mm512_scalef_ps(x, power); }
static inline vf vf_round(vf x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>
#define W 8
typedef __m256 vf;

static inline __m256i vf_tail(int count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
}
static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_fms(vf a, vf b, vf c) { return _mm256_fmsub_ps(a, b, c); }
static inline float vf_sum(vf x) {
    float lanes[W];
    vf_store(lanes, x);
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}
static inline float vf_peak(vf x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
static inline vf vf_load_n(const float *p, int n) { return _mm256_maskload_ps(p, vf_tail(n)); }
/* A masked store is slow on AMD. */
static inline void vf_store_n(float *p, vf x, int n) {
    if (n >= W)
        vf_store(p, x);
    else
        _mm256_maskstore_ps(p, vf_tail(n), x);
}
static inline vf vf_load_bf16(const bf16 *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vf vf_load_half(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void vf_store_bf16(bf16 *p, vf x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
    const __m128i low = _mm256_castsi256_si128(upper), high = _mm256_extracti128_si256(upper, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}
static inline vf vf_within(vf x, int base, int low, int high, vf other) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i at = _mm256_add_epi32(lanes, _mm256_set1_epi32(base));
    const __m256i unseen = _mm256_or_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32(high)),
                                           _mm256_cmpgt_epi32(_mm256_set1_epi32(low), at));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(unseen));
}
static inline int vf_any_above(vf x, float limit) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
}
static inline vf vf_where_finite(vf x, vf value) {
    const __m256 unseen = _mm256_cmp_ps(x, _mm256_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
    return _mm256_andnot_ps(unseen, value);
}
static inline vf vf_round(vf x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf vf_scale(vf x, vf power) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23);
    const vf scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
    /* Below the smallest normal number: zero. NaN is not below. */
    const vf tiny = _mm256_cmp_ps(power, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    const vf nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_andnot_ps(tiny, scaled), x, nan);
}

#elif defined(NEON)

#include <arm_neon.h>
#define W 4
typedef float32x4_t vf;

static inline vf vf_set1(float x) { return vdupq_n_f32(x); }
static inline vf vf_load(const float *p) { return vld1q_f32(p); }
static inline void vf_store(float *p, vf x) { vst1q_f32(p, x); }
static inline vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
/* The instructions of these names would give NaN where the others give the second operand. */
static inline vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vf vf_fms(vf a, vf b, vf c) { return vfmaq_f32(vnegq_f32(c), a, b); }
static inline float vf_sum(vf x) {
    return vpadds_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)));
}
static inline float vf_peak(vf x) { return vmaxnmvq_f32(x); }
static inline vf vf_load_n(const float *p, int n) {
    float lanes[W] = {0};
    if (n >= W) return vf_load(p);
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return vf_load(lanes);
}
static inline void vf_store_n(float *p, vf x, int n) {
    float lanes[W];
    if (n >= W) {
        vf_store(p, x);
        return;
    }
    vf_store(lanes, x);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
}
static inline vf vf_of_bf16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
static inline uint16x4_t vf_to_bf16(vf x) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
    const uint32x4_t bits = vreinterpretq_u32_f32(x), number = vceqq_f32(x, x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(number, sum, quiet), 16);
#endif
}
static inline vf vf_load_bf16(const bf16 *p) { return vf_of_bf16(vld1_u16(p)); }
static inline vf vf_load_half(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline void vf_store_bf16(bf16 *p, vf x) { vst1_u16(p, vf_to_bf16(x)); }
static inline vf vf_load_bf16_n(const bf16 *p, int n) {
    bf16 lanes[W] = {0};
    if (n >= W) return vf_load_bf16(p);
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return vf_load_bf16(lanes);
}
static inline void vf_store_bf16_n(bf16 *p, vf x, int n) {
    bf16 lanes[W];
    if (n >= W) {
        vf_store_bf16(p, x);
        return;
    }
    vf_store_bf16(lanes, x);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
}
static inline vf vf_load_int8_n(const int8_t *p, int n) {
    int8_t lanes[8] = {0};
    if (n >= W)
        memcpy(lanes, p, W);
    else
        for (int i = 0; i < n; i++) lanes[i] = p[i];
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vld1_s8(lanes)))));
}
/* Of whole numbers from -127 to 127. */
static inline void vf_store_int8_n(int8_t *p, vf x, int n) {
    int8_t lanes[8];
    const int16x4_t whole = vmovn_s32(vcvtq_s32_f32(x));
    vst1_s8(lanes, vmovn_s16(vcombine_s16(whole, whole)));
    for (int i = 0; i < W && i < n; i++) p[i] = lanes[i];
}
static inline vf vf_within(vf x, int base, int low, int high, vf other) {
    static const int32_t lanes[W] = {0, 1, 2, 3};
    const int32x4_t at = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(base));
    const uint32x4_t seen =
        vandq_u32(vcleq_s32(at, vdupq_n_s32(high)), vcgeq_s32(at, vdupq_n_s32(low)));
    return vbslq_f32(seen, x, other);
}
static inline int vf_any_above(vf x, float limit) {
    return vmaxvq_u32(vcgtq_f32(x, vdupq_n_f32(limit))) != 0;
}
static inline vf vf_where_finite(vf x, vf value) {
    const uint32x4_t unseen = vceqq_f32(x, vdupq_n_f32(-__builtin_inff()));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), unseen));
}
static inline vf vf_round(vf x) { return vrndnq_f32(x); }
static inline vf vf_scale(vf x, vf power) {
    /* No number is 0 when converted, and comes with an x that is none either. */
    const int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(power), 23);
    const int32x4_t scaled = vaddq_s32(vreinterpretq_s32_f32(x), exponent);
    const uint32x4_t tiny = vcltq_f32(power, vdupq_n_f32(-126.0f));
    const vf kept = vreinterpretq_f32_s32(vbicq_s32(scaled, vreinterpretq_s32_u32(tiny)));
    return vbslq_f32(vceqq_f32(x, x), kept, x);
}

#else

#define W 4
typedef float vf __attribute__((vector_size(16), aligned(4)));
typedef int32_t vi __attribute__((vector_size(16), aligned(4)));

static inline vf vf_set1(float x) { return (vf){x, x, x, x}; }
static inline vf vf_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
static inline void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_pick(vi which, vf a, vf b) { return (vf)(((vi)a & which) | ((vi)b & ~which)); }
static inline vf vf_max(vf a, vf b) { return vf_pick((vi)(a > b), a, b); }
static inline vf vf_min(vf a, vf b) { return vf_pick((vi)(a < b), a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf vf_fms(vf a, vf b, vf c) { return a * b - c; }
static inline float vf_sum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
static inline float vf_peak(vf x) {
    float peak = x[0];
    for (int i = 1; i < W; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}
static inline vf vf_load_n(const float *p, int n) {
    vf x = vf_set1(0);
    memcpy(&x, p, (size_t)(n > W ? W : n) * sizeof(float));
    return x;
}
static inline void vf_store_n(float *p, vf x, int n) {
    memcpy(p, &x, (size_t)(n > W ? W : n) * sizeof(float));
}
static inline vf vf_load_bf16(const bf16 *p) {
    vf x;
    for (int i = 0; i < W; i++) x[i] = bf16_to_float(p[i]);
    return x;
}
static inline vf vf_load_half(const uint16_t *p) {
    vf x;
    for (int i = 0; i < W; i++) x[i] = half_to_float(p[i]);
    return x;
}
static inline void vf_store_bf16(bf16 *p, vf x) {
    for (int i = 0; i < W; i++) p[i] = float_to_bf16(x[i]);
}
static inline vf vf_within(vf x, int base, int low, int high, vf other) {
    const vi at = (vi){0, 1, 2, 3} + base;
    return vf_pick((vi)(at <= high) & (vi)(at >= low), x, other);
}
static inline int vf_any_above(vf x, float limit) {
    const vi above = (vi)(x > limit);
    return (above[0] | above[1] | above[2] | above[3]) != 0;
}
static inline vf vf_where_finite(vf x, vf value) {
    return vf_pick((vi)(x != vf_set1(-__builtin_inff())), value, vf_set1(0));
}
static inline vf vf_round(vf x) {
    const vf magic = vf_set1(12582912.0f); /* 1.5 * 2^23: the fraction falls off the end */
    return (x + magic) - magic;
}
static inline vf vf_scale(vf x, vf power) {
    /* The exponent moves in two steps that cannot overflow it; NaN powers come with NaN x. */
    const vi whole = __builtin_convertvector(vf_pick((vi)(power == power), power, vf_set1(0)), vi);
    const vf scaled = (vf)((vi)x + (vi)((__typeof__(vi))whole * (1 << 23)));
    return vf_pick((vi)(power < -126.0f), vf_set1(0), vf_pick((vi)(x == x), scaled, x));
}

#endif

/* vf_fma(a, b, *sum) where it was. */
static inline void vf_add_product(vf *sum, vf a, vf b) {
#if W == 8
    // As assembly, because GCC 12 overwrites factors with sums, and keeps both in memory for it.
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
#else
    *sum = vf_fma(a, b, *sum);
#endif
}

#if W != 16 && !defined(NEON)
static inline vf vf_load_int8_n(const int8_t *p, int n) {
#if W == 8
    if (n >= W) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#endif
    float lanes[W] = {0};
    for (int i = 0; i < W && i < n; i++) lanes[i] = p[i];
    return vf_load(lanes);
}
/* Of whole numbers from -127 to 127. */
static inline void vf_store_int8_n(int8_t *p, vf x, int n) {
    float lanes[W];
    vf_store(lanes, x);
    for (int i = 0; i < W && i < n; i++) p[i] = (int8_t)lanes[i];
}
/* Whole vectors first: a copy of a length that is not known is a call. */
static inline vf vf_load_bf16_n(const bf16 *p, int n) {
    if (n >= W) return vf_load_bf16(p);
    bf16 lanes[W] = {0};
    memcpy(lanes, p, (size_t)n * sizeof(bf16));
    return vf_load_bf16(lanes);
}
static inline void vf_store_bf16_n(bf16 *p, vf x, int n) {
    if (n >= W) {
        vf_store_bf16(p, x);
        return;
    }
    bf16 lanes[W];
    vf_store_bf16(lanes, x);
    memcpy(p, lanes, (size_t)n * sizeof(bf16));
}
#endif

/* x as if it had been stored as bfloat16 and loaded again. */
static inline vf vf_as_bf16(vf x) {
    bf16 lanes[W];
    vf_store_bf16(lanes, x);
    return vf_load_bf16(lanes);
}

/* 2^x for x <= 127, within 1.2e-7 of its value; exactly 1 at 0, exactly 0 below -150, NaN of NaN.
 * 2^fraction is a polynomial of degree 5 fitted on [-1/2, 1/2] for the least relative error. */
static inline vf vf_exp2(vf x) {
    x = vf_max(vf_set1(-200.0f), x);
    const vf whole = vf_round(x), f = vf_sub(x, whole);
    vf p = vf_set1(0.0013264726889633018f);
    p = vf_fma(p, f, vf_set1(0.009671512662507844f));
    p = vf_fma(p, f, vf_set1(0.05550733744274031f));
    p = vf_fma(p, f, vf_set1(0.24022242084876885f));
    p = vf_fma(p, f, vf_set1(0.6931469775984541f));
    p = vf_fma(p, f, vf_set1(1.0f));
    return vf_scale(p, whole);
}

#endif
