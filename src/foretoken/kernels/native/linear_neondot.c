// Linear layers for NEON with dot products of bytes; see linear_body.h.
#include "linear.h"
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define NEON
#define DOTS
#define NAME ft_linear_neondot
#define MOST_ROWS 6
#define MOST_FIXED_ROWS 6
#define FIXED_PANELS 4
#include "linear_body.h"
#else
const ft_linear_kernels ft_linear_neondot = {0};
#endif
