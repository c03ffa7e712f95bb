// Draws on AVX-512; the code is in draw_body.h.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NAME ft_draw_avx512
#define SURE ft_sure_avx512
#include "draw_body.h"
#else
#include "draw.h"
const ft_draw_one ft_draw_avx512;
const ft_sure_one ft_sure_avx512;
#endif
