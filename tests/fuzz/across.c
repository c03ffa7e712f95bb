// One line for every instruction set: what kind of kernel gave which bits, as a hash of its results.
//
// `whole`, layers of integer weights, must be the same everywhere: linear.h promises it. `fused`, what
// AVX2 and NEON compute lane by lane with the same operations (layers of floats, gates, rotary
// positions), must be the same for those two, which scripts/fuzz_kernels.py compares where it runs both;
// `pairs`, layers of bfloat16 weights, too, up to FT_NEONDOT. Arguments: number of rounds, seed.
#include <stdio.h>
#include <stdlib.h>

#include "helpers/making.h"
#include "linear.h"
#include "rows.h"

typedef struct {
    uint64_t whole, fused, pairs;
} hashes;

static void add(uint64_t *hash, const void *bytes, int64_t count) {
    const uint8_t *at = bytes;
    for (int64_t i = 0; i < count; i++) *hash = (*hash ^ at[i]) * 0x100000001B3u;
}

static void linear(hashes *sums) {
    const int type = pick(0, 1), y_type = pick(0, 1);
    const int64_t inputs = pick(0, 1) ? 32 * pick(1, 12) : pick(1, 300), outputs = 8 * pick(1, 20);
    const int64_t rows = pick(1, 9);
    ft_linear *l = make_linear(type, y_type, inputs, outputs);
    const int integer = l->weight_type >= FT_WEIGHT_INT8;
    l->gated = !integer && outputs % (2 * FT_PANEL) == 0;  // panels of both halves are whole
    const int64_t columns = l->gated ? outputs / 2 : outputs;
    const void *x = make_numbers(type, rows * inputs, 1.0f);
    const void *residual = make_numbers(y_type, rows * columns, 1.0f);
    void *y = make_numbers(y_type, rows * columns, 1.0f);
    ft_linear_dense(l, x, y, residual, rows);
    uint64_t *hash = integer ? &sums->whole
                             : l->weight_type == FT_WEIGHT_FLOAT32 ? &sums->fused : &sums->pairs;
    add(hash, y, rows * columns * (int64_t)item_bytes(y_type));
}

static void gate(hashes *sums) {
    const int type = pick(0, 1);
    const int64_t rows = pick(1, 4), width = pick(1, 200);
    const void *x = make_numbers(type, 2 * rows * width, 8.0f);
    void *y = make_numbers(type, rows * width, 1.0f);
    const ft_gate_call call = {.x = x, .y = y, .rows = rows, .width = width, .x_stride = 2 * width,
                               .y_stride = width, .type = type, .activation = pick(0, 2)};
    ft_gate(&call);
    add(&sums->fused, y, rows * width * (int64_t)item_bytes(type));
}

static void rotary(hashes *sums) {
    const int type = pick(0, 1), rounded = pick(0, 1), heads = pick(1, 3), kv = pick(1, 2);
    const int size = 2 * pick(1, 70), width = pick(0, 1) ? size : 2 * pick(1, size / 2);
    const int64_t rows = pick(1, 4), all = (int64_t)(heads + 2 * kv) * size;
    const int64_t slot = 2 * (int64_t)kv * (size + (rounded ? FT_SCALE_BYTES : 0));
    const int64_t bytes = rows * slot * (rounded ? 1 : (int64_t)item_bytes(type));
    void *qkv = make_numbers(type, rows * all, 3.0f), *store = make_bytes((size_t)bytes);
    const ft_rotary_call call = {.qkv = qkv, .kv = store, .rows = rows, .qkv_stride = all,
                                 .cos = make_numbers(type, rows * width, 1.0f),
                                 .sin = make_numbers(type, rows * width, 1.0f),
                                 .kv_stride = slot, .num_heads = heads, .num_kv_heads = kv,
                                 .head_dim = size, .width = width, .type = type,
                                 .kv_type = rounded ? FT_INT8 : type, .eps = 1e-5f};
    ft_rotary(&call);
    add(&sums->fused, qkv, rows * all * (int64_t)item_bytes(type));
    add(&sums->fused, store, bytes);
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 200;
    const uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    uint64_t first = 0;
    for (int level = FT_PORTABLE; level <= ft_cpu_level(); level++) {
        ft_set_level(level);
        begin_making(seed);
        hashes sums = {14695981039346656037u, 14695981039346656037u, 14695981039346656037u};
        for (int i = 0; i < rounds; i++) {
            linear(&sums);
            gate(&sums);
            rotary(&sums);
            free_made();
        }
        if (level == FT_PORTABLE) first = sums.whole;
        wanted(sums.whole == first, "integer weights give the same bits at every level");
        printf("across: level %d whole %016llx fused %016llx pairs %016llx\n", level,
               (unsigned long long)sums.whole, (unsigned long long)sums.fused,
               (unsigned long long)sums.pairs);
    }
    return 0;
}
