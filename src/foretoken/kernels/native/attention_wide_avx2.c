// Attention of many rows for AVX2; see attention_body.h. Cells are floats: those of twice as many keys
// would take all of an L1 cache.
#if defined(__AVX2__) && defined(__FMA__)
#define STRIP 32
#define NAME ft_attention_wide_avx2
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_wide_avx2;
#endif
