// Attention of many rows for AVX-512; see attention_body.h.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define STRIP 64
#define NAME ft_attention_wide_avx512
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_wide_avx512;
#endif
