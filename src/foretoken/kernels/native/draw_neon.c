// Draws on NEON; the code is in draw_body.h.
#if defined(__aarch64__)
#define NEON
#define NAME ft_draw_neon
#define SURE ft_sure_neon
#include "draw_body.h"
#else
#include "draw.h"
const ft_draw_one ft_draw_neon;
const ft_sure_one ft_sure_neon;
#endif
