// Attention on NEON with bfloat16; the code is in attention_body.h.
#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define NEON
#define NAME ft_attention_neonbf16
#define PAIRS
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_neonbf16;
#endif
