// Linear layers for NEON with products of bfloat16 and of small matrices; see linear_body.h.
#include "linear.h"
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && \
    defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define NEON
#define DOTS
#define PAIRS
#define NAME ft_linear_neonbf16
#define MOST_ROWS 6
#define MOST_FIXED_ROWS 6
#define FIXED_PANELS 4
#include "linear_body.h"
#else
const ft_linear_kernels ft_linear_neonbf16 = {0};
#endif
