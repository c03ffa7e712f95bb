// See stop.h.
#include "stop.h"

#include "draw.h"

int ft_stop_after(const ft_stop *stop, int64_t at, int64_t spans) {
    const float *sure = stop->sure + at * spans;
    float saved = 0.0f;
    int must = 0;
    for (int64_t r = 0; r < spans; r++) {
        if (stop->reach[r] == 0.0f) continue;
        const float reach = stop->reach[r] * sure[r];
        const int pays = sure[r] >= stop->least_sure && reach * stop->token > stop->row;
        if (!pays && at >= stop->least) {
            stop->reach[r] = 0.0f;
            continue;
        }
        stop->reach[r] = reach;
        stop->lengths[r] = at + 1;
        const float more = reach * stop->usual * stop->token - stop->row;
        if (at + 1 < stop->least)
            must = 1;
        else if (more > 0.0f)
            saved += more;
        else
            stop->reach[r] = 0.0f;
    }
    return must || saved > stop->pass;
}

int ft_stop_open(const ft_stop *stop, int64_t spans, int64_t *tokens) {
    for (int64_t r = 0; r < spans; r++) {
        if (tokens[r] != FT_UNDECIDED) continue;
        if (!stop || stop->reach[r] != 0.0f) return 1;
        tokens[r] = 0;
    }
    return 0;
}

int64_t ft_stop_through(const ft_stop *stop, int64_t steps, int64_t spans, int64_t *tokens) {
    for (int64_t at = 0; at < steps; at++) {
        if (ft_stop_open(stop, spans, tokens + at * spans)) return at;
        if (stop && !ft_stop_after(stop, at, spans)) return -2 - at;
    }
    return steps;
}
