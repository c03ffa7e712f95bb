// Rows on AVX2 and FMA; the code is in rows_body.h.
#if defined(__AVX2__) && defined(__FMA__)
#define NAME ft_rows_avx2
#include "rows_body.h"
#else
#include "rows.h"
const ft_row_kernels ft_rows_avx2;
#endif
