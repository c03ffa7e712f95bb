// See packing.h.
#include "packing.h"

#include <string.h>

enum { PANEL = 16 };

static uint32_t unit_at(const char *row, int64_t unit, int halves) {
    uint32_t found[2];
    if (!halves) {
        memcpy(found, row + 4 * unit, 4);
        return *found;
    }
    memcpy(found, row + 8 * unit, 8);
    return (found[0] & 0x0f0f0f0f) | (found[1] & 0x0f0f0f0f) << 4;
}

static void pack_panel(void *context, int64_t panel, int worker) {
    (void)worker;
    const ft_panel_rows *const c = context;
    const char *const rows = (const char *)c->rows + panel * PANEL * c->row_bytes;
    uint32_t *const to = (uint32_t *)c->packed + panel * c->units * PANEL;
    const int64_t left = c->outputs - panel * PANEL;
    const int count = left < PANEL ? (int)left : PANEL;
    for (int64_t unit = 0; unit < c->units; unit++) {
        uint32_t *const at = to + unit * PANEL;
        for (int lane = 0; lane < count; lane++)
            at[lane] = unit_at(rows + lane * c->row_bytes, unit, c->halves) ^ c->flip;
        for (int lane = count; lane < PANEL; lane++) at[lane] = c->flip;
    }
}

void ft_pack_rows(const ft_panel_rows *call) {
    ft_parallel(pack_panel, (void *)call, (call->outputs + PANEL - 1) / PANEL);
}
