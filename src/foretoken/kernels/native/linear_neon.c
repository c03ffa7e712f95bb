// Linear layers for NEON; see linear_body.h.
#include "linear.h"
#if defined(__aarch64__)
#define NEON
#define NAME ft_linear_neon
#define MOST_ROWS 6
#define MOST_FIXED_ROWS 4
#define FIXED_PANELS 1
#include "linear_body.h"
#else
const ft_linear_kernels ft_linear_neon = {0};
#endif
