// See embedding.h. The layouts are those of linear.h and ggml.h.
#include "embedding.h"

#include <string.h>

#include "ggml.h"
#include "scalar.h"

enum {
    ROWS_OF_ITEM = 8,
    SERIAL_NUMBERS = 1 << 16  // so many are made by the caller alone
};

// One output of a packed layer, and where it lies: in `lane` of a panel.
typedef struct {
    const ft_linear *layer;
    int64_t panel;
    int lane;
} output;

static void take_floats(const output *o, int64_t first, int count, float *to) {
    const ft_linear *const layer = o->layer;
    const int64_t inputs = ft_padded_inputs(layer);
    if (layer->weight_type == FT_WEIGHT_FLOAT32) {
        const float *const from = (const float *)layer->weight + o->panel * inputs * FT_PANEL;
        for (int i = 0; i < count; i++) to[i] = from[(first + i) * FT_PANEL + o->lane];
        return;
    }
    const uint16_t *const from = (const uint16_t *)layer->weight + o->panel * inputs * FT_PANEL;
    for (int i = 0; i < count; i++) {
        const int64_t pair = (first + i) / 2;
        to[i] = ft_value(from, (pair * FT_PANEL + o->lane) * 2 + (first + i) % 2, FT_BFLOAT16);
    }
}

static float group_number(const void *numbers, int64_t at, int halves) {
    return halves ? half_to_float(((const uint16_t *)numbers)[at]) : ((const float *)numbers)[at];
}

// (value - zero) * scale, of 8 or 4 bits. A step is never part of two groups.
static void take_integers(const output *o, int64_t first, int count, float *to) {
    const ft_linear *const layer = o->layer;
    const int64_t inputs = ft_padded_inputs(layer), group = layer->group ? layer->group : inputs;
    const int64_t at = (o->panel * (inputs / group) + first / group) * FT_PANEL + o->lane;
    const float scale = group_number(layer->scale, at, layer->halves);
    const int bytes = layer->weight_type == FT_WEIGHT_INT8;
    float zero = bytes ? 128.0f : 8.0f;
    if (layer->zero && !bytes) zero = group_number(layer->zero, at, layer->halves);
    uint8_t values[FT_STEP];
    const uint8_t *from = (const uint8_t *)layer->weight;
    if (bytes) {
        from += (o->panel * inputs + first) * FT_PANEL + 4 * o->lane;
        for (int i = 0; i < FT_STEP / 4; i++) memcpy(values + 4 * i, from + 64 * i, 4);
    } else {
        from += (o->panel * inputs + first) / 2 * FT_PANEL + 4 * o->lane;
        ft_take_values(FT_BITS4, from, values);
    }
    for (int i = 0; i < count; i++) to[i] = ((float)values[i] - zero) * scale;
}

// A step of a block (ggml.h).
static void take_block(const output *o, int64_t first, float *to) {
    const ft_linear *const layer = o->layer;
    const int front = layer->front, form = layer->form;
    const int64_t step = (o->panel * layer->inputs + first) / FT_STEP;
    const int64_t unit = (o->panel * layer->inputs + first) / layer->unit;
    const ft_ggml_step place = {
        .values = (const uint8_t *)layer->weight + step * ft_front_bytes(front),
        .numbers = (const uint8_t *)layer->scale + step * ft_number_bytes(front, form),
        .upper = (const uint8_t *)layer->zero + unit * ft_upper_bytes(form),
    };
    ft_ggml_floats(front, form, &place, o->lane, to);
}

static void take_row(const ft_embedding *table, int64_t token, void *to) {
    const ft_linear *const layer = table->packed;
    const output o = {layer, token / FT_PANEL, (int)(token % FT_PANEL)};
    float numbers[FT_STEP];
    for (int64_t k = 0; k < table->width; k += FT_STEP) {
        const int64_t left = table->width - k;
        const int count = left < FT_STEP ? (int)left : FT_STEP;
        if (layer->weight_type == FT_WEIGHT_BLOCKS)
            take_block(&o, k, numbers);
        else if (layer->weight_type >= FT_WEIGHT_INT8)
            take_integers(&o, k, count, numbers);
        else
            take_floats(&o, k, count, numbers);
        if (table->type == FT_FLOAT32)
            memcpy((float *)to + k, numbers, (size_t)count * 4);
        else
            for (int i = 0; i < count; i++) ft_put(to, k + i, numbers[i], FT_BFLOAT16);
    }
}

typedef struct {
    const ft_embedding *table;
    const int64_t *tokens;
    int64_t rows;
    char *to;
} call;

static void take_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const call *c = context;
    const ft_embedding *const table = c->table;
    const size_t bytes = (size_t)table->width * (table->type == FT_BFLOAT16 ? 2 : 4);
    int64_t end = (item + 1) * ROWS_OF_ITEM;
    if (end > c->rows) end = c->rows;
    for (int64_t row = item * ROWS_OF_ITEM; row < end; row++) {
        char *const to = c->to + (size_t)row * bytes;
        if (table->floats)
            memcpy(to, (const char *)table->floats + (size_t)c->tokens[row] * bytes, bytes);
        else
            take_row(table, c->tokens[row], to);
    }
}

int ft_embed(const ft_embedding *table, const int64_t *tokens, int64_t rows, void *to) {
    for (int64_t row = 0; row < rows; row++)
        if (tokens[row] < 0 || tokens[row] >= table->tokens) return 0;
    call c = {table, tokens, rows, to};
    const int64_t items = ft_round_up(rows, ROWS_OF_ITEM) / ROWS_OF_ITEM;
    if (rows * table->width <= SERIAL_NUMBERS)
        for (int64_t item = 0; item < items; item++) take_rows(&c, item, 0);
    else
        ft_parallel(take_rows, &c, items);
    return 1;
}
