// Rejection on AVX-512; the code is in reject_body.h.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NAME ft_reject_avx512
#include "reject_body.h"
#else
#include "reject.h"
const ft_reject_rows ft_reject_avx512;
#endif
