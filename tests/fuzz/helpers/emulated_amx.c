// Linear layers as linear_amx.c computes them, its tile instructions replaced by plain C.
//
// What is compiled here is the file that ships, so its addresses, shapes and order are what is tested;
// memory beyond a buffer is seen by the sanitizers, and a shape that the processor would refuse ends
// the program. Speed, the instructions themselves and the system's leave to use them are not tested.
#include "emulated_amx.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>

#include "vec.h"

typedef struct {
    int rows, bytes;  // 0: not configured
    uint8_t data[16][64];
} emulated_tile;

static _Thread_local emulated_tile tiles[8];

static void wanted(int holds, const char *what) {
    if (holds) return;
    printf("tiles: %s\n", what);
    exit(1);
}

// Row lengths are 16-bit numbers from byte 16 on, numbers of rows are bytes from 48 on.
__attribute__((noinline)) static void configure(const uint8_t *config) {
    wanted(config[0] == 1 && config[1] == 0, "palette 1, from the start");
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * i, 2);
        wanted(bytes <= 64 && config[48 + i] <= 16, "at most 16 rows of 64 bytes");
        wanted((bytes == 0) == (config[48 + i] == 0), "rows and columns, or neither");
        tiles[i] = (emulated_tile){.rows = config[48 + i], .bytes = bytes};
    }
}

// GCC 12 declares that the instruction reads the first 8 bytes only, and may leave out stores to the
// others: here too, so that a configuration without its guard is seen.
static inline __attribute__((always_inline)) void load_configuration(const void *config) {
    const uint8_t *seen;
    __asm__ volatile("leaq %1, %0" : "=r"(seen) : "m"(*((const void *const *)config)));
    configure(seen);
}

static void load_tile(int tile, const void *base, size_t stride) {
    wanted(tiles[tile].rows, "loaded before it is configured");
    for (int row = 0; row < tiles[tile].rows; row++)
        memcpy(tiles[tile].data[row], (const char *)base + row * stride, (size_t)tiles[tile].bytes);
}

static void store_tile(int tile, void *base, size_t stride) {
    wanted(tiles[tile].rows, "stored before it is configured");
    for (int row = 0; row < tiles[tile].rows; row++)
        memcpy((char *)base + row * stride, tiles[tile].data[row], (size_t)tiles[tile].bytes);
}

// Sums of even and of odd products along a tile's pairs, each in order; then both, and onto the tile.
// Products of bfloat16 are exact in float32, so it does not matter whether they are fused.
static void multiply(emulated_tile *sum, const emulated_tile *a, const emulated_tile *b) {
    wanted(sum->rows && a->rows && b->rows, "multiplied before they are configured");
    wanted(sum->rows == a->rows && sum->bytes == b->bytes && b->rows * 4 == a->bytes, "shapes");
    for (int m = 0; m < a->rows; m++)
        for (int n = 0; n < b->bytes / 4; n++) {
            float part[2] = {0, 0}, total;
            for (int k = 0; k < b->rows; k++)
                for (int i = 0; i < 2; i++) {
                    bf16 x, w;
                    memcpy(&x, a->data[m] + 4 * k + 2 * i, 2);
                    memcpy(&w, b->data[k] + 4 * n + 2 * i, 2);
                    part[i] += bf16_to_float(x) * bf16_to_float(w);
                }
            memcpy(&total, sum->data[m] + 4 * n, 4);
            total += part[0] + part[1];
            memcpy(sum->data[m] + 4 * n, &total, 4);
        }
}

// Of bytes, the first with a sign and the second without, exactly.
static void multiply_bytes_of(emulated_tile *sum, const emulated_tile *a, const emulated_tile *b) {
    wanted(sum->rows && a->rows && b->rows, "multiplied before they are configured");
    wanted(sum->rows == a->rows && sum->bytes == b->bytes && b->rows * 4 == a->bytes, "shapes");
    for (int m = 0; m < a->rows; m++)
        for (int n = 0; n < b->bytes / 4; n++) {
            int32_t total;
            memcpy(&total, sum->data[m] + 4 * n, 4);
            for (int k = 0; k < b->rows * 4; k++)
                total += (int8_t)a->data[m][k] * b->data[k / 4][4 * n + k % 4];
            memcpy(sum->data[m] + 4 * n, &total, 4);
        }
}

static void zero_tile(int tile) {
    wanted(tiles[tile].rows, "set to zero before it is configured");
    memset(tiles[tile].data, 0, sizeof tiles[tile].data);
}

#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig load_configuration
#define _tile_loadd(tile, base, stride) load_tile(tile, base, stride)
#define _tile_stored(tile, base, stride) store_tile(tile, base, stride)
#define _tile_dpbf16ps(sum, a, b) multiply(&tiles[sum], &tiles[a], &tiles[b])
#define _tile_zero(tile) zero_tile(tile)
#define _tile_dpbsud(sum, a, b) multiply_bytes_of(&tiles[sum], &tiles[a], &tiles[b])
#define _tile_release() memset(tiles, 0, sizeof tiles)

#define ft_linear_amx emulated_linear
#include "linear_amx.c"
#else
const ft_linear_kernels emulated_linear = {0};
#endif
