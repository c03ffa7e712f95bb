// Linear layers for AVX2 with FMA; see linear_body.h.
#include "linear.h"
#if defined(__AVX2__) && defined(__FMA__)
#define NAME ft_linear_avx2
#define MOST_ROWS 6
#define MOST_FIXED_ROWS 6
#define FIXED_PANELS 4
#define PANELS_OF(rows, bits) ((rows) == 1 ? 4 : (bits) == 8 && (rows) <= 3 ? 2 : 1)
#include "linear_body.h"
#else
const ft_linear_kernels ft_linear_avx2 = {0};
#endif
