// Chains of MLP speculators and Medusa heads of random shapes, in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. A sequence alone must have
// the tokens and logits that it has among others. Arguments: number of rounds, seed.
#include "heads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "helpers/making.h"

typedef int64_t (*drafting)(const void *net, const ft_head_call *call);

typedef struct {
    drafting draft;
    const void *net;
    int64_t state_bytes, room_bytes;  // of one row: state of all steps
    int64_t vocabulary;
} head;

static int64_t draft_mlp(const void *net, const ft_head_call *call) { return ft_mlp_draft(net, call); }
static int64_t draft_medusa(const void *net, const ft_head_call *call) {
    return ft_medusa_draft(net, call);
}

static head make_mlp(int type, int64_t hidden, int64_t steps) {
    const int64_t inner = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90), vocabulary = pick(2, 300);
    ft_mlp_stage *stages = make_bytes((size_t)steps * sizeof *stages);
    for (int64_t k = 0; k < steps; k++)
        stages[k] = (ft_mlp_stage){.project = make_linear(type, type, k ? inner : hidden, inner),
                                   .head = make_linear(type, FT_FLOAT32, inner, vocabulary),
                                   .embedding = make_numbers(type, vocabulary * inner, 1.0f),
                                   .weight = make_numbers(type, inner, 1.0f),
                                   .bias = make_numbers(type, inner, 1.0f)};
    ft_mlp *net = make_bytes(sizeof *net);
    *net = (ft_mlp){.stages = stages, .hidden = hidden, .inner = inner, .vocabulary = vocabulary,
                    .token_scale = uniform(1.0f), .type = type, .norms_input = pick(0, 1)};
    const int64_t item = (int64_t)item_bytes(type), widest = hidden > inner ? hidden : inner;
    return (head){draft_mlp, net, widest * item, inner * item, vocabulary};
}

static head make_medusa(int type, int64_t hidden, int64_t steps) {
    const int64_t vocabulary = pick(2, 300), layers = pick(1, 2);
    const int low_rank = pick(0, 1), mixed = pick(0, 1);
    ft_medusa_block *blocks = make_bytes((size_t)(steps * layers) * sizeof *blocks);
    for (int64_t i = 0; i < steps * layers; i++) {
        const int64_t rank = pick(1, (int)hidden);
        blocks[i].down = low_rank ? make_linear(type, type, hidden, rank) : NULL;
        blocks[i].linear = make_linear(type, type, low_rank ? rank : hidden, hidden);
    }
    const ft_linear **mixers = make_bytes((size_t)steps * sizeof *mixers);
    const ft_linear **tops = make_bytes((size_t)(mixed ? 1 : steps) * sizeof *tops);
    for (int64_t k = 0; k < steps; k++) {
        if (mixed) mixers[k] = make_linear(type, type, hidden, hidden);
        if (!mixed || !k) tops[k] = make_linear(type, FT_FLOAT32, hidden, vocabulary);
    }
    ft_medusa *net = make_bytes(sizeof *net);
    *net = (ft_medusa){.blocks = blocks, .mixers = mixed ? mixers : NULL, .tops = tops,
                       .hidden = hidden, .vocabulary = vocabulary, .layers = layers, .type = type};
    const int64_t item = (int64_t)item_bytes(type);
    return (head){draft_medusa, net, steps * hidden * item, 2 * hidden * item, vocabulary};
}

// Rows [first, first + rows) of `whole`, in buffers of their own.
static ft_head_call part_of(const head *h, const ft_head_call *whole, int64_t first, int64_t rows) {
    ft_head_call call = *whole;
    call.rows = rows;
    call.slots = make_copy(whole->slots + first, (size_t)rows * sizeof(int64_t));
    call.fed = make_copy(whole->fed + first, (size_t)rows * sizeof(int64_t));
    call.state = make_bytes((size_t)(rows * h->state_bytes));
    call.room = make_bytes((size_t)(rows * h->room_bytes));
    ft_draw_row *draws = make_bytes((size_t)(call.steps * rows) * sizeof *draws);
    for (int64_t k = 0; k < call.steps; k++)
        memcpy(draws + k * rows, whole->draws + k * whole->rows + first, (size_t)rows * sizeof *draws);
    call.draws = draws;
    call.tokens = make_bytes((size_t)(call.steps * rows) * sizeof(int64_t));
    const int64_t kept = h->draft == draft_medusa || call.keeps_logits ? call.steps : 1;
    call.logits = make_bytes((size_t)(kept * rows * h->vocabulary) * sizeof(float));
    return call;
}

static void same_alone(const head *h, const ft_head_call *all, int64_t done) {
    const size_t bytes = (size_t)h->vocabulary * sizeof(float);
    for (int64_t r = 0; r < all->rows; r++) {
        const ft_head_call own = part_of(h, all, r, 1);
        const int64_t alone = h->draft(h->net, &own);
        wanted(alone >= done, "a row alone is decided where all were");
        for (int64_t k = 0; k < done; k++) {
            wanted(own.tokens[k] == all->tokens[k * all->rows + r], "tokens depend on other rows");
            if (!all->keeps_logits) continue;
            same_bytes(own.logits + k * h->vocabulary,
                       all->logits + (k * all->rows + r) * h->vocabulary, bytes,
                       "logits that depend on other rows");
        }
    }
}

static void one(void) {
    const int type = pick(0, 1);
    const int64_t hidden = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90);
    const int64_t steps = pick(1, 5), rows = pick(1, 5), slots = rows + pick(0, 4);
    const head h = pick(0, 1) ? make_mlp(type, hidden, steps) : make_medusa(type, hidden, steps);
    const int64_t stride = hidden + pick(0, 5), item = (int64_t)item_bytes(type);
    int64_t *where = make_bytes((size_t)rows * sizeof *where);
    int64_t *fed = make_bytes((size_t)rows * sizeof *fed);
    ft_draw_row *draws = make_bytes((size_t)(steps * rows) * sizeof *draws);
    for (int64_t r = 0; r < rows; r++) where[r] = slots - 1 - r, fed[r] = pick(0, (int)h.vocabulary - 1);
    for (int64_t i = 0; i < steps * rows; i++) draws[i] = make_draw(pick(0, 2));
    const ft_head_call given = {.features = make_numbers(type, (slots - 1) * stride + hidden, 2.0f),
                                .slots = where, .fed = fed, .draws = draws,
                                .feature_bytes = stride * item, .rows = rows, .steps = steps,
                                .keeps_logits = h.draft == draft_medusa || pick(0, 1)};
    ft_head_call call = part_of(&h, &given, 0, rows);
    const int64_t done = h.draft(h.net, &call);
    check_drafted(done, steps, rows, call.tokens, h.vocabulary, NULL);
    same_alone(&h, &call, done);
    const ft_stop stop = make_stop(steps, rows);
    call.stop = &stop;
    check_drafted(h.draft(h.net, &call), steps, rows, call.tokens, h.vocabulary, &stop);
}

int main(int count, char **arguments) {
    return at_every_level("heads", count, arguments, one);
}
