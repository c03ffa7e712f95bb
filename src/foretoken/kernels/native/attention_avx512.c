// Attention on AVX-512; the code is in attention_body.h.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NAME ft_attention_avx512
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_avx512;
#endif
