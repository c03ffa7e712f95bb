// ft_linear_run as on a processor with tiles, on one without them.
#ifndef EMULATED_AMX_H
#define EMULATED_AMX_H

#include "linear.h"

extern const ft_linear_kernels emulated_linear;

// 0 where it cannot run: it needs AVX-512 with BF16, and a compiler that knows tiles.
int emulated_amx_runs(void);
void run_emulated(const ft_linear *layer, const ft_linear_rows *rows);

#endif
