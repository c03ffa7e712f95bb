// Products and nothing else, as many as the processor makes: twelve sums that do not wait for each
// other, operands that stay in registers. Each function returns how many products it has made.
#include <immintrin.h>
#include <stdint.h>

enum { SUMS = 12 };

#if defined(__AVX512F__)
typedef __m512i whole;
typedef __m512 real;
enum { BYTES = 64 };
#define ADD(a, b) _mm512_add_epi32(a, b)
#define MADD16(a, b) _mm512_madd_epi16(a, b)
#define MADD8(a, b) _mm512_maddubs_epi16(a, b)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#if defined(__AVX512VNNI__)
#define ADD16(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)
#define ADD8(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)
#endif
#else
typedef __m256i whole;
typedef __m256 real;
enum { BYTES = 32 };
#define ADD(a, b) _mm256_add_epi32(a, b)
#define MADD16(a, b) _mm256_madd_epi16(a, b)
#define MADD8(a, b) _mm256_maddubs_epi16(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#if defined(__AVXVNNI__)
#define ADD16(sum, a, b) _mm256_dpwssd_avx_epi32(sum, a, b)
#define ADD8(sum, a, b) _mm256_dpbusd_avx_epi32(sum, a, b)
#endif
#endif
// The compiler must neither drop a sum nor move it to memory.
#define KEEP(x) __asm__ volatile("" : "+v"(x))
#define EACH for (int i = 0; i < SUMS; i++)

uint64_t products_bf16(uint64_t rounds) {
    real sum[SUMS] = {0};
#if defined(__AVX512BF16__)
    __m512bh a = (__m512bh)_mm512_set1_epi16(0), b = a;
    KEEP(a);
    KEEP(b);
    for (uint64_t n = 0; n < rounds; n++) {
#pragma GCC unroll 12
        EACH {
            sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
            KEEP(sum[i]);
        }
    }
    return rounds * SUMS * (BYTES / 2);
#else
    real a = {0}, b = {0};
    KEEP(a);
    KEEP(b);
    for (uint64_t n = 0; n < rounds; n++) {
#pragma GCC unroll 12
        EACH {
            sum[i] = FMA(a, b, sum[i]);
            KEEP(sum[i]);
        }
    }
    return rounds * SUMS * (BYTES / 4);
#endif
}

uint64_t products_int16(uint64_t rounds) {
    whole sum[SUMS] = {0}, a = {0}, b = {0};
    KEEP(a);
    KEEP(b);
    for (uint64_t n = 0; n < rounds; n++) {
#pragma GCC unroll 12
        EACH {
#if defined(ADD16)
            sum[i] = ADD16(sum[i], a, b);
#else
            whole pair = MADD16(a, b);
            KEEP(pair);
            sum[i] = ADD(sum[i], pair);
#endif
            KEEP(sum[i]);
        }
    }
    return rounds * SUMS * (BYTES / 2);
}

uint64_t products_int8(uint64_t rounds) {
    whole sum[SUMS] = {0}, a = {0}, b = {0};
    KEEP(a);
    KEEP(b);
    for (uint64_t n = 0; n < rounds; n++) {
#pragma GCC unroll 12
        EACH {
#if defined(ADD8)
            sum[i] = ADD8(sum[i], a, b);
#else
            whole pair = MADD8(a, b);
            KEEP(pair);
            whole four = MADD16(pair, b);
            KEEP(four);
            sum[i] = ADD(sum[i], four);
#endif
            KEEP(sum[i]);
        }
    }
    return rounds * SUMS * BYTES;
}
