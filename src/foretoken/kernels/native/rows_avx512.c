// Rows on AVX-512; the code is in rows_body.h.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NAME ft_rows_avx512
#include "rows_body.h"
#else
#include "rows.h"
const ft_row_kernels ft_rows_avx512;
#endif
