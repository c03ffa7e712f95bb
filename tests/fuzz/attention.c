// Attention on random shapes, chains and trees, against its definition, in buffers without a byte to
// spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. So does a wrong
// result. Arguments: number of rounds, seed.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "vec.h"

static uint64_t state = 1;

static int draw(int least, int most) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int)((state >> 33) % (uint64_t)(most - least + 1));
}

static float uniform(void) { return (float)draw(-1000, 1000) / 500.0f; }

static void *exactly(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) abort();
    return memory;
}

// Random values, rounded to the type; also as floats.
static void *fill(int type, int64_t count, float **floats) {
    void *values = exactly((size_t)count * (type == FT_BFLOAT16 ? 2 : 4));
    *floats = exactly((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) {
        float x = uniform();
        if (type == FT_BFLOAT16) {
            ((bf16 *)values)[i] = float_to_bf16(x);
            x = bf16_to_float(((bf16 *)values)[i]);
        } else {
            ((float *)values)[i] = x;
        }
        (*floats)[i] = x;
    }
    return values;
}

// The same as FT_INT8 keeps it: random numbers and scales.
static void *fill_rounded(int64_t heads, int size, int type, float **floats) {
    char *values = exactly((size_t)(heads * (size + FT_SCALE_BYTES)));
    *floats = exactly((size_t)(heads * size) * 4);
    for (int64_t h = 0; h < heads; h++) {
        char *at = values + h * (size + FT_SCALE_BYTES);
        const float scale = (float)draw(1, 1000) / 60000.0f;
        for (int i = 0; i < size; i++) {
            at[i] = (char)(int8_t)draw(-127, 127);
            const float x = (float)(int8_t)at[i] * scale;
            (*floats)[h * size + i] = type == FT_BFLOAT16 ? bf16_to_float(float_to_bf16(x)) : x;
        }
        memcpy(at + size, &scale, FT_SCALE_BYTES);
    }
    return values;
}

typedef struct {
    ft_attention_shape shape;
    ft_span span;
    int32_t *pages, *paths;
    float *q, *kv;
} problem;

// Of a tree, a row's path: its depth, then the indices of its ancestors, itself last.
static const int32_t *path_of(const problem *p, int row) {
    return p->paths + (int64_t)row * (p->span.known + p->span.num_rows + 1);
}

// Where the key lies that a row has at a position.
static int place_of(const problem *p, int row, int position) {
    if (!p->paths || position < p->span.start) return position;
    return p->span.start + path_of(p, row)[1 + position - p->span.start];
}

// A parent for each token among those before it; the first ones may be known already.
static void plant(problem *p) {
    const int count = p->span.known + p->span.num_rows, width = count + 1;
    p->paths = exactly((size_t)(p->span.num_rows * width) * sizeof *p->paths);
    int32_t *parents = exactly((size_t)count * sizeof *parents);
    for (int i = 0; i < count; i++) parents[i] = draw(-1, i - 1);
    for (int row = 0; row < p->span.num_rows; row++) {
        int32_t *path = p->paths + row * width, depth = 0;
        for (int i = parents[p->span.known + row]; i >= 0; i = parents[i]) depth++;
        path[0] = depth;
        for (int i = p->span.known + row, at = depth; i >= 0; i = parents[i], at--) path[1 + at] = i;
        for (int at = depth + 2; at < width; at++) path[at] = -1;
    }
    free(parents);
}

// Output d of a row's head, in double.
static double expected(const problem *p, int row, int head, int d) {
    const ft_attention_shape *s = &p->shape;
    const int h = s->head_dim, kv = s->num_kv_heads;
    const int own = p->span.start + (p->paths ? path_of(p, row)[0] : row);
    const int together = p->span.paths == FT_TOGETHER;
    const int last = together ? p->span.start + p->span.num_rows - 1 : own;
    const int first = s->window && own - s->window + 1 > 0 ? own - s->window + 1 : 0;
    double *scores = exactly((size_t)(last + 1) * 8), best = -INFINITY, sum = 0, out = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = first; i <= last; i++) {
            const int place = place_of(p, row, i);
            const int64_t page = p->pages[place / s->page_size];
            const int64_t slot = page * s->page_size + place % s->page_size;
            const float *at = p->kv + slot * 2 * kv * h + head % kv * h;
            if (pass) {
                const double weight = exp(scores[i] - best);
                sum += weight;
                out += weight * (double)at[(int64_t)kv * h + d];
                continue;
            }
            double score = 0;
            for (int j = 0; j < h; j++)
                score += (double)p->q[((int64_t)row * s->num_heads + head) * h + j] * (double)at[j];
            score *= (double)s->scale;
            if (s->softcap > 0) score = (double)s->softcap * tanh(score / (double)s->softcap);
            scores[i] = score;
            if (score > best) best = score;
        }
    free(scores);
    return out / sum;
}

static void check(const problem *p, const void *out) {
    const ft_attention_shape *s = &p->shape;
    const int rows[] = {0, p->span.num_rows / 2, p->span.num_rows - 1};
    const double tolerance = s->type == FT_BFLOAT16 ? 4e-2 : 1e-4;
    for (int r = 0; r < 3; r++)
        for (int head = 0; head < s->num_heads; head++) {
            const int d = draw(0, s->head_dim - 1);
            const int64_t at = ((int64_t)rows[r] * s->num_heads + head) * s->head_dim + d;
            const double found = s->type == FT_BFLOAT16
                                     ? (double)bf16_to_float(((const bf16 *)out)[at])
                                     : (double)((const float *)out)[at];
            const double wanted = expected(p, rows[r], head, d);
            if (fabs(found - wanted) <= tolerance) continue;
            printf("row %d head %d dim %d: %g, not %g\n", rows[r], head, d, found, wanted);
            exit(1);
        }
}

static void one(void) {
    problem p = {.shape = {.num_kv_heads = draw(1, 3),
                           .head_dim = draw(1, 140),
                           .page_size = draw(1, 80),
                           .type = draw(0, 1),
                           .window = draw(0, 2) ? 0 : draw(1, 700),
                           .softcap = draw(0, 2) ? 0.0f : 4.0f}};
    p.shape.kv_type = draw(0, 1) ? FT_INT8 : p.shape.type;
    p.shape.num_heads = p.shape.num_kv_heads * draw(1, 7);
    p.shape.scale = 1.0f / sqrtf((float)p.shape.head_dim);
    p.span.num_rows = draw(0, 3) ? draw(1, 9) : draw(10, 90);
    p.span.start = draw(0, 1) ? draw(0, 70) : draw(0, 1100);
    p.span.paths = draw(0, 2) ? FT_CHAIN : FT_TOGETHER;
    if (!draw(0, 2)) {
        p.span.known = draw(0, 1) ? draw(1, 9) : 0;
        p.span.paths = 0;
        plant(&p);
    }
    const int places = p.span.start + p.span.known + p.span.num_rows;
    const int num_pages = (places + p.shape.page_size - 1) / p.shape.page_size;
    p.pages = exactly((size_t)num_pages * sizeof *p.pages);
    for (int i = 0; i < num_pages; i++) p.pages[i] = num_pages - 1 - i;
    const int64_t width = p.shape.num_heads * p.shape.head_dim;
    const int rounded = p.shape.kv_type == FT_INT8;
    const int64_t heads = 2 * p.shape.num_kv_heads, size = p.shape.head_dim;
    const int64_t slots = (int64_t)num_pages * p.shape.page_size;
    const int64_t slot = heads * (rounded ? size + FT_SCALE_BYTES : size);
    void *q = fill(p.shape.type, p.span.num_rows * width, &p.q);
    void *kv = rounded ? fill_rounded(slots * heads, (int)size, p.shape.type, &p.kv)
                       : fill(p.shape.type, slots * slot, &p.kv);
    void *out = exactly((size_t)(p.span.num_rows * width) * (p.shape.type == FT_BFLOAT16 ? 2 : 4));
    const ft_attention_call call = {.shape = &p.shape, .spans = &p.span, .pages = p.pages,
                                    .paths = p.paths, .q = q,
                                    .kv = kv, .out = out, .q_stride = width, .kv_stride = slot,
                                    .out_stride = width, .num_spans = 1};
    const int64_t count = ft_attention_plan(&p.shape, &p.span, 1, NULL, 0);
    ft_attention_unit *units = exactly((size_t)count * sizeof *units);
    ft_attention_plan(&p.shape, &p.span, 1, units, count);
    ft_attention_run(&call, units, count);
    check(&p, out);
    void *const all[] = {p.pages, p.paths, p.q, p.kv, q, kv, out, units};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 300;
    state += count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    for (int level = FT_PORTABLE; level <= ft_cpu_level(); level++) {
        ft_set_level(level);
        for (int i = 0; i < rounds / 5 + 1; i++) {
            ft_set_threads(draw(1, 3));
            one();
        }
    }
    printf("attention: ok\n");
    return 0;
}
