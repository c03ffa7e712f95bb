// Whole rows for reject.c, written once over vec.h. A file that includes this has defined NAME.
#include "logit_row.h"
#include "reject.h"

// The k-th largest value for any k: of a copy, by parts around a middle value. Each turn keeps the part
// that holds it, so this takes a few passes and no sorting.
static float kth_of_copy(float *values, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    const int64_t wanted = k - 1;
    while (low < high) {
        const float middle = values[low + (high - low) / 2];
        int64_t left = low, right = high;
        while (left <= right) {
            while (values[left] > middle) left++;
            while (values[right] < middle) right--;
            if (left > right) break;
            // Equal values are swapped too: both sides stay about equally long where many are equal.
            const float swapped = values[left];
            values[left++] = values[right];
            values[right--] = swapped;
        }
        if (wanted <= right)
            high = right;
        else if (wanted >= left)
            low = left;
        else
            break;
    }
    return values[wanted];
}

// Where the mass of the best values reaches `needed`: the value that brings it there, with `before`
// counted already. Parts around a middle value like kth_of_copy, but goes on by what they weigh: a
// full sort of a thousand values took longer than the rest of the row.
static float value_at_mass(float *values, float *weights, int64_t count, double before,
                           double needed) {
    int64_t low = 0, high = count - 1;
    float worst = values[low];
    while (low <= high) {
        const float middle = values[low + (high - low) / 2];
        int64_t above = low, below = high;  // [low, above) > middle, (below, high] < middle
        double better = 0.0, equal = 0.0;
        for (int64_t at = low; at <= below;) {
            const float value = values[at], weight = weights[at];
            if (value > middle) {
                values[at] = values[above], weights[at++] = weights[above];
                values[above] = value, weights[above++] = weight;
                better += (double)weight;
            } else if (value < middle) {
                values[at] = values[below], weights[at] = weights[below];
                values[below] = value, weights[below--] = weight;
            } else {
                equal += (double)weight;
                at++;
            }
        }
        if (before + better >= needed && above > low) {
            high = above - 1;
        } else {
            worst = middle;
            before += better + equal;
            if (before >= needed) break;
            low = below + 1;
        }
    }
    return worst;
}

// The worst value among those that together are the smallest set of best ones with `needed` mass.
// Looks at a few widths below the largest value, then at what lies in the width that reaches it: most
// of the mass is in few values.
static float cut_at_mass(const float *weights, const float *scaled, int64_t count, float most,
                         float floor, double needed, float *room) {
    float *values = room, *masses = room + count + 64;
    static const float widths[] = {1, 2, 4, 6, 9, 13, 18, 25, 40, INFINITY};
    float above = INFINITY;  // values at `above` or better have been counted
    double before = 0.0;
    for (size_t at = 0; at < sizeof widths / sizeof *widths; at++) {
        const float low = most - widths[at] > floor ? most - widths[at] : floor;
        const double upto = mass(weights, scaled, count, low);
        if (upto < needed && low > floor) {
            above = low, before = upto;
            continue;
        }
        // Values above this width count already, so only its own are looked at.
        int64_t found = 0;
        for (int64_t i = 0; i < count; i++) {
            // Written always, kept by counting on: the branch would be a coin's toss.
            values[found] = scaled[i], masses[found] = weights[i];
            found += scaled[i] >= low && scaled[i] < above;
        }
        if (found > 0) return value_at_mass(values, masses, found, before, needed);
        return above < INFINITY ? above : most;
    }
    return floor;
}

static int distribute(const ft_draw_row *how, const float *logits, int64_t count, float *probs,
                      float *room) {
    float *scaled = room, *spare = scaled + count + 64;
    const vf temperature = vf_set1(how->temperature);
    vf peak = vf_set1(-INFINITY);
    for (int64_t i = 0; i < count; i += W) {
        const vf x = vf_div(load_or(logits + i, count - i, -INFINITY), temperature);
        peak = vf_max(peak, x);
        vf_store(scaled + i, x);
    }
    const float most = vf_peak(peak);
    if (!(most > -INFINITY && most < INFINITY)) return 0;
    // Filters apply in turn to what the one before leaves. Each is a floor, and the floor only rises.
    float floor = -FLT_MAX;
    if (how->log_min_p > -INFINITY) floor = most + how->log_min_p;
    if (how->top_k > 0 && how->top_k < count) {
        float kth;
        if (how->top_k <= FT_DRAW_MOST_K) {
            kth = kth_largest(scaled, count, how->top_k);
        } else {
            memcpy(spare, scaled, (size_t)count * sizeof(float));
            kth = kth_of_copy(spare, count, how->top_k);
        }
        floor = kth > floor ? kth : floor;
    }
    // Relative to the largest value, so that no power overflows.
    for (int64_t i = 0; i < count; i += W) {
        const vf x = vf_mul(vf_sub(vf_load(scaled + i), vf_set1(most)), vf_set1(LOG2_E));
        const vf weight = vf_exp2(x);
        if (count - i >= W) {
            vf_store(probs + i, weight);
        } else {
            float lanes[W];
            vf_store(lanes, weight);
            memcpy(probs + i, lanes, (size_t)(count - i) * sizeof(float));
        }
    }
    double whole = mass(probs, scaled, count, floor);
    if (how->top_p <= 1.0f) {
        // Of the mass that min_p and top_k left, not of all.
        const double needed = (double)how->top_p * whole;
        const float cut = cut_at_mass(probs, scaled, count, most, floor, needed, spare);
        floor = cut > floor ? cut : floor;
        whole = mass(probs, scaled, count, floor);
    }
    const float share = (float)(1.0 / whole);
    for (int64_t i = 0; i < count; i++) probs[i] = scaled[i] >= floor ? probs[i] * share : 0.0f;
    return 1;
}

static double subtract(const float *p, const float *q, float weight, int64_t count, float *left) {
    // Blocks are summed in float32, and the blocks' sums in float64: the sum decides a test, and one long
    // sum in float32 would lose the many small values.
    double sum = 0.0;
    for (int64_t i = 0; i < count; i += BLOCK) {
        const int64_t end = i + BLOCK < count ? i + BLOCK : count;
        vf part = vf_set1(0.0f);
        int64_t at = i;
        for (; at + W <= end; at += W) {
            const vf rest = vf_sub(vf_mul(vf_load(p + at), vf_set1(weight)), vf_load(q + at));
            const vf kept = vf_max(rest, vf_set1(0.0f));
            part = vf_add(part, kept);
            vf_store(left + at, kept);
        }
        sum += (double)vf_sum(part);
        for (; at < end; at++) {
            const float rest = p[at] * weight - q[at];
            left[at] = rest > 0.0f ? rest : 0.0f;
            sum += (double)left[at];
        }
    }
    return sum;
}

static void multiply(float *x, float by, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] *= by;
}

static void take_log(const float *x, int64_t count, float *logs) {
    const vf least = vf_set1(FLT_MIN);
    for (int64_t i = 0; i < count; i += W) {
        // The logarithm is computed of something normal in every lane, then replaced where x was not.
        const vf here = load_or(x + i, count - i, 0.0f);
        const vs in = (vs)(here >= least);
        const vf found = (vf)(((vs)logarithm(vf_max(here, least)) & in) |
                              ((vs)vf_set1(-INFINITY) & ~in));
        if (count - i >= W) {
            vf_store(logs + i, found);
        } else {
            float lanes[W];
            vf_store(lanes, found);
            memcpy(logs + i, lanes, (size_t)(count - i) * sizeof(float));
        }
    }
}

const ft_reject_rows NAME = {distribute, subtract, multiply, take_log};
