// Rejection on AVX2; the code is in reject_body.h.
#if defined(__AVX2__) && defined(__FMA__)
#define NAME ft_reject_avx2
#include "reject_body.h"
#else
#include "reject.h"
const ft_reject_rows ft_reject_avx2;
#endif
