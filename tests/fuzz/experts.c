// Random mixtures of experts on random rows, in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. A row alone must have the
// bits that it has among others. Arguments: number of rounds, seed.
#include "experts.h"

#include "helpers/making.h"

// Rows [first, first + rows) in one call, or in two halves.
static char *run(const ft_experts *e, const char *x, const char *by, const char *residual, int64_t first,
                 int64_t rows, int halves) {
    const size_t item = item_bytes(e->type), row = (size_t)e->hidden * item, bytes = (size_t)rows * row;
    int64_t distinct = 0;
    ft_experts_rows call = {.x = make_copy(x + (size_t)first * row, bytes), .rows = rows, .distinct = &distinct,
                            .by = by ? make_copy(by + (size_t)first * row, bytes) : NULL};
    char *y = call.y = make_bytes(bytes);
    call.residual = make_copy(residual + (size_t)first * row, bytes);
    if (halves) {
        call.half = FT_TO_GATED;
        call.routes = make_bytes((size_t)(rows * (e->chosen + 1)) * sizeof(int64_t));
        call.gated = make_bytes((size_t)(rows * e->chosen * e->inner) * item);
        call.shared = make_bytes((size_t)(rows * e->shared_inner) * item);
        ft_experts_run(e, &call);
        call.x = call.by = call.distinct = NULL;
        call.half = FT_FROM_GATED;
    }
    ft_experts_run(e, &call);
    wanted(distinct >= e->chosen && distinct <= e->experts, "experts that were read");
    return y;
}

static void one(void) {
    const int type = pick(0, 1);
    const ft_experts e = *make_experts(type, 32 * pick(1, 4));
    const int64_t rows = pick(1, pick(0, 3) ? 9 : 80);
    const size_t row = (size_t)e.hidden * item_bytes(type);
    const char *x = make_numbers(type, rows * e.hidden, 1.0f);
    const char *by = pick(0, 1) ? make_numbers(type, rows * e.hidden, 1.0f) : NULL;
    const char *residual = make_numbers(type, rows * e.hidden, 1.0f);
    const char *whole = run(&e, x, by, residual, 0, rows, 0);
    for (int64_t i = 0; i < rows; i++)
        same_bytes(run(&e, x, by, residual, i, 1, 0), whole + (size_t)i * row, row, "a row that depends on the others");
    same_bytes(run(&e, x, by, residual, 0, rows, 1), whole, (size_t)rows * row, "rows in two halves");
}

int main(int count, char **arguments) { return at_every_level("experts", count, arguments, one); }
