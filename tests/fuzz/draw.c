// Tokens drawn from random logits against their definition, in buffers without a byte to spare.
//
// What is decided must have the largest score in double precision among those that the filters leave;
// rows that no instruction set may leave to its twin (the best id) must be decided. All instruction
// sets must agree where two decide. Arguments: number of rounds, seed.
#include "draw.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "helpers/making.h"

// The noise of foretoken.ops.noise.
static double noise(uint64_t key, int64_t id) {
    uint32_t hash = (uint32_t)id + (uint32_t)key;
    hash = ((hash ^ (hash >> 16)) * 0x85EBCA6Bu) ^ (uint32_t)(key >> 32);
    hash = (hash ^ (hash >> 13)) * 0xC2B2AE35u;
    hash = (hash ^ (hash >> 16)) * 739982445u;
    hash = (hash ^ (hash >> 15)) & 0x7FFFFFFFu;
    const float u = ((float)(int32_t)hash + 0.5f) * ((1.0f - 0x1p-24f) * 0x1p-31f);
    return -log1p(-(double)u);
}

static double score(const ft_draw_row *how, const float *logits, int64_t id) {
    return (double)logits[id] / (double)how->temperature - log(noise(how->key, id));
}

// How far inside the filters an id is: below 0 it is cut off. Its mass and rank count what is above.
static double inside(const ft_draw_row *how, const float *logits, int64_t count, int64_t id) {
    const double own = (double)(logits[id] / how->temperature);
    double most = -INFINITY, whole = 0, above = 0;
    int64_t larger = 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, (double)(logits[i] / how->temperature));
    for (int64_t i = 0; i < count; i++) larger += logits[i] / how->temperature > (float)own;
    double margin = own - most - (double)how->log_min_p;
    if (how->top_k > 0 && larger >= how->top_k) return -1;
    for (int64_t i = 0; i < count; i++) {
        const double x = (double)(logits[i] / how->temperature);
        int64_t rank = 0;
        for (int64_t j = 0; how->top_k > 0 && j < count; j++)
            rank += logits[j] / how->temperature > (float)x;
        if (x - most < (double)how->log_min_p || (how->top_k > 0 && rank >= how->top_k)) continue;
        whole += exp(x - most);
        if (x > own) above += exp(x - most);
    }
    if (how->top_p <= 1.0f) margin = fmin(margin, (double)how->top_p - above / whole);
    return margin;
}

static void check(const ft_draw_row *how, const float *logits, int64_t count, int64_t found) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (logits[i] > logits[best]) best = i;
    if (how->temperature == 0.0f) {
        wanted(found == best, "the best id, the lowest of equal ones");
        return;
    }
    wanted(found >= FT_UNDECIDED && found < count, "an id, or none");
    if (found == FT_UNDECIDED) return;
    wanted(inside(how, logits, count, found) > -1e-5, "an id that the filters leave");
    const double own = score(how, logits, found);
    for (int64_t i = 0; i < count; i++)
        if (score(how, logits, i) > own + 1e-6 && inside(how, logits, count, i) > 1e-5)
            wanted(0, "the largest score of those that the filters leave");
}

static void one(void) {
    const int64_t rows = pick(1, 4), vocabulary = pick(0, 4) ? pick(1, 200) : pick(200, 700);
    float *logits = make_numbers(FT_FLOAT32, rows * vocabulary, (float)pick(1, 20));
    ft_draw_row *how = make_bytes((size_t)rows * sizeof *how);
    for (int64_t r = 0; r < rows; r++) {
        how[r] = make_draw(!pick(0, 3));
        for (int64_t i = 0; !pick(0, 3) && i < vocabulary - 1; i += pick(1, 5))
            logits[r * vocabulary + i] = -INFINITY;  // as a grammar masks
    }
    int64_t *first = make_bytes((size_t)rows * sizeof(int64_t));
    for (int level = FT_PORTABLE; level <= ft_cpu_level(); level++) {
        ft_set_level(level);
        ft_set_threads(pick(1, 3));
        int64_t *ids = make_bytes((size_t)rows * sizeof(int64_t));
        float *chances = make_bytes((size_t)rows * sizeof(float));
        ft_draw(how, rows, logits, vocabulary, ids);
        ft_sure(logits, rows, vocabulary, chances);
        for (int64_t r = 0; r < rows; r++) {
            wanted(chances[r] > 0.0f && chances[r] <= 1.0001f, "the chance of the best");
            check(how + r, logits + r * vocabulary, vocabulary, ids[r]);
            wanted(!level || ids[r] == first[r] || ids[r] < 0 || first[r] < 0, "levels agree");
        }
        if (!level) memcpy(first, ids, (size_t)rows * sizeof(int64_t));
    }
}

// Shared among the threads, and beyond what a draw takes: left to the twin.
static void large(int64_t vocabulary) {
    float *logits = make_numbers(FT_FLOAT32, 2 * vocabulary, 9.0f);
    ft_draw_row how[2] = {make_draw(1), make_draw(0)};
    how[1].top_p = 0.9f;
    int64_t ids[2];
    ft_draw(how, 2, logits, vocabulary, ids);
    check(how, logits, vocabulary, ids[0]);
    wanted(ids[1] >= FT_UNDECIDED && ids[1] < vocabulary, "an id, or none");
    wanted(vocabulary <= 1 << 20 || ids[1] == FT_UNDECIDED, "too many ids are left to the twin");
}

int main(int count, char **arguments) {
    const int rounds = 5 * (count > 1 ? atoi(arguments[1]) : 20);
    begin_making(count > 2 ? strtoull(arguments[2], NULL, 10) : 0);
    for (int i = 0; i < rounds; i++) one(), free_made();
    for (int64_t size = 1 << 15; size <= 1 << 21; size *= 32) large(size + pick(0, 99)), free_made();
    large(1 << 20), free_made();
    printf("draw: ok\n");
    return 0;
}
