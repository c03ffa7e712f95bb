// Rejection of random chains and trees, and distributions, in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. Decisions are compared with
// PyTorch's elsewhere; here a request must be decided alone as among others, what is kept must be a
// path of its tree, and distributions must sum to one. Arguments: number of rounds, seed.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reject.h"

static uint64_t state = 1;

static int64_t draw(int least, int most) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int64_t)((state >> 33) % (uint64_t)(most - least + 1));
}

static void *room(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) abort();
    return memory;
}

static void check(int good, const char *what) {
    if (good) return;
    printf("reject: %s\n", what);
    exit(1);
}

static ft_draw_row some_row(void) {
    return (ft_draw_row){.key = (uint64_t)draw(0, 1 << 30) * 0x9E3779B97F4A7C15u,
                         .temperature = (float)draw(1, 30) / 10.0f,
                         .log_min_p = draw(0, 2) ? -INFINITY : -(float)draw(1, 6),
                         .top_p = draw(0, 2) ? 2.0f : (float)draw(1, 100) / 100.0f,
                         .top_k = draw(0, 2) ? 0 : (int32_t)draw(1, 1500)};
}

// Logits of a row; now and then some or all are forbidden, or many are equal.
static void fill(float *logits, int64_t count) {
    const int steps = (int)draw(2, 1000), some = !draw(0, 3), none = !draw(0, 40);
    for (int64_t i = 0; i < count; i++)
        logits[i] = none || (some && draw(0, 1)) ? -INFINITY
                                                 : (float)(draw(0, steps) * 20) / (float)steps - 10.0f;
}

static void distributions(int64_t vocabulary) {
    const int64_t count = draw(1, 4);
    ft_draw_row *rows = room((size_t)count * sizeof *rows);
    const size_t bytes = (size_t)(count * vocabulary) * sizeof(float);
    float *logits = room(bytes), *probs = room(bytes);
    for (int64_t r = 0; r < count; r++) {
        rows[r] = some_row();
        fill(logits + r * vocabulary, vocabulary);
    }
    if (ft_distributions(rows, count, logits, vocabulary, probs))
        for (int64_t r = 0; r < count; r++) {
            double sum = 0.0;
            for (int64_t i = 0; i < vocabulary; i++) sum += (double)probs[r * vocabulary + i];
            check(fabs(sum - 1.0) < 1e-4, "a distribution does not sum to one");
        }
    free(rows), free(logits), free(probs);
}

static void kept_is_a_path(const ft_reject_call *call, const ft_reject_span *span, int64_t index) {
    const int64_t last = call->last[index], kept = call->kept[index];
    if (last == FT_UNDECIDED) return;
    check(last >= 0 && last < call->vocabulary, "the last token is none");
    check(kept >= 0 && kept <= span->count, "more is kept than was drafted");
    for (int64_t at = 0; at < kept; at++) {
        const int64_t node = call->parents ? call->paths[span->first + at] : at;
        check(call->ids[span->first + node] >= 0, "a draft of -1 is kept");
        if (!call->parents) continue;
        const int64_t above = at ? call->paths[span->first + at - 1] : -1;
        check(call->parents[span->first + node] == above, "what is kept is not a path");
    }
}

static void reject(int64_t vocabulary, int trees) {
    const int64_t num_spans = draw(1, 3);
    ft_reject_span *spans = room((size_t)num_spans * sizeof *spans);
    int64_t drafts = 0;
    for (int64_t s = 0; s < num_spans; s++) {
        const int64_t count = draw(1, 8);
        spans[s] = (ft_reject_span){.how = some_row(), .position = draw(1, 99), .row = drafts + s,
                                    .drafted = drafts, .first = drafts, .count = count};
        drafts += count;
    }
    const size_t ids_bytes = (size_t)drafts * sizeof(int64_t);
    int64_t *ids = room(ids_bytes), *parents = trees ? room(ids_bytes) : NULL;
    int64_t *kept = room((size_t)num_spans * 8), *last = room((size_t)num_spans * 8);
    int64_t *paths = trees ? room(ids_bytes) : NULL;
    const size_t row = (size_t)vocabulary * sizeof(float);
    float *logits = room((size_t)(drafts + num_spans) * row);
    float *drafted = draw(0, 2) ? room((size_t)drafts * row) : NULL;
    for (int64_t r = 0; r < drafts + num_spans; r++) fill(logits + r * vocabulary, vocabulary);
    for (int64_t s = 0; s < num_spans; s++)
        for (int64_t i = 0; i < spans[s].count; i++) {
            const int64_t at = spans[s].first + i;
            ids[at] = trees || draw(0, 9) ? draw(0, (int)vocabulary - 1) : -1;
            if (trees) parents[at] = draw(-1, (int)i - 1);
        }
    for (int64_t i = 0; drafted && i < drafts * vocabulary; i++)
        drafted[i] = draw(0, 2) ? (float)draw(0, 200) / (100.0f * (float)vocabulary) : 0.0f;
    ft_reject_call call = {.spans = spans, .ids = ids, .parents = parents, .logits = logits,
                           .drafted = drafted, .kept = kept, .paths = paths, .last = last,
                           .num_spans = num_spans, .vocabulary = vocabulary, .rule = draw(0, 1)};
    ft_reject(&call);
    for (int64_t s = 0; s < num_spans; s++) kept_is_a_path(&call, spans + s, s);
    const int64_t before = last[num_spans - 1], count = kept[num_spans - 1];
    call.spans = spans + num_spans - 1;
    call.num_spans = 1;
    ft_reject(&call);
    check(last[0] == before && (before == FT_UNDECIDED || kept[0] == count),
          "a request is decided otherwise among others");
    free(spans), free(ids), free(parents), free(kept), free(last), free(paths), free(logits);
    free(drafted);
}

int main(int argc, char **argv) {
    const int64_t rounds = argc > 1 ? atoll(argv[1]) : 20;
    if (argc > 2) state = (uint64_t)atoll(argv[2]);
    for (int level = ft_cpu_level(); level >= FT_PORTABLE; level--) {
        ft_set_level(level);
        ft_set_threads((int)draw(1, 3));
        for (int64_t round = 0; round < 10 * rounds; round++) {
            const int64_t vocabulary = draw(0, 9) ? draw(1, 300) : draw(1500, 20000);
            distributions(vocabulary);
            reject(vocabulary, (int)draw(0, 1));
        }
    }
    printf("reject: %lld rounds on every instruction set\n", (long long)(10 * rounds));
    return 0;
}
