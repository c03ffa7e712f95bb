// Linear layers for AMX: bfloat16 on tiles, the rest as AVX-512 has it; see linear_body.h.
#include "linear.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define NAME ft_linear_amx
#define MOST_ROWS 6
#define MOST_FIXED_ROWS 6
#define FIXED_PANELS 4
#define PAIRS
#define TILES
#include "linear_body.h"
#else
const ft_linear_kernels ft_linear_amx = {0};
#endif
