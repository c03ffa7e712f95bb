// Linear layers in plain C; see linear_body.h.
#define NAME ft_linear_portable
#define MOST_ROWS 2
#define MOST_FIXED_ROWS 2
#define FIXED_PANELS 1
#include "linear_body.h"
