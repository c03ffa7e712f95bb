// Rows on NEON with bfloat16; the code is in rows_body.h.
#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define NEON
#define NAME ft_rows_neonbf16
#include "rows_body.h"
#else
#include "rows.h"
const ft_row_kernels ft_rows_neonbf16;
#endif
