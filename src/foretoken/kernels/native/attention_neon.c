// Attention on NEON; the code is in attention_body.h.
#if defined(__aarch64__)
#define NEON
#define NAME ft_attention_neon
#include "attention_body.h"
#else
#include "attention.h"
const ft_attention_kernel ft_attention_neon;
#endif
