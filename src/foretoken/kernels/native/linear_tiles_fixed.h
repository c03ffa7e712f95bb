// The 8-bit weights of linear_fixed.h on AMX tiles, for more rows than vectors take at once.
//
// A tile multiplies bytes: activations of 8 bits as they are, those of 16 as 256 upper + lower, both
// with a sign (fix_block lays them so). Sums of a block are exact integers, as they are with vectors,
// and end_group makes floats of them: the bits are the same, so few rows go on without tiles.

enum {
    SPLIT_ROWS = 4,  // that become floats at once
    FETCH_PARTS = 8  // in which a block's weights are brought nearer, between all that it takes
};

typedef int32_t tile_sums[TILE_ROWS][FT_TILE * FT_PANEL];

static void fetch_part(const chunk *c, int block, int part) {
    const int steps = FT_BLOCK / 4, first = block * steps + part * steps / FETCH_PARTS;
    for (int p = 0; p < FT_TILE; p++) fetch_steps(c, p, first, steps / FETCH_PARTS);
}

// Whole sums of a block of rows of 8 bits, of all panels that there are: four or one.
ALWAYS void multiply_bytes(const chunk *c, const int panels, int block, tile_sums found) {
    const char *const x = c->x + block * FT_BLOCK;
    const char *weight = c->weight + block * (FT_BLOCK / 4 * STEP_BYTES);
    const size_t bytes = sizeof found[0], x_stride = (size_t)c->x_stride;
    const size_t stride = (size_t)c->panel_stride;
    _tile_zero(0);
    if (panels > 1) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int half = 0; half < 2; half++, weight += TILE_STEPS * STEP_BYTES) {
        _tile_loadd(4, x + half * STEP_BYTES, x_stride);
        _tile_loadd(6, weight, STEP_BYTES);
        _tile_dpbsud(0, 4, 6);
        if (panels == 1) continue;
        fetch_part(c, block, 2 * half);
        _tile_loadd(7, weight + stride, STEP_BYTES);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(6, weight + 2 * stride, STEP_BYTES);
        _tile_dpbsud(2, 4, 6);
        fetch_part(c, block, 2 * half + 1);
        _tile_loadd(7, weight + 3 * stride, STEP_BYTES);
        _tile_dpbsud(3, 4, 7);
    }
    _tile_stored(0, found[0], bytes);
    if (panels == 1) return;
    _tile_stored(1, found[0] + FT_PANEL, bytes);
    _tile_stored(2, found[0] + 2 * FT_PANEL, bytes);
    _tile_stored(3, found[0] + 3 * FT_PANEL, bytes);
}

// The same of rows of 16 bits, of two panels from `first` on or of one: those of upper bytes, and of
// lower ones.
ALWAYS void multiply_split(const chunk *c, const int first, const int panels, int block,
                           tile_sums all_upper, tile_sums all_lower) {
    const char *const x = c->x + block * 2 * FT_BLOCK;
    const char *weight = c->weight + first * c->panel_stride + block * (FT_BLOCK / 4 * STEP_BYTES);
    int32_t *const upper = all_upper[0] + first * FT_PANEL, *const lower = all_lower[0] + first * FT_PANEL;
    const size_t bytes = sizeof(tile_sums) / TILE_ROWS, x_stride = (size_t)c->x_stride;
    const size_t stride = (size_t)c->panel_stride;
    _tile_zero(0);
    _tile_zero(2);
    if (panels > 1) {
        _tile_zero(1);
        _tile_zero(3);
    }
    for (int half = 0; half < 2; half++, weight += TILE_STEPS * STEP_BYTES) {
        _tile_loadd(4, x + half * STEP_BYTES, x_stride);
        _tile_loadd(6, weight, STEP_BYTES);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(5, x + FT_BLOCK + half * STEP_BYTES, x_stride);
        _tile_dpbsud(2, 5, 6);
        if (panels == 1) continue;
        fetch_part(c, block, first + half);
        _tile_loadd(7, weight + stride, STEP_BYTES);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, upper, bytes);
    _tile_stored(2, lower, bytes);
    if (panels == 1) return;
    _tile_stored(1, upper + FT_PANEL, bytes);
    _tile_stored(3, lower + FT_PANEL, bytes);
}

// The sums of `rows` rows from `row` on, out of what tiles found.
ALWAYS void end_rows(const chunk *given, const int x_bits, const int rows, const int panels, int row,
                     int block, tile_sums upper, tile_sums lower) {
    chunk c = *given;
    c.sums += row * SUM_STRIDE;
    c.x_scale += row * c.blocks;
    c.x_sum += row * c.parts;
    const place at = {0, block, 0, 0};
    group_inputs in;
    find_inputs(&c, 8, rows, block, block + 1, &in);
    whole_sums sum;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) {
            vi whole = vi_load(upper[row + r] + p * FT_PANEL);
            if (x_bits == 16) {
                const vi part = vi_load(lower[row + r] + p * FT_PANEL);
                whole = _mm512_add_epi32(_mm512_slli_epi32(whole, 8), part);
            }
            sum[r][p][0] = _mm512_add_epi32(whole, vi_set1(in.start[r][block]));
        }
    end_any_group(&c, 8, rows, panels, &at, &in, sum, 0);
}

ALWAYS void tiled_blocks(const chunk *c, const int x_bits, const int panels, int rows) {
    tile_sums upper, lower;
    configure_tiles(rows);
    for (int block = 0; block * FT_BLOCK < c->steps * 4; block++) {
        if (x_bits == 8) multiply_bytes(c, panels, block, upper);
        if (x_bits == 16) multiply_split(c, 0, panels == 1 ? 1 : 2, block, upper, lower);
        if (x_bits == 16 && panels > 1) multiply_split(c, 2, 2, block, upper, lower);
        for (int row = 0; row < TILE_ROWS; row += SPLIT_ROWS) {
            if (panels > 1) fetch_part(c, block, FETCH_PARTS / 2 + row / SPLIT_ROWS);
            if (row + SPLIT_ROWS <= rows)
                end_rows(c, x_bits, SPLIT_ROWS, panels, row, block, upper, lower);
            else
                for (int one = row; one < rows; one++)
                    end_rows(c, x_bits, 1, panels, one, block, upper, lower);
        }
    }
}

static void tiled_8_tile(const chunk *c, int rows) { tiled_blocks(c, 8, FT_TILE, rows); }

static void tiled_8_panel(const chunk *c, int rows) { tiled_blocks(c, 8, 1, rows); }

static void tiled_16_tile(const chunk *c, int rows) { tiled_blocks(c, 16, FT_TILE, rows); }

static void tiled_16_panel(const chunk *c, int rows) { tiled_blocks(c, 16, 1, rows); }
