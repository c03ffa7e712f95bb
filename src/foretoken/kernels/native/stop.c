// See stop.h.
#include "stop.h"

#include "draw.h"

int ft_stop_after(const ft_stop *stop, int64_t at, int64_t spans) {
    const float *sure = stop->sure + at * spans;
    int goes_on = 0;
    for (int64_t r = 0; r < spans; r++) {
        if (stop->lengths[r] < at) continue;
        if (!(sure[r] >= stop->least_sure) && at >= stop->least) continue;
        stop->lengths[r] = at + 1;
        goes_on = 1;
    }
    return goes_on;
}

int ft_stop_open(const ft_stop *stop, int64_t at, int64_t spans, int64_t *tokens) {
    for (int64_t r = 0; r < spans; r++) {
        if (tokens[r] != FT_UNDECIDED) continue;
        if (!stop || stop->lengths[r] == at) return 1;
        tokens[r] = 0;
    }
    return 0;
}

int64_t ft_stop_through(const ft_stop *stop, int64_t steps, int64_t spans, int64_t *tokens) {
    for (int64_t at = 0; at < steps; at++) {
        if (ft_stop_open(stop, at, spans, tokens + at * spans)) return at;
        if (stop && !ft_stop_after(stop, at, spans)) return at + 1;
    }
    return steps;
}
