// The bfloat16 part of linear_body.h on AMX tiles: up to 16 rows in the time of one.
//
// NOT YET RUN on a processor that has them; `auto` therefore stops below (kernels/library.py). Its logic
// runs in tests/fuzz with the instructions emulated.
// Tiles 0 to 3 hold sums of 16 outputs, 4 holds rows of 32 inputs, 5 to 7 weights as they are packed.
// All rows go this way, one row too, so that bits do not depend on their number.

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

static void configure_tiles(int rows) {
    // GCC 12 drops the stores into a configuration that is neither volatile nor behind a barrier.
    static _Thread_local volatile tile_config config __attribute__((aligned(64)));
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < 5 ? rows : 16);
    }
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig((const void *)&config);
}

enum { TILE_STEPS = 16 };  // pairs of a tile

static void pair_steps_tile(const chunk *c, int rows) {
    const size_t sums = SUM_STRIDE * sizeof(float), stride = (size_t)c->panel_stride;
    configure_tiles(rows);
    _tile_loadd(0, c->sums, sums);
    _tile_loadd(1, c->sums + FT_PANEL, sums);
    _tile_loadd(2, c->sums + 2 * FT_PANEL, sums);
    _tile_loadd(3, c->sums + 3 * FT_PANEL, sums);
    for (int i = 0; i < c->steps; i += TILE_STEPS) {
        const char *w = c->weight + i * STEP_BYTES;
        for (int step = 0; step < TILE_STEPS; step++) fetch_ahead(c, 0, FT_TILE, i + step, c->fetch_near);
        _tile_loadd(4, c->x + i * 4, (size_t)c->x_stride);
        _tile_loadd(5, w, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + stride, STEP_BYTES);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + 2 * stride, STEP_BYTES);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 3 * stride, STEP_BYTES);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, c->sums, sums);
    _tile_stored(1, c->sums + FT_PANEL, sums);
    _tile_stored(2, c->sums + 2 * FT_PANEL, sums);
    _tile_stored(3, c->sums + 3 * FT_PANEL, sums);
    _tile_release();
}

static void pair_steps_panel(const chunk *c, int rows) {
    const size_t sums = SUM_STRIDE * sizeof(float);
    configure_tiles(rows);
    _tile_loadd(0, c->sums, sums);
    for (int i = 0; i < c->steps; i += TILE_STEPS) {
        _tile_loadd(4, c->x + i * 4, (size_t)c->x_stride);
        _tile_loadd(5, c->weight + i * STEP_BYTES, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, c->sums, sums);
    _tile_release();
}
