// Rejection on NEON; the code is in reject_body.h.
#if defined(__aarch64__)
#define NEON
#define NAME ft_reject_neon
#include "reject_body.h"
#else
#include "reject.h"
const ft_reject_rows ft_reject_neon;
#endif
