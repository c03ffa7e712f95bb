// Linear layers for AVX-512; see linear_body.h.
#include "linear.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NAME ft_linear_avx512
#define MOST_ROWS 6
#define MOST_FIXED_ROWS 6
#define FIXED_PANELS 4
#include "linear_body.h"
#else
const ft_linear_kernels ft_linear_avx512 = {0};
#endif
