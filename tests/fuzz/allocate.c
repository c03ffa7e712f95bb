// The search for a plan on random steps: what is true of any plan, in buffers without a byte to spare.
//
// Chosen drafts are there and worth more than those left out; of all bounds none is broken; what is
// found is better than no drafts. Arguments: number of rounds, seed.
#include "allocate.h"

#include <stdio.h>
#include <stdlib.h>

#include "helpers/making.h"

// Sums of products of these have the same bits in any order.
static double chance(void) { return (double)pick(1, 8) / 8.0; }

static double *numbers(int64_t count, double least, double most) {
    double *all = make_bytes((size_t)count * sizeof(double));
    for (int64_t i = 0; i < count; i++) all[i] = least + (most - least) * (double)pick(0, 1000) / 1000.0;
    return all;
}

// Chains that end anywhere.
static ft_draft_option make_option(int64_t sequences, int64_t drafts) {
    ft_draft_option o = {.depth_s = numbers(drafts + 1, 0.0, 0.5), .slot_s = 0.01 * pick(0, 2)};
    double *survival = numbers(sequences * drafts, 0.0, 0.0);
    for (int64_t i = 0; i < sequences; i++)
        for (int64_t j = 0; j < drafts; j++) {
            const double until = j ? survival[i * drafts + j - 1] : 1.0;
            survival[i * drafts + j] = pick(0, 9) ? until * chance() : 0.0;
        }
    o.survival = survival;
    o.start_s = numbers(sequences, 0.0, pick(0, 1) ? 0.0 : 0.3);
    return o;
}

static void check_found(const ft_allocate_call *call) {
    const int64_t sequences = call->sequences, drafts = call->drafts;
    const double nothing = (double)sequences / call->plain_s;
    double all = 0.0, least = 1.0, most_left = 0.0;
    for (int64_t i = 0; i < sequences; i++) {
        const int64_t count = call->counts[i];
        wanted(count >= 0 && count <= drafts, "drafts that there are");
        wanted(count <= call->depth, "no deeper than the plan");
        wanted((count > 0) == (call->drafter[i] >= 0), "a drafter for those that draft");
        wanted(call->drafter[i] < call->num_options, "a drafter that there is");
        double accepted = 0.0;
        if (count) {
            const double *survival = call->options[call->drafter[i]].survival + i * drafts;
            for (int64_t j = 0; j < count; j++) accepted += survival[j];
            if (survival[count - 1] < least) least = survival[count - 1];
            if (count < call->depth && survival[count] > most_left) most_left = survival[count];
        }
        all += accepted;
        if (!call->depth) continue;
        const double allowed_s = call->bound_s[i] + call->token_s[i] * accepted;
        wanted(allowed_s >= call->seconds, "nobody's bound is broken");
    }
    wanted(least > 0.0 && most_left <= least, "the best drafts");
    const double rate = call->tokens / call->seconds;
    wanted((double)sequences + all == call->tokens, "the tokens of all drafts");
    wanted(call->depth ? rate > nothing : rate == nothing, "more than no drafts bring");
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
