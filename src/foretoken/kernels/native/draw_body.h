// The draw of draw.h, written once over vec.h. A file that includes this has defined NAME and SURE.
#include <float.h>
#include <math.h>

#include "draw.h"
#include "logit_row.h"

typedef uint32_t vu __attribute__((vector_size(4 * W)));

#define UNIT ((1.0f - 0x1p-24f) * 0x1p-31f)  // as _UNIT in foretoken.ops.noise

static inline vu fold(vu x, int by) { return x ^ (x >> by); }

// 31 bits for each id from `first` on, as in foretoken.ops.noise, taken to (0, 1).
static inline vf uniforms(uint32_t low, uint32_t high, int64_t first) {
    vu lanes;
    for (int i = 0; i < W; i++) lanes[i] = (uint32_t)i;
    vu hash = fold(lanes + ((uint32_t)first + low), 16);
    hash = fold((hash * 0x85EBCA6Bu) ^ high, 13);
    hash = fold(hash * 0xC2B2AE35u, 16);
    hash = fold(hash * 739982445u, 15) & 0x7FFFFFFFu;
    const vf whole = (vf)__builtin_convertvector((vs)hash, __typeof__(vf_set1(0.0f)));
    return vf_mul(vf_add(whole, vf_set1(0.5f)), vf_set1(UNIT));
}

static inline float uniform(uint32_t low, uint32_t high, int64_t id) {
    uint32_t hash = (uint32_t)id + low;
    hash = ((hash ^ (hash >> 16)) * 0x85EBCA6Bu) ^ high;
    hash = (hash ^ (hash >> 13)) * 0xC2B2AE35u;
    hash = (hash ^ (hash >> 16)) * 739982445u;
    hash = (hash ^ (hash >> 15)) & 0x7FFFFFFFu;
    return ((float)(int32_t)hash + 0.5f) * UNIT;
}

static int64_t best(const float *values, int64_t count) {
    float most = -INFINITY;
    int64_t at = 0;
    for (int64_t i = 0; i < count; i += BLOCK) {
        const float here = largest(values + i, count - i < BLOCK ? count - i : BLOCK);
        if (here > most) most = here, at = i;
    }
    while (at + 1 < count && values[at] < most) at++;
    return at;
}

typedef struct {
    const float *scaled;  // logits / temperature
    const float *above;   // scaled - log(u): at least the score, as E >= u
    int64_t count;
    uint32_t low, high;
} row;

static double score_at(const row *r, int64_t id) {
    const double u = (double)uniform(r->low, r->high, id);
    return (double)r->scaled[id] - log(-log1p(-u));
}

// The id with the largest score among those at `floor` or above it and strictly above `bar`.
static int64_t winner(const row *r, float floor, float bar) {
    float peaks[(1 << 20) / BLOCK];
    const int64_t blocks = (r->count + BLOCK - 1) / BLOCK;
    const float low = bar >= floor ? nextafterf(bar, INFINITY) : floor;
    float most = -INFINITY;
    int64_t at = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t end = (b + 1) * BLOCK < r->count ? (b + 1) * BLOCK : r->count;
        vf peak = vf_set1(-INFINITY);
        for (int64_t i = b * BLOCK; i < end; i += W) {
            const vf scaled = load_or(r->scaled + i, end - i, -INFINITY);
            const vf above = load_or(r->above + i, end - i, -INFINITY);
            const vs in = (vs)(scaled >= vf_set1(low));
            peak = vf_max(peak, (vf)(((vs)above & in) | ((vs)vf_set1(-INFINITY) & ~in)));
        }
        peaks[b] = vf_peak(peak);
        if (peaks[b] > most) most = peaks[b], at = b;
    }
    if (!(most > -INFINITY && most < INFINITY)) return FT_UNDECIDED;
    const double error = 1e-4 + 2e-6 * fabs((double)most);
    double first = -INFINITY, second = -INFINITY;
    int64_t found = FT_UNDECIDED;
    for (int64_t step = -1; step < blocks; step++) {  // the most promising block first
        const int64_t b = step < 0 ? at : step;
        if ((step >= 0 && b == at) || peaks[b] < first - error) continue;
        const int64_t end = (b + 1) * BLOCK < r->count ? (b + 1) * BLOCK : r->count;
        for (int64_t i = b * BLOCK; i < end; i++) {
            if (r->scaled[i] < low || r->above[i] < first - error) continue;
            const double score = score_at(r, i);
            if (score > first)
                second = first, first = score, found = i;
            else if (score > second)
                second = score;
        }
    }
    return first - second > error ? found : FT_UNDECIDED;
}

static int64_t draw(const ft_draw_row *how, const float *logits, int64_t count, float *room) {
    if (how->temperature == 0.0f) return best(logits, count);
    if (how->top_k > FT_DRAW_MOST_K || count > (1 << 20)) return FT_UNDECIDED;
    float *scaled = room, *above = scaled + count + 64, *weights = above + count + 64;
    const uint32_t low = (uint32_t)how->key, high = (uint32_t)(how->key >> 32);
    vf peak = vf_set1(-INFINITY);
    const vf temperature = vf_set1(how->temperature);
    for (int64_t i = 0; i < count; i += W) {
        const vf x = vf_div(load_or(logits + i, count - i, -INFINITY), temperature);
        peak = vf_max(peak, x);
        vf_store(scaled + i, x);
        vf_store(above + i, vf_sub(x, logarithm(uniforms(low, high, i))));
    }
    const float most = vf_peak(peak);
    if (!(most > -INFINITY && most < INFINITY)) return FT_UNDECIDED;
    float floor = -FLT_MAX;
    if (how->log_min_p > -INFINITY) floor = most + how->log_min_p;
    if (how->top_k > 0 && how->top_k < count) {
        const float kth = kth_largest(scaled, count, how->top_k);
        floor = kth > floor ? kth : floor;
    }
    const row r = {scaled, above, count, low, high};
    int64_t found = winner(&r, floor, -INFINITY);
    if (how->top_p > 1.0f || found == FT_UNDECIDED) return found;
    for (int64_t i = 0; i < count; i += W) {
        const vf x = vf_sub(vf_load(scaled + i), vf_set1(most));
        vf_store(weights + i, vf_exp2(vf_mul(x, vf_set1(LOG2_E))));
    }
    const double whole = mass(weights, scaled, count, floor);
    while (found != FT_UNDECIDED && scaled[found] < most) {
        const float bar = scaled[found];
        const double before = mass(weights, scaled, count, nextafterf(bar, INFINITY));
        const double room_left = (double)how->top_p * whole - before;
        if (fabs(room_left) < 3e-5 * whole) return FT_UNDECIDED;
        if (room_left > 0.0) break;
        found = winner(&r, floor, bar);
    }
    return found;
}

static float sure(const float *logits, int64_t count) {
    const vf peak = vf_set1(largest(logits, count)), rate = vf_set1(LOG2_E);
    vf sum = vf_set1(0.0f);
    for (int64_t i = 0; i < count; i += W) {
        const vf x = vf_sub(load_or(logits + i, count - i, -INFINITY), peak);
        sum = vf_add(sum, vf_exp2(vf_mul(x, rate)));
    }
    return 1.0f / vf_sum(sum);
}

const ft_draw_one NAME = draw;
const ft_sure_one SURE = sure;
