// Rows on NEON; the code is in rows_body.h.
#if defined(__aarch64__)
#define NEON
#define NAME ft_rows_neon
#include "rows_body.h"
#else
#include "rows.h"
const ft_row_kernels ft_rows_neon;
#endif
