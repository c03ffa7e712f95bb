// See heads.h. What lies between the matrices is a few hundred values a row: plain C.
#include "heads.h"

#include <math.h>
#include <string.h>

#include "scalar.h"

static size_t item_of(int32_t type) { return type == FT_BFLOAT16 ? 2 : 4; }

static void *row_of(const void *start, int64_t row, int64_t width, int32_t type) {
    return (char *)start + (size_t)(row * width) * item_of(type);
}

static float inverse_rms(const void *row, int64_t width, int32_t type) {
    float sum = 0.0f;
    for (int64_t i = 0; i < width; i++) {
        const float x = ft_value(row, i, type);
        sum += x * x;
    }
    return 1.0f / sqrtf(sum / (float)width + 1e-6f);
}

static void normalise(void *row, int64_t width, int32_t type) {
    const float factor = inverse_rms(row, width, type);
    for (int64_t i = 0; i < width; i++) ft_put(row, i, ft_value(row, i, type) * factor, type);
}

static void read_states(const ft_head_call *call, int64_t hidden, int32_t type) {
    for (int64_t r = 0; r < call->rows; r++) {
        const char *from = (const char *)call->features + call->slots[r] * call->feature_bytes;
        memcpy(row_of(call->state, r, hidden, type), from, (size_t)hidden * item_of(type));
    }
}

static void begin(const ft_mlp *net, const ft_head_call *call) {
    const int32_t type = net->type;
    read_states(call, net->hidden, type);
    for (int64_t r = 0; net->norms_input && r < call->rows; r++) {
        void *row = row_of(call->state, r, net->hidden, type);
        normalise(row, net->hidden, type);
        for (int64_t i = 0; i < net->hidden; i++)
            ft_put(row, i, ft_value(row, i, type) * 0.70710678118654752f, type);
    }
}

static void advance(const ft_mlp *net, const ft_mlp_stage *stage, const ft_head_call *call,
                    const int64_t *fed) {
    const int32_t type = net->type;
    const int64_t inner = net->inner;
    ft_linear_dense(stage->project, call->state, call->room, NULL, call->rows);
    for (int64_t r = 0; r < call->rows; r++) {
        void *mixed = row_of(call->room, r, inner, type), *state = row_of(call->state, r, inner, type);
        const void *token = row_of(stage->embedding, fed[r], inner, type);
        for (int64_t i = 0; i < inner; i++)
            ft_put(mixed, i, ft_value(mixed, i, type) + net->token_scale * ft_value(token, i, type), type);
        normalise(mixed, inner, type);
        for (int64_t i = 0; i < inner; i++) {
            const float scaled = ft_value(mixed, i, type) * ft_value(stage->weight, i, type);
            ft_put(mixed, i, ft_value(stage->bias, i, type) + scaled, type);
            const float x = ft_value(mixed, i, type);
            ft_put(state, i, 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)), type);
        }
    }
}

int64_t ft_mlp_draft(const ft_mlp *net, const ft_head_call *call) {
    const int64_t size = call->rows * net->vocabulary, *fed = call->fed;
    begin(net, call);
    for (int64_t at = 0; at < call->steps; at++) {
        const ft_mlp_stage *stage = net->stages + at;
        float *logits = call->logits + (call->keeps_logits ? at * size : 0);
        int64_t *tokens = call->tokens + at * call->rows;
        advance(net, stage, call, fed);
        ft_linear_dense(stage->head, call->state, logits, NULL, call->rows);
        ft_draw(call->draws + at * call->rows, call->rows, logits, net->vocabulary, tokens);
        if (ft_stop_open(call->stop, at, call->rows, tokens)) return at;
        if (call->stop) {
            ft_sure(logits, call->rows, net->vocabulary, call->stop->sure + at * call->rows);
            if (!ft_stop_after(call->stop, at, call->rows)) return at + 1;
        }
        fed = tokens;
    }
    return call->steps;
}

// z becomes what the blocks of a head make of it.
static void run_blocks(const ft_medusa *net, const ft_medusa_block *blocks, void *z, int64_t rows,
                       void *room) {
    const int32_t type = net->type;
    char *inner = row_of(room, rows, net->hidden, type);
    for (int64_t layer = 0; layer < net->layers; layer++) {
        const ft_medusa_block *block = blocks + layer;
        if (block->down) ft_linear_dense(block->down, z, inner, NULL, rows);
        ft_linear_dense(block->linear, block->down ? inner : z, room, NULL, rows);
        for (int64_t i = 0; i < rows * net->hidden; i++) {
            const float x = ft_value(room, i, type);
            ft_put(room, i, x / (1.0f + expf(-x)), type);
            ft_put(z, i, ft_value(z, i, type) + ft_value(room, i, type), type);
        }
    }
}

int64_t ft_medusa_draft(const ft_medusa *net, const ft_head_call *call) {
    const int64_t rows = call->rows, hidden = net->hidden;
    const size_t bytes = (size_t)(rows * hidden) * item_of(net->type);
    char *const states = call->state, *const room = call->room;
    read_states(call, hidden, net->type);
    for (int64_t k = call->steps - 1; k >= 0; k--) {  // the first one's place has what all begin with
        char *z = states + (size_t)k * bytes;
        if (k) memcpy(z, states, bytes);
        run_blocks(net, net->blocks + k * net->layers, z, rows, room);
        if (net->mixers) {
            ft_linear_dense(net->mixers[k], z, room, NULL, rows);
            memcpy(z, room, bytes);
        } else
            ft_linear_dense(net->tops[k], z, call->logits + k * rows * net->vocabulary, NULL, rows);
    }
    if (net->mixers) ft_linear_dense(net->tops[0], states, call->logits, NULL, call->steps * rows);
    ft_draw(call->draws, call->steps * rows, call->logits, net->vocabulary, call->tokens);
    if (call->stop) ft_sure(call->logits, call->steps * rows, net->vocabulary, call->stop->sure);
    return ft_stop_through(call->stop, call->steps, rows, call->tokens);
}
