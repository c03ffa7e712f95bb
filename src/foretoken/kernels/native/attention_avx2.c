// Attention on AVX2 and FMA; the code is in attention_body.h.
#if defined(__AVX2__) && defined(__FMA__)
#define NAME ft_attention_avx2
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_avx2;
#endif
