// Draws on AVX2; the code is in draw_body.h.
#if defined(__AVX2__) && defined(__FMA__)
#define NAME ft_draw_avx2
#define SURE ft_sure_avx2
#include "draw_body.h"
#else
#include "draw.h"
const ft_draw_one ft_draw_avx2;
const ft_sure_one ft_sure_avx2;
#endif
