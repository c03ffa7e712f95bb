// The tests of reject.h, one uniform number each; rows are the business of reject_body.h.
#include "reject.h"

#include <float.h>
#include <math.h>
#include <string.h>

static const double NEAR = 2e-5;  // relative; two sides of a test that are nearer are left to the twin
enum { STREAM_TARGET, STREAM_ACCEPT, STREAM_RECOVER };  // as Stream in foretoken.ops.noise

static uint64_t mix(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

// As row_key in foretoken.ops.noise.
static uint64_t row_key(uint64_t key, int64_t position, int stream, int64_t anchor) {
    const uint64_t gamma = 0x9E3779B97F4A7C15u;
    const uint64_t word = mix(key + (8 * (uint64_t)position + (uint64_t)stream + 1) * gamma);
    return anchor ? mix(word + (uint64_t)anchor * gamma) : word;
}

static double uniform(uint64_t key) { return ((double)(key >> 12) + 0.5) * 0x1p-52; }

static const double CRUMB = 1e-6;  // of a mass of 1; what is less may be rounding alone

// Whether a test is too close to call; `slack` is what b may be wrong by beside its last bits.
static int near(double a, double b, double slack) {
    return fabs(a - b) <= NEAR * (fabs(a) + fabs(b)) + slack;
}

// One span at work: its rows, and room for a few more.
typedef struct {
    const ft_reject_call *call;
    const ft_reject_span *span;
    const ft_reject_rows *rows;
    ft_draw_one draw;
    float *p;     // the target's distribution where a draft is tested, [vocabulary]
    float *more;  // of a traversal, those of the nodes below, each [vocabulary]
    float *room;  // of FT_DRAW_ROOM
} work;

static const float *logits_at(const work *w, int64_t row) {
    return w->call->logits + (w->span->row + row) * w->call->vocabulary;
}

static const float *drafted_at(const work *w, int64_t draft) {
    const float *all = w->call->drafted;
    return all ? all + (w->span->drafted + draft) * w->call->vocabulary : NULL;
}

static int64_t token_of(const work *w, int64_t draft) {
    return w->call->ids[w->span->first + draft];
}

static int weigh_row(const work *w, int64_t row, float *p) {
    return w->rows->distribute(&w->span->how, logits_at(w, row), w->call->vocabulary, p, w->room);
}

// The token of a row of logits, after `kept` drafts, with the target's own noise or that of
// replacements.
static int64_t draw_own(const work *w, int64_t row, int64_t kept, int stream) {
    ft_draw_row how = w->span->how;
    how.key = row_key(how.key, w->span->position + kept, stream, 0);
    return w->draw(&how, logits_at(w, row), w->call->vocabulary, w->room);
}

// The token of weights that need not sum to one; the weights are lost.
static int64_t draw_weights(const work *w, float *weights, int64_t kept, int stream) {
    const ft_draw_row how = {
        .key = row_key(w->span->how.key, w->span->position + kept, stream, 0),
        .temperature = 1.0f, .log_min_p = -INFINITY, .top_p = 2.0f, .top_k = 0};
    w->rows->log(weights, w->call->vocabulary, weights);
    return w->draw(&how, weights, w->call->vocabulary, w->room);
}

// What a rejected draft leaves of `weight` p, in its place: max(weight p - q, 0). The sum, or 0 where
// nothing is left; p is scaled by no more than that.
static double take_away(const work *w, float *p, float weight, int64_t draft) {
    const float *q = drafted_at(w, draft);
    const int64_t token = token_of(w, draft);
    if (q) return w->rows->subtract(p, q, weight, w->call->vocabulary, p);
    const double left = (double)weight * (1.0 - (double)p[token]);
    p[token] = 0.0f;
    return left;
}

// The token in place of draft `at` of a chain, whose row's distribution is in w->p.
static int64_t replace(const work *w, int64_t at, float weight) {
    if (token_of(w, at) < 0) return draw_own(w, at, at, STREAM_RECOVER);
    const double left = take_away(w, w->p, weight, at);
    if (left <= 0.0) return draw_own(w, at, at, STREAM_RECOVER);
    if (left < CRUMB) return FT_UNDECIDED;
    return draw_weights(w, w->p, at, STREAM_RECOVER);
}

static int64_t chain(const work *w, int64_t *kept) {
    const ft_reject_span *span = w->span;
    for (int64_t at = 0; at < span->count; at++) {
        *kept = at;
        const int64_t token = token_of(w, at);
        if (token < 0) return replace(w, at, 1.0f);
        if (!weigh_row(w, at, w->p)) return FT_UNDECIDED;
        const float *q = drafted_at(w, at);
        const uint64_t key = row_key(span->how.key, span->position + at, STREAM_ACCEPT, 0);
        const double bar = uniform(key) * (q ? (double)q[token] : 1.0), p = (double)w->p[token];
        if (near(bar, p, 0.0)) return FT_UNDECIDED;
        if (bar > p) return replace(w, at, 1.0f);
    }
    *kept = span->count;
    return draw_own(w, span->count, span->count, STREAM_TARGET);
}

// One draft of a block: the weight of the drafts before it, and what they leave over there.
typedef struct {
    double before, left;
} link;

// See foretoken.ops.block_verification. `links` has room for one more than there are drafts.
static int64_t block(const work *w, link *links, int64_t *kept) {
    const ft_reject_span *span = w->span;
    const int64_t count = span->count, vocabulary = w->call->vocabulary;
    links[0].before = 1.0;
    for (int64_t at = 0; at < count; at++) {
        const int64_t token = token_of(w, at);
        const double before = links[at].before;
        double ratio = 0.0;
        if (!weigh_row(w, at, w->p)) return FT_UNDECIDED;
        if (token < 0) {
            links[at].left = before;
        } else {
            const float *q = drafted_at(w, at);
            const double own = (double)w->p[token];
            ratio = own / (q ? fmax((double)q[token], (double)FLT_MIN) : 1.0);
            links[at].left = q ? w->rows->subtract(w->p, q, (float)before, vocabulary, w->p)
                               : before * (1.0 - own);
        }
        links[at + 1].before = fmin(before * ratio, 1.0);
    }
    *kept = 0;
    for (int64_t number = count; number > 0; number--) {
        const double weight = links[number].before;
        double chance = weight, slack = 0.0;
        if (number < count) {
            const double left = links[number].left, rest = left + 1.0 - weight;
            chance = rest > 0.0 ? left / rest : 1.0;
            slack = left > 0.0 || rest < CRUMB ? CRUMB / (rest + CRUMB) : 0.0;
        }
        const uint64_t key =
            row_key(span->how.key, span->position + number - 1, STREAM_ACCEPT, span->position);
        const double u = uniform(key);
        if (near(u, chance, slack)) return FT_UNDECIDED;
        if (u <= chance) {
            *kept = number;
            break;
        }
    }
    if (*kept == count) return draw_own(w, count, count, STREAM_TARGET);
    if (!weigh_row(w, *kept, w->p)) return FT_UNDECIDED;
    return replace(w, *kept, (float)links[*kept].before);
}

// The next child of `parent` after node `after`; -1: there is none.
static int64_t next_child(const work *w, int64_t parent, int64_t after) {
    const int64_t *parents = w->call->parents + w->span->first;
    for (int64_t node = after + 1; node < w->span->count; node++)
        if (parents[node] == parent) return node;
    return -1;
}

// weight p / q of a node, at most 1.
static double ratio_of(const work *w, const float *p, double weight, int64_t node) {
    const float *q = drafted_at(w, node);
    const int64_t token = token_of(w, node);
    double ratio = weight * (double)p[token];
    if (q) ratio /= fmax((double)q[token], (double)FLT_MIN);
    return fmin(ratio, 1.0);
}

// What the rejected `node` leaves, as a distribution again; the mass it left.
static double reject_node(const work *w, float *p, double weight, int64_t node) {
    const float *q = drafted_at(w, node);
    if (!q) {
        const double own = (double)p[token_of(w, node)];
        p[token_of(w, node)] = 0.0f;
        if (own < 1.0) w->rows->multiply(p, (float)(1.0 / (1.0 - own)), w->call->vocabulary);
        return weight * (1.0 - own);
    }
    const double left = w->rows->subtract(p, q, (float)weight, w->call->vocabulary, p);
    if (left > 0.0) w->rows->multiply(p, (float)(1.0 / left), w->call->vocabulary);
    return left;
}

static uint64_t tests_key(const work *w) {
    const ft_reject_span *span = w->span;
    return row_key(span->how.key, span->position, STREAM_ACCEPT, span->position);
}

static double test_uniform(uint64_t key, int64_t number) {
    return uniform(row_key(key, number, STREAM_ACCEPT, 0));
}

// From the root down, child by child.
static int64_t walk(const work *w, int64_t *path, int64_t *kept) {
    const uint64_t key = tests_key(w);
    int64_t node = -1, child = next_child(w, -1, -1), tests = 0;
    *kept = 0;
    if (!weigh_row(w, 0, w->p)) return FT_UNDECIDED;
    while (child >= 0) {
        const double chance = ratio_of(w, w->p, 1.0, child), u = test_uniform(key, tests++);
        if (near(u, chance, 0.0)) return FT_UNDECIDED;
        if (u < chance) {
            path[(*kept)++] = child;
            node = child;
            if (!weigh_row(w, node + 1, w->p)) return FT_UNDECIDED;
            child = next_child(w, node, node);
        } else {
            if (reject_node(w, w->p, 1.0, child) < CRUMB) return FT_UNDECIDED;
            child = next_child(w, node, child);
        }
    }
    const int inside = next_child(w, node, node) >= 0;
    return draw_weights(w, w->p, *kept, inside ? STREAM_RECOVER : STREAM_TARGET);
}

// A node of the path that a traversal is at.
typedef struct {
    int64_t node, child;  // child: the next to try; -1: none is left
    double accepted, slack;  // slack: what `accepted` may be wrong by
} frame;

static float *frame_row(const work *w, int64_t depth) {
    return depth ? w->more + (depth - 1) * w->call->vocabulary : w->p;
}

// Go down first children to a leaf. The new depth; -1 where a row cannot be weighed.
static int64_t descend(const work *w, frame *frames, int64_t depth) {
    while (frames[depth].child >= 0) {
        const int64_t child = frames[depth].child;
        const double accepted = ratio_of(w, frame_row(w, depth), frames[depth].accepted, child);
        depth++;
        frames[depth] = (frame){child, next_child(w, child, child), accepted, 0.0};
        if (!weigh_row(w, child + 1, frame_row(w, depth))) return -1;
    }
    return depth;
}

// From the leaves up, path by path; see foretoken.ops.tree_rejection.
static int64_t traverse(const work *w, frame *frames, int64_t *path, int64_t *kept) {
    const uint64_t key = tests_key(w);
    *kept = 0;
    if (!weigh_row(w, 0, w->p)) return FT_UNDECIDED;
    frames[0] = (frame){-1, next_child(w, -1, -1), 1.0, 0.0};
    int64_t depth = descend(w, frames, 0);
    for (int64_t tests = 0; depth > 0; tests++) {
        const double chance = frames[depth].accepted, u = test_uniform(key, tests);
        if (near(u, chance, frames[depth].slack)) return FT_UNDECIDED;
        if (u < chance) break;
        frame *above = frames + --depth;
        const double mass = reject_node(w, frame_row(w, depth), above->accepted, above->child);
        const double rest = mass + 1.0 - above->accepted;
        if (rest < 10 * CRUMB || (mass > 0.0 && mass < CRUMB)) return FT_UNDECIDED;
        above->accepted = mass / rest;
        above->slack = mass > 0.0 ? CRUMB / rest : 0.0;
        above->child = next_child(w, above->node, above->child);
        depth = descend(w, frames, depth);
    }
    if (depth < 0) return FT_UNDECIDED;
    for (int64_t at = 1; at <= depth; at++) path[at - 1] = frames[at].node;
    *kept = depth;
    const int64_t node = frames[depth].node;
    const int inside = next_child(w, node, node) >= 0;
    return draw_weights(w, frame_row(w, depth), depth, inside ? STREAM_RECOVER : STREAM_TARGET);
}

static ft_reject_rows const *rows_in_use(void) {
#if defined(__aarch64__)
    const ft_reject_rows *all[] = {&ft_reject_portable, &ft_reject_neon, &ft_reject_neon,
                                   &ft_reject_neon};
#else
    const ft_reject_rows *all[] = {&ft_reject_portable, &ft_reject_avx2,   &ft_reject_avx2,
                                   &ft_reject_avx512,   &ft_reject_avx512, &ft_reject_avx512};
#endif
    int level = ft_level();
    while (level > FT_PORTABLE && !all[level]->distribute) level--;
    return all[level];
}

static int64_t depth_of(const ft_reject_call *call, const ft_reject_span *span, int64_t *depths) {
    int64_t most = 0;
    for (int64_t node = 0; node < span->count; node++) {
        const int64_t parent = call->parents[span->first + node];
        depths[node] = parent < 0 ? 1 : depths[parent] + 1;
        most = depths[node] > most ? depths[node] : most;
    }
    return most;
}

typedef struct {
    const ft_reject_call *call;
    const ft_reject_rows *rows;
    ft_draw_one draw;
} job;

static void decide(void *context, int64_t index, int worker) {
    (void)worker;
    const job *j = context;
    const ft_reject_call *call = j->call;
    const ft_reject_span *span = call->spans + index;
    const size_t wide = (size_t)call->vocabulary + 64, count = (size_t)span->count;
    // Slot 3 holds what is small, slot 0 the rows.
    char *small = ft_scratch(3, (count + 1) * (sizeof(int64_t) + sizeof(frame)));
    call->last[index] = FT_UNDECIDED;
    if (!small) return;
    frame *frames = (frame *)small;
    int64_t deepest = 0;
    if (call->parents && call->rule == FT_BY_BLOCK)
        deepest = depth_of(call, span, (int64_t *)(small + (count + 1) * sizeof(frame)));
    float *floats =
        ft_scratch(0, (FT_DRAW_ROOM(call->vocabulary) + (1 + (size_t)deepest) * wide) * sizeof(float));
    if (!floats) return;
    const work w = {.call = call, .span = span, .rows = j->rows, .draw = j->draw, .p = floats,
                    .more = floats + wide, .room = floats + (1 + (size_t)deepest) * wide};
    int64_t *kept = call->kept + index;
    if (call->parents) {
        int64_t *path = call->paths + span->first;
        call->last[index] = call->rule == FT_BY_BLOCK ? traverse(&w, frames, path, kept)
                                                   : walk(&w, path, kept);
    } else {
        call->last[index] = call->rule == FT_BY_BLOCK ? block(&w, (link *)small, kept)
                                                   : chain(&w, kept);
    }
}

void ft_reject(const ft_reject_call *call) {
    job j = {call, rows_in_use(), ft_draw_in_use()};
    ft_parallel(decide, &j, call->num_spans);
}

typedef struct {
    const ft_draw_row *rows;
    const float *logits;
    float *probs;
    int64_t vocabulary;
    const ft_reject_rows *use;
    _Atomic int32_t failed;
} weighing;

static void weigh_item(void *context, int64_t row, int worker) {
    (void)worker;
    weighing *s = context;
    const size_t at = (size_t)(row * s->vocabulary);
    float *room = ft_scratch(0, FT_DRAW_ROOM(s->vocabulary) * sizeof(float));
    if (!room || !s->use->distribute(s->rows + row, s->logits + at, s->vocabulary, s->probs + at, room))
        s->failed = 1;
}

int32_t ft_distributions(const ft_draw_row *rows, int64_t count, const float *logits,
                         int64_t vocabulary, float *probs) {
    weighing s = {rows, logits, probs, vocabulary, rows_in_use(), 0};
    ft_share_rows(weigh_item, &s, count, vocabulary);
    return !s.failed;
}
