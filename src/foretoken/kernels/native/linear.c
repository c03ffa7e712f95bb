// Runs a linear layer: prepares its rows, then shares tiles of outputs among the threads.
#include "linear.h"

#include <stdlib.h>

const ft_linear_kernels *ft_linear_kernels_in_use(void) {
    int level = ft_level();
#if defined(__aarch64__)
    const ft_linear_kernels *const all[] = {&ft_linear_portable, &ft_linear_neon,
                                            &ft_linear_neondot, &ft_linear_neonbf16};
#else
    const ft_linear_kernels *const all[] = {
        &ft_linear_portable, &ft_linear_avx2,       &ft_linear_avxvnni,
        &ft_linear_avx512,   &ft_linear_avx512bf16, &ft_linear_amx};
#endif
    while (level > FT_PORTABLE && !all[level]->ready) level--;
    return all[level];
}

typedef struct {
    ft_linear_job job;
    const ft_linear_kernels *kernels;
    int64_t panels, tile;
} run_state;

enum {
    ROWS_OF_ITEM = 16,
    SERIAL_VALUES = 1 << 15,
    SERIAL_BYTES = 48 << 10,
    MANY_ROWS = 128,       // from here on rows are prepared chunk by chunk
    MOST_TILES = 8,        // that many rows pass over together, while their inputs are near
    TILES_OF_A_THREAD = 4  // at least so many turns of a thread, so that all end together
};

static void prepare_item(void *context, int64_t item, int worker) {
    (void)worker;
    const run_state *run = context;
    int64_t end = (item + 1) * ROWS_OF_ITEM;
    if (end > run->job.rows->rows) end = run->job.rows->rows;
    for (int64_t row = item * ROWS_OF_ITEM; row < end; row++) run->kernels->prepare(&run->job, row);
}

static void tile_item(void *context, int64_t item, int worker) {
    (void)worker;
    const run_state *run = context;
    int64_t panel = item * run->tile, left = run->panels - panel;
    run->kernels->tile(&run->job, panel, left < run->tile ? left : run->tile);
}

// Bytes of the prepared rows, and where each of their chunks will be.
static size_t lay_out(run_state *run) {
    const ft_linear *layer = run->job.layer;
    ft_prepared *x = &run->job.x;
    const int64_t rows = run->job.rows->rows, chunk = (int64_t)1 << x->chunk_shift;
    const int64_t bytes = (int64_t)run->kernels->row_bytes(layer);
    if (rows < MANY_ROWS) {
        x->stride = ft_round_up(bytes, 64);
        x->chunk_stride = chunk;
        return (size_t)(x->stride * rows);
    }
    x->stride = chunk;
    x->chunk_stride = chunk * rows;
    return (size_t)(ft_round_up(bytes, chunk) * rows);
}

static void prepare(run_state *run) {
    const ft_linear *layer = run->job.layer;
    const ft_linear_rows *rows = run->job.rows;
    ft_prepared *x = &run->job.x;
    const int integer = layer->weight_type >= FT_WEIGHT_INT8;
    const int bf16 = layer->weight_type == FT_WEIGHT_BFLOAT16, taken = run->kernels->bf16_inputs;
    const int bf16_pairs = bf16 && taken;
    // Rows that are used where they lie must not be read beyond their end.
    const int whole = bf16_pairs ? taken : bf16 ? 2 : 1;
    const int fits = !integer && layer->inputs % whole == 0 && rows->rows < MANY_ROWS &&
                     layer->x_type == (bf16_pairs ? FT_BFLOAT16 : FT_FLOAT32);
    x->rows = rows->rows;
    x->chunk_shift = run->kernels->chunk_shift(layer);
    if (fits && !layer->norm) {
        x->values = rows->x;
        x->stride = rows->x_stride * (bf16_pairs ? 2 : 4);
        x->chunk_stride = (int64_t)1 << x->chunk_shift;
        return;
    }
    const int64_t padded = ft_padded_inputs(layer);
    x->blocks = ft_round_up(padded, FT_BLOCK) / FT_BLOCK;
    x->parts = x->blocks * (FT_BLOCK / ft_part(layer));
    size_t bytes = lay_out(run), more = 0;
    if (integer) more = (size_t)(rows->rows * (x->blocks + x->parts)) * 4;
    char *memory = ft_scratch(0, bytes + more);
    if (!memory) abort();
    x->values = memory;
    x->scales = (const float *)(memory + bytes);
    x->sums = (const int32_t *)(memory + bytes) + rows->rows * x->blocks;
    if (rows->rows * layer->inputs <= SERIAL_VALUES)
        for (int64_t row = 0; row < rows->rows; row++) run->kernels->prepare(&run->job, row);
    else
        ft_parallel(prepare_item, run, ft_round_up(rows->rows, ROWS_OF_ITEM) / ROWS_OF_ITEM);
}

// Tiles that an item takes together.
static int64_t tiles_at_once(int64_t panels, int64_t rows) {
    if (rows < MANY_ROWS) return 1;
    const int64_t tiles = panels / FT_TILE / (TILES_OF_A_THREAD * ft_threads());
    int64_t taken = 1;
    while (taken < MOST_TILES && 2 * taken <= tiles) taken *= 2;
    return taken;
}

static int64_t columns_of(const ft_linear *layer) {
    return layer->gated ? layer->outputs / 2 : layer->outputs;
}

static void run_one(const ft_linear *layer, const ft_linear_rows *rows) {
    static const int bits[] = {32, 16, 8, 4, 5};
    run_state run = {.job = {.layer = layer, .rows = rows}, .kernels = ft_linear_kernels_in_use()};
    run.panels = ft_panels(layer);
    run.tile = FT_TILE * tiles_at_once(run.panels, rows->rows);
    prepare(&run);
    int64_t items = ft_round_up(run.panels, run.tile) / run.tile;
    int64_t bytes = layer->outputs * layer->inputs * bits[layer->weight_type] / 8;
    if (bytes * rows->rows <= SERIAL_BYTES)
        for (int64_t item = 0; item < items; item++) tile_item(&run, item, 0);
    else
        ft_parallel(tile_item, &run, items);
}

void ft_linear_run(const ft_linear *layer, const ft_linear_rows *rows) {
    if (rows->rows < 1) return;
    ft_linear_rows part = *rows;
    const int64_t bytes = layer->y_type == FT_BFLOAT16 ? 2 : 4;
    for (;; layer = layer->next) {
        run_one(layer, &part);
        if (!layer->next) return;
        part.y = (char *)part.y + columns_of(layer) * bytes;
        if (part.residual) part.residual = (const char *)part.residual + columns_of(layer) * bytes;
    }
}

void ft_linear_dense(const ft_linear *layer, const void *x, void *y, const void *residual,
                     int64_t rows) {
    int64_t columns = 0;
    for (const ft_linear *part = layer; part; part = part->next) columns += columns_of(part);
    const ft_linear_rows dense = {x, y, residual, rows, layer->inputs, columns, columns};
    ft_linear_run(layer, &dense);
}
