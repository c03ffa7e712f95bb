// Linear layers for AVX-512 with BF16 and VNNI; see linear_body.h.
#include "linear.h"
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define NAME ft_linear_avx512bf16
#define MOST_ROWS 6
#define MOST_FIXED_ROWS 6
#define FIXED_PANELS 4
#define PAIRS
#include "linear_body.h"
#else
const ft_linear_kernels ft_linear_avx512bf16 = {0};
#endif
