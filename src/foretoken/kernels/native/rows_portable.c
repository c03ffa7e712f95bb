// Rows on any processor; the code is in rows_body.h.
#define NAME ft_rows_portable
#include "rows_body.h"
