// Rules that end chains, on random chances: what they promise, in buffers without a byte to spare.
//
// A chain that has ended never counts a draft again; every chain has its least number; a draft that
// counts is one of those before it that all count. Arguments: number of rounds, seed.
#include "stop.h"

#include <stdio.h>
#include <stdlib.h>

#include "helpers/making.h"

static void after_each_step(void) {
    const int64_t steps = pick(1, 9), spans = pick(1, 12);
    const ft_stop stop = make_stop(steps, spans);
    int goes_on = 1;
    for (int64_t at = 0; at < steps && goes_on; at++) {
        int64_t *before = make_copy(stop.lengths, (size_t)spans * sizeof(int64_t));
        for (int64_t r = 0; r < spans; r++) stop.sure[at * spans + r] = (float)pick(0, 1000) / 1000.0f;
        goes_on = ft_stop_after(&stop, at, spans);
        int open = 0;
        for (int64_t r = 0; r < spans; r++) {
            const int counted = stop.lengths[r] == at + 1, went = before[r] == at;
            open |= counted;
            wanted(counted || stop.lengths[r] == before[r], "a length that grows by this step");
            wanted(went || !counted, "an end is an end");
            wanted(at >= stop.least || counted, "the least number of drafts");
            const int sure = stop.sure[at * spans + r] >= stop.least_sure;
            wanted(at < stop.least || counted == (went && sure), "an end where one is unsure");
        }
        wanted(goes_on == open, "another pass is for somebody");
    }
}

static void all_at_once(void) {
    const int64_t steps = pick(1, 9), spans = pick(1, 12), vocabulary = pick(1, 50);
    ft_stop stop = make_stop(steps, spans);
    const ft_stop *given = pick(0, 3) ? &stop : NULL;
    int64_t *tokens = make_bytes((size_t)(steps * spans) * sizeof(int64_t));
    for (int64_t i = 0; i < steps * spans; i++) {
        tokens[i] = pick(0, 40) ? pick(0, (int)vocabulary - 1) : FT_UNDECIDED;
        stop.sure[i] = (float)pick(0, 1000) / 1000.0f;
    }
    const int64_t done = ft_stop_through(given, steps, spans, tokens);
    check_drafted(done, steps, spans, tokens, vocabulary, given);
}

int main(int count, char **arguments) {
    const int rounds = 50 * (count > 1 ? atoi(arguments[1]) : 20);
    begin_making(count > 2 ? strtoull(arguments[2], NULL, 10) : 0);
    for (int i = 0; i < rounds; i++) {
        after_each_step();
        all_at_once();
        free_made();
    }
    printf("stop: ok\n");
    return 0;
}
