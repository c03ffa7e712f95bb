// Attention on AVX-512 with bfloat16; the code is in attention_body.h.
#if defined(__AVX512BF16__)
#define NAME ft_attention_avx512bf16
#define PAIRS
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_avx512bf16;
#endif
