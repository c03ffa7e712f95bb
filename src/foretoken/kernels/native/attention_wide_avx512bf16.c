// Attention of many rows for AVX-512 with BF16; see attention_body.h.
#if defined(__AVX512BF16__)
#define STRIP 64
#define NAME ft_attention_wide_avx512bf16
#define PAIRS
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_wide_avx512bf16;
#endif
