// Norms, rotary positions and gates on random shapes, in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. Results are compared with
// PyTorch's elsewhere; here one row must equal the same row among many. Arguments: number of rounds,
// seed.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rows.h"
#include "vec.h"

static uint64_t state = 1;

static int64_t draw(int least, int most) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int64_t)((state >> 33) % (uint64_t)(most - least + 1));
}

// Values of a type: bytes that make ordinary numbers in both.
static void *values(int64_t count, int type) {
    const size_t bytes = (size_t)count * (type == FT_BFLOAT16 ? 2 : 4);
    uint8_t *memory = malloc(bytes ? bytes : 1);
    if (!memory) abort();
    for (size_t i = 0; i < bytes; i++)
        memory[i] = (uint8_t)(i % 2 ? (draw(0, 1) ? 0x3f : 0xbf) : draw(0, 255));
    return memory;
}

static void same(const void *a, const void *b, size_t bytes, const char *what) {
    if (!memcmp(a, b, bytes)) return;
    printf("%s: a row depends on the others\n", what);
    exit(1);
}

static void norm(int type, int64_t rows, int64_t width) {
    const size_t row = (size_t)width * (type == FT_BFLOAT16 ? 2 : 4);
    const int weight_type = (int)draw(0, 1);
    void *x = values(rows * width, type), *weight = values(width, weight_type);
    char *y = values(rows * width, type), *last = values(width, type);
    ft_norm_call call = {.x = x, .y = y, .weight = weight, .rows = rows, .width = width,
                         .x_stride = width, .y_stride = width, .residual_stride = width,
                         .residual = draw(0, 1) ? x : NULL, .type = type,
                         .weight_type = weight_type, .eps = 1e-5f};
    ft_norm(&call);
    call.rows = 1;
    call.x = (char *)x + (size_t)(rows - 1) * row;
    call.residual = call.residual ? call.x : NULL;
    call.y = last;
    ft_norm(&call);
    same(last, y + (size_t)(rows - 1) * row, row, "norm");
    free(x), free(weight), free(y), free(last);
}

static void gate(int type, int64_t rows, int64_t width) {
    const size_t item = type == FT_BFLOAT16 ? 2 : 4, row = (size_t)width * item;
    char *x = values(2 * rows * width, type), *y = values(rows * width, type);
    char *last = values(width, type);
    ft_gate_call call = {.x = x, .y = y, .rows = rows, .width = width, .x_stride = 2 * width,
                         .y_stride = width, .type = type, .activation = (int32_t)draw(0, 1)};
    ft_gate(&call);
    call.rows = 1;
    call.x = x + 2 * (size_t)(rows - 1) * row;
    call.y = last;
    ft_gate(&call);
    same(last, y + (size_t)(rows - 1) * row, row, "gate");
    free(x), free(y), free(last);
}

// Multiplied out, each number of a head that FT_INT8 keeps is half a step at most from what it was.
static void near(const char *kept, const void *head, int size, int type) {
    float scale;
    memcpy(&scale, kept + size, FT_SCALE_BYTES);
    for (int i = 0; i < size; i++) {
        const float x = type == FT_BFLOAT16 ? bf16_to_float(((const bf16 *)head)[i])
                                            : ((const float *)head)[i];
        const float error = x - (float)(int8_t)kept[i] * scale;
        if (error <= 0.501f * scale && -error <= 0.501f * scale) continue;
        printf("rotary: %g is kept as %d x %g\n", (double)x, kept[i], (double)scale);
        exit(1);
    }
}

static void rotary(int type, int64_t rows) {
    const int heads = (int)draw(1, 6), kv = (int)draw(1, 3), size = 2 * (int)draw(1, 70);
    const int width = draw(0, 1) ? size : 2 * (int)draw(1, size / 2), norm_type = (int)draw(0, 1);
    const int rounded = draw(0, 1) != 0, kept = size + (rounded ? FT_SCALE_BYTES : 0);
    const int64_t all = (int64_t)(heads + 2 * kv) * size, slot = 2 * (int64_t)kv * kept;
    const size_t item = type == FT_BFLOAT16 ? 2 : 4, stored = rounded ? 1 : item;
    void *qkv = values(rows * all, type);
    char *store = malloc((size_t)((rows + 3) * slot) * stored);
    if (!store) abort();
    void *cos = values(rows * width, type), *sin = values(rows * width, type);
    void *query = values(size, norm_type), *key = values(size, norm_type), *value = values(size, norm_type);
    const int normed = draw(0, 1) != 0;
    const ft_rotary_call call = {.qkv = qkv, .kv = store, .cos = cos, .sin = sin,
                                 .query_norm = normed ? query : NULL,
                                 .key_norm = normed ? key : NULL, .value_norm = draw(0, 1) ? value : NULL,
                                 .first_slot = 3, .rows = rows, .turns_first = (int32_t)draw(0, 1),
                                 .qkv_stride = all, .kv_stride = slot, .num_heads = heads,
                                 .num_kv_heads = kv, .head_dim = size, .width = width,
                                 .type = type, .kv_type = rounded ? FT_INT8 : type,
                                 .norm_type = norm_type, .eps = 1e-5f};
    ft_rotary(&call);
    const char *from = (char *)qkv + (size_t)((rows - 1) * all + (int64_t)heads * size) * item;
    const char *to = store + (size_t)((rows + 2) * slot) * stored;
    if (!rounded) same(to, from, (size_t)slot * item, "rotary");
    for (int h = 0; rounded && h < 2 * kv; h++)
        near(to + h * kept, from + (size_t)(h * size) * item, size, type);
    free(qkv), free(store), free(cos), free(sin), free(query), free(key), free(value);
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 300;
    state += count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    for (int level = FT_PORTABLE; level <= ft_cpu_level(); level++) {
        ft_set_level(level);
        for (int i = 0; i < rounds; i++) {
            const int type = (int)draw(0, 1);
            const int64_t rows = draw(0, 9) ? draw(1, 4) : draw(1, 90), width = draw(1, 600);
            ft_set_threads((int)draw(1, 3));
            norm(type, rows, width);
            gate(type, rows, width);
            rotary(type, rows);
        }
    }
    printf("rows: ok\n");
    return 0;
}
