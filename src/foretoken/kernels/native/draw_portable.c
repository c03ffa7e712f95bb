// Draws in plain C; the code is in draw_body.h.
#define NAME ft_draw_portable
#define SURE ft_sure_portable
#include "draw_body.h"
