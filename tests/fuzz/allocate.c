// The search for a plan on random steps: what is true of any plan, in buffers without a byte to spare.
//
// Chosen drafts are there and chosen once, with all before them; of all bounds none is broken; what is
// found is better than no drafts. Arguments: number of rounds, seed.
#include "allocate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "helpers/making.h"

static double chance(void) { return (double)pick(1, 20) / 20.0; }

static double *numbers(int64_t count, double least, double most) {
    double *all = make_bytes((size_t)count * sizeof(double));
    for (int64_t i = 0; i < count; i++) all[i] = least + (most - least) * (double)pick(0, 1000) / 1000.0;
    return all;
}

// Chains that end anywhere, or trees whose parents come first.
static ft_draft_option make_option(int64_t sequences, int64_t drafts) {
    ft_draft_option o = {.depth_s = numbers(drafts + 1, 0.0, 0.5), .slot_s = 0.01 * pick(0, 2)};
    double *survival = numbers(sequences * drafts, 0.0, 0.0);
    int64_t *levels = make_bytes((size_t)drafts * sizeof(int64_t));
    int64_t *parents = make_bytes((size_t)drafts * sizeof(int64_t));
    const int trees = !pick(0, 2);
    for (int64_t j = 0; j < drafts; j++) {
        parents[j] = trees ? pick(-1, (int)j - 1) : j - 1;
        levels[j] = parents[j] < 0 ? 1 : levels[parents[j]] + 1;
    }
    for (int64_t i = 0; i < sequences; i++)
        for (int64_t j = 0; j < drafts; j++) {
            const double until = parents[j] < 0 ? 1.0 : survival[i * drafts + parents[j]];
            survival[i * drafts + j] = pick(0, 9) ? until * chance() : 0.0;
        }
    o.survival = survival;
    o.start_s = numbers(sequences, 0.0, pick(0, 1) ? 0.0 : 0.3);
    o.levels = trees ? levels : NULL;
    return o;
}

static void check_found(const ft_allocate_call *call) {
    const int64_t sequences = call->sequences, drafts = call->drafts;
    const double nothing = (double)sequences / call->plain_s;
    char *taken = make_bytes((size_t)(sequences * drafts));
    memset(taken, 0, (size_t)(sequences * drafts));
    double *accepted = numbers(sequences, 0.0, 0.0), all = 0.0, last = 2.0;
    int64_t *counts = make_bytes((size_t)sequences * sizeof(int64_t));
    memset(counts, 0, (size_t)sequences * sizeof(int64_t));
    for (int64_t n = 0; n < call->num_slots; n++) {
        const int64_t slot = call->slots[n], i = slot % sequences, j = slot / sequences;
        wanted(slot >= 0 && j < drafts, "a draft that there is");
        wanted(!taken[slot]++, "a draft that was not chosen before");
        const ft_draft_option *o = &call->options[call->drafter[i]];
        const double worth = o->survival[i * drafts + j];
        wanted(worth > 0.0 && worth <= last, "the best drafts first");
        wanted((o->levels ? o->levels[j] : j + 1) <= call->depth, "no deeper than the plan");
        wanted(o->levels || j == counts[i], "all drafts before it");
        last = worth;
        all += worth;
        accepted[i] += worth;
        counts[i]++;
    }
    for (int64_t i = 0; i < sequences; i++) {
        wanted(counts[i] == call->counts[i], "as many as were counted");
        wanted((counts[i] > 0) == (call->drafter[i] >= 0), "a drafter for those that draft");
        if (!call->num_slots) continue;
        const double allowed_s = call->bound_s[i] + call->token_s[i] * accepted[i];
        wanted(allowed_s >= call->seconds, "nobody's bound is broken");
    }
    const double rate = call->tokens / call->seconds;
    wanted((double)sequences + all == call->tokens, "the tokens of all drafts");
    wanted(call->num_slots ? rate > nothing : rate == nothing, "more than no drafts bring");
    wanted(call->unguarded >= rate, "without bounds at least as much");
}

static void one(void) {
    const int64_t sequences = pick(1, pick(0, 4) ? 6 : 64), drafts = pick(1, 12), count = pick(0, 5);
    ft_draft_option *options = make_bytes((size_t)count * sizeof(ft_draft_option));
    for (int64_t o = 0; o < count; o++) options[o] = make_option(sequences, drafts);
    const int64_t rows = pick(0, 9) ? sequences * drafts + 1 : pick(1, (int)(sequences * drafts) + 1);
    double *rows_s = numbers(rows, 0.0, pick(0, 1) ? 0.02 : 0.3);
    rows_s[0] = 1.0;
    for (int64_t i = 1; i < rows; i++) rows_s[i] += rows_s[i - 1];
    ft_allocate_call call = {
        .rows_s = rows_s,
        .bound_s = numbers(sequences, 1.0, pick(0, 1) ? 1.2 : 9.0),
        .token_s = numbers(sequences, 1.0, 1.2),
        .options = options,
        .rows = rows,
        .sequences = sequences,
        .drafts = drafts,
        .num_options = count,
        .plain_s = 1.0,
        .margin = 0.02 * pick(0, 1),
        .slots = make_bytes((size_t)(sequences * drafts) * sizeof(int64_t)),
        .counts = make_bytes((size_t)sequences * sizeof(int64_t)),
        .drafter = make_bytes((size_t)sequences * sizeof(int64_t)),
    };
    const int32_t done = ft_allocate(&call);
    wanted(done || rows <= sequences * drafts, "a plan, where there are rows for all drafts");
    if (done) check_found(&call);
}

int main(int count, char **arguments) {
    const int rounds = 50 * (count > 1 ? atoi(arguments[1]) : 20);
    begin_making(count > 2 ? strtoull(arguments[2], NULL, 10) : 0);
    for (int i = 0; i < rounds; i++) {
        one();
        free_made();
    }
    printf("allocate: ok\n");
    return 0;
}
