// The bfloat16 part of linear_body.h on AMX tiles: up to 16 rows in the time of one.
//
// Tiles 0 to 3 hold sums of 16 outputs, 4 and 5 rows of 32 inputs, 6 and 7 weights as they are packed.
// All rows go this way, one row too, so that bits do not depend on their number: what is added to an
// output's sum, and in which order, is the same in a tile of one row and in one of sixteen.

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

enum {
    TILE_ROWS = 16,
    TILE_STEPS = 16  // of a panel: 64 bytes of each of 16 outputs' inputs
};

static _Thread_local int configured;  // rows that this thread's tiles are for; 0: none

// Tiles of `rows` rows, more than 16 of them in tiles 0, 1 and 4 and then in 2, 3 and 5. It takes as
// long as multiplying a few tiles, so only what changes is configured.
static void configure_tiles(int rows) {
    if (configured == rows) return;
    // GCC 12 drops the stores into a configuration that is neither volatile nor behind a barrier.
    static _Thread_local volatile tile_config config __attribute__((aligned(64)));
    const int first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows > first ? rows - first : rows;
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        const int of_second = i == 2 || i == 3 || i == 5;
        config.row_bytes[i] = STEP_BYTES;
        config.rows[i] = (uint8_t)(i > 5 ? TILE_ROWS : of_second ? second : first);
    }
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig((const void *)&config);
    configured = rows;
}

// Whoever computes something else between does not save and restore what tiles hold.
static void release_tiles(void) {
    if (configured) _tile_release();
    configured = 0;
}

// Bring `steps` steps of a panel nearer, if this group of rows has to: of many groups each has a share
// (run_chunk). A few at a time between products: a processor waits on more than a dozen of them.
static void fetch_steps(const chunk *c, int panel, int step, int steps) {
    if (c->fetch[panel] == c->weight) return;
    for (int i = step; i < step + steps; i++) fetch_ahead(c, panel, 1, i, c->fetch_near);
}

// Up to 16 rows, four panels.
static void few_pairs(const chunk *c) {
    const size_t sums = SUM_STRIDE * sizeof(float), stride = (size_t)c->panel_stride;
    _tile_loadd(0, c->sums, sums);
    _tile_loadd(1, c->sums + FT_PANEL, sums);
    _tile_loadd(2, c->sums + 2 * FT_PANEL, sums);
    _tile_loadd(3, c->sums + 3 * FT_PANEL, sums);
    for (int i = 0; i < c->steps; i += TILE_STEPS) {
        const char *w = c->weight + i * STEP_BYTES;
        _tile_loadd(4, c->x + i * 4, (size_t)c->x_stride);
        _tile_loadd(6, w, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        fetch_steps(c, 0, i, TILE_STEPS);
        _tile_loadd(7, w + stride, STEP_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        fetch_steps(c, 1, i, TILE_STEPS);
        _tile_loadd(6, w + 2 * stride, STEP_BYTES);
        _tile_dpbf16ps(2, 4, 6);
        fetch_steps(c, 2, i, TILE_STEPS);
        _tile_loadd(7, w + 3 * stride, STEP_BYTES);
        _tile_dpbf16ps(3, 4, 7);
        fetch_steps(c, 3, i, TILE_STEPS);
    }
    _tile_stored(0, c->sums, sums);
    _tile_stored(1, c->sums + FT_PANEL, sums);
    _tile_stored(2, c->sums + 2 * FT_PANEL, sums);
    _tile_stored(3, c->sums + 3 * FT_PANEL, sums);
}

// 17 to 32 rows, two panels from `panel` on: every tile that is loaded is multiplied twice. Nothing is
// fetched ahead: so many rows keep weights that are near, and fetching takes time from loading tiles.
static void many_pairs(const chunk *c, int panel) {
    const size_t sums = SUM_STRIDE * sizeof(float), x_stride = (size_t)c->x_stride;
    const char *const weight = c->weight + panel * c->panel_stride;
    const char *const x = c->x + TILE_ROWS * c->x_stride;
    float *const first = c->sums + panel * FT_PANEL, *const second = first + TILE_ROWS * SUM_STRIDE;
    _tile_loadd(0, first, sums);
    _tile_loadd(1, first + FT_PANEL, sums);
    _tile_loadd(2, second, sums);
    _tile_loadd(3, second + FT_PANEL, sums);
    for (int i = 0; i < c->steps; i += TILE_STEPS) {
        const char *w = weight + i * STEP_BYTES;
        _tile_loadd(4, c->x + i * 4, x_stride);
        _tile_loadd(6, w, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + c->panel_stride, STEP_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + i * 4, x_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, first, sums);
    _tile_stored(1, first + FT_PANEL, sums);
    _tile_stored(2, second, sums);
    _tile_stored(3, second + FT_PANEL, sums);
}

static void pair_steps_tile(const chunk *c, int rows) {
    configure_tiles(rows);
    if (rows <= TILE_ROWS) {
        few_pairs(c);
        return;
    }
    for (int panel = 0; panel < FT_TILE; panel += 2) many_pairs(c, panel);
}

static void pair_steps_panel(const chunk *c, int rows) {
    const size_t sums = SUM_STRIDE * sizeof(float);
    for (int row = 0; row < rows; row += TILE_ROWS) {
        configure_tiles(rows - row < TILE_ROWS ? rows - row : TILE_ROWS);
        _tile_loadd(0, c->sums + row * SUM_STRIDE, sums);
        for (int i = 0; i < c->steps; i += TILE_STEPS) {
            _tile_loadd(4, c->x + row * c->x_stride + i * 4, (size_t)c->x_stride);
            _tile_loadd(6, c->weight + i * STEP_BYTES, STEP_BYTES);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, c->sums + row * SUM_STRIDE, sums);
    }
}
