// Random matrices in block types through packing and the linear kernels, built with sanitizers.
//
// Every buffer is exactly as large as it has to be. Rows alone must have the bits of rows together, every
// instruction set must give the same bits, and parts of two types in one call those of two calls. That the
// weights are the file's is tested from Python (tests/unit/kernels/test_blocks.py). Arguments: number of
// rounds, seed.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embedding.h"
#include "ggml.h"
#include "helpers/making.h"
#include "linear.h"

static const int types[] = {FT_Q4_1, FT_Q5_0, FT_Q5_1, FT_Q2_K, FT_Q3_K, FT_Q4_K,
                            FT_Q5_K, FT_Q6_K, FT_IQ4_NL, FT_IQ4_XS, FT_MXFP4};

// Scales of a block that are usual numbers: halves below 1, powers near 0.
static void make_usual(int type, unsigned char *block, int bytes) {
    static const int at[][3] = {{FT_Q4_1, 0, 2}, {FT_Q5_0, 0, -1}, {FT_Q5_1, 0, 2}, {FT_Q2_K, 80, 82},
                                {FT_Q3_K, 108, -1}, {FT_Q4_K, 0, 2}, {FT_Q5_K, 0, 2}, {FT_Q6_K, 208, -1},
                                {FT_IQ4_NL, 0, -1}, {FT_IQ4_XS, 0, -1}};
    for (int i = 0; i < bytes; i++) block[i] = (unsigned char)pick(0, 255);
    if (type == FT_MXFP4) block[0] = (unsigned char)pick(100, 140);
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        for (int j = 1; j < 3 && at[i][0] == type; j++)
            if (at[i][j] >= 0) block[at[i][j] + 1] = (unsigned char)(pick(0, 1) << 7 | pick(0, 59));
}

static int kind_bytes(int type, int *inputs, int *front, int *form) {
    static const int all[][5] = {
        {FT_Q4_1, 32, 20, FT_BITS4, FT_HALVES | FT_MINIMA}, {FT_Q5_0, 32, 22, FT_BITS5, FT_HALVES},
        {FT_Q5_1, 32, 24, FT_BITS5, FT_HALVES | FT_MINIMA}, {FT_Q2_K, 256, 84, FT_SHORT4, FT_BYTES | FT_MINIMA},
        {FT_Q3_K, 256, 110, FT_SHORT4, FT_BYTES}, {FT_Q4_K, 256, 144, FT_BITS4, FT_BYTES | FT_MINIMA},
        {FT_Q5_K, 256, 176, FT_BITS5, FT_BYTES | FT_MINIMA}, {FT_Q6_K, 256, 210, FT_BITS6, FT_BYTES},
        {FT_IQ4_NL, 32, 18, FT_IQ4, FT_HALVES}, {FT_IQ4_XS, 256, 136, FT_IQ4, FT_BYTES},
        {FT_MXFP4, 32, 17, FT_FP4, FT_POWERS}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i][0] == type) {
            *inputs = all[i][1], *front = all[i][3], *form = all[i][4];
            return all[i][2];
        }
    abort();
}

// A layer over packed random blocks, perhaps with its inputs in another order.
static ft_linear *make_layer(int64_t inputs, int64_t outputs, int x_type, int y_type, int x_bits) {
    int type, of_block, front, form, bytes;
    do {
        type = types[pick(0, (int)(sizeof types / sizeof *types) - 1)];
        bytes = kind_bytes(type, &of_block, &front, &form);
    } while (inputs % of_block);
    const int64_t blocks = inputs / of_block, panels = (outputs + FT_PANEL - 1) / FT_PANEL;
    const void **rows = make_bytes((size_t)outputs * sizeof *rows);
    for (int64_t n = 0; n < outputs; n++) {
        unsigned char *row = make_bytes((size_t)(blocks * bytes));
        for (int64_t i = 0; i < blocks; i++) make_usual(type, row + i * bytes, bytes);
        rows[n] = row;
    }
    ft_ggml_matrix m = {.rows = rows, .outputs = outputs, .inputs = inputs, .type = type, .unit = of_block};
    if (pick(0, 1)) {
        m.width = 32 << pick(0, 2);
        if (inputs % m.width) m.width = 32;
        if (m.unit > m.width) m.unit = m.width;
        int32_t *columns = make_bytes((size_t)(inputs / m.width) * 4);
        for (int64_t i = 0; i < inputs / m.width; i++) columns[i] = (int32_t)(inputs / m.width - 1 - i);
        m.columns = columns;
    }
    const int64_t steps = panels * inputs / FT_STEP;
    const size_t values = (size_t)(steps * ft_front_bytes(front));
    const size_t numbers = (size_t)(steps * ft_number_bytes(front, form));
    const size_t upper = (size_t)(panels * (inputs / m.unit) * ft_upper_bytes(form));
    m.values = make_bytes(values), m.numbers = make_bytes(numbers), m.upper = make_bytes(upper);
    memset(m.values, 0, values), memset(m.numbers, 0, numbers), memset(m.upper, 0, upper);
    wanted(ft_pack_ggml(&m), "a known type is packed");
    wanted(!ft_strange_ggml(&m), "usual scales are numbers");
    ft_linear *layer = make_bytes(sizeof *layer);
    *layer = (ft_linear){.weight_type = FT_WEIGHT_BLOCKS, .x_type = x_type, .y_type = y_type,
                         .group = ft_front_group(front), .x_bits = x_bits, .front = front, .form = form,
                         .unit = m.unit, .outputs = outputs, .inputs = inputs, .weight = m.values,
                         .scale = m.numbers, .zero = m.upper};
    return layer;
}

// Rows of a table together are those of its tokens alone.
static void read_rows(const ft_linear *layer, int type) {
    const ft_embedding table = {.packed = layer, .tokens = layer->outputs, .width = layer->inputs, .type = type};
    const int64_t count = pick(0, 4) ? pick(1, 9) : pick(100, 300);
    const size_t bytes = (size_t)layer->inputs * item_bytes(type);
    int64_t *tokens = make_bytes((size_t)count * sizeof *tokens);
    for (int64_t i = 0; i < count; i++) tokens[i] = pick(0, (int)layer->outputs - 1);
    char *found = make_bytes((size_t)count * bytes), *alone = make_bytes(bytes);
    wanted(ft_embed(&table, tokens, count, found), "tokens of the table are known");
    for (int64_t i = 0; i < count; i++) {
        ft_embed(&table, tokens + i, 1, alone);
        same_bytes(alone, found + (size_t)i * bytes, bytes, "rows alone are those of all together");
    }
    tokens[count - 1] = pick(0, 1) ? -1 : layer->outputs;
    wanted(!ft_embed(&table, tokens, count, found), "others are not");
}

static void one_round(void) {
    const int x_type = pick(0, 1), y_type = pick(0, 1);
    const int64_t inputs = pick(0, 2) ? 32 * pick(1, 30) : 256 * pick(1, 5);
    ft_linear *first = make_layer(inputs, pick(1, 90), x_type, y_type, pick(0, 1) ? 8 : 16);
    ft_linear *second = make_layer(inputs, pick(1, 90), x_type, y_type, first->x_bits);
    const int64_t columns = first->outputs + second->outputs, count = pick(0, 4) ? pick(1, 9) : pick(120, 200);
    const void *x = make_numbers(x_type, count * inputs, 1), *r = make_numbers(y_type, count * columns, 1);
    const size_t size = item_bytes(y_type), bytes = (size_t)(count * columns) * size;
    char *known = make_bytes(bytes), *found = make_bytes(bytes);
    for (int level = 0; level <= ft_cpu_level(); level++) {
        ft_set_level(level);
        ft_set_threads(pick(1, 3));
        ft_set_fetches_near(pick(0, 1));
        first->next = second;
        ft_linear_dense(first, x, found, r, count);
        if (level) same_bytes(found, known, bytes, "levels agree");
        memcpy(known, found, bytes);
        first->next = NULL;
        ft_linear_rows rows = {x, found, r, count, inputs, columns, columns};
        memset(found, 0, bytes);
        ft_linear_run(first, &rows);
        const size_t beside = (size_t)first->outputs * size;
        rows.y = found + beside, rows.residual = (const char *)r + beside;
        for (int64_t row = 0; row < count; row++) {
            ft_linear_rows one = rows;
            one.rows = 1;
            one.x = (const char *)x + (size_t)(row * inputs) * item_bytes(x_type);
            one.y = (char *)rows.y + (size_t)(row * columns) * size;
            one.residual = (const char *)rows.residual + (size_t)(row * columns) * size;
            ft_linear_run(second, &one);
        }
        same_bytes(found, known, bytes, "parts and rows alone have the bits of all together");
    }
    read_rows(first, x_type);
    free_made();
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 100;
    begin_making(count > 2 ? (uint64_t)atoll(arguments[2]) : 1);
    for (int i = 0; i < rounds; i++) one_round();
    printf("ggml: %d rounds, levels 0 to %d\n", rounds, ft_cpu_level());
    return 0;
}
