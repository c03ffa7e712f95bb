// Attention on any processor; the code is in attention_body.h.
#define NAME ft_attention_portable
#include "attention_body.h"
