// Rejection in plain C; the code is in reject_body.h.
#define NAME ft_reject_portable
#include "reject_body.h"
