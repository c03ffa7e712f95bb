// Linear layers for AMX tiles: not written yet, so that level uses avx512bf16's.
#include "linear.h"

const ft_linear_kernels ft_linear_amx = {0};
