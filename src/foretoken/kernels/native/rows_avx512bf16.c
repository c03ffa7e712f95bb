// Rows on AVX-512 with bfloat16; the code is in rows_body.h.
#if defined(__AVX512BF16__)
#define NAME ft_rows_avx512bf16
#include "rows_body.h"
#else
#include "rows.h"
const ft_row_kernels ft_rows_avx512bf16;
#endif
