// linear.c once more, choosing the kernels of emulated_amx.c whatever the processor has.
#include "emulated_amx.h"

int emulated_amx_runs(void) { return emulated_linear.ready && ft_cpu_level() >= FT_AVX512BF16; }

#define ft_level() FT_AMX
#define ft_linear_amx emulated_linear
#define ft_linear_kernels_in_use emulated_kernels_in_use
#define ft_linear_run run_emulated
#define ft_linear_dense dense_emulated
#include "linear.c"
