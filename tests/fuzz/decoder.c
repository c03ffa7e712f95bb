// Random layers of two kinds on several spans, in buffers without a byte to spare.
//
// Built with sanitizers: a read or write beside a buffer ends the program. A span alone must have the
// bits that it has among others, and layers the same bits run in one call or in two. Arguments: number
// of rounds, seed.
#include "decoder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "helpers/making.h"

enum { KINDS = 2 };

typedef struct {
    const ft_decoder *decoder;
    ft_attention_shape *shapes[KINDS];
    const void *cos[KINDS], *sin[KINDS], *scales[KINDS];
    int64_t widths[KINDS];
    const ft_span *spans;
    const int32_t *pages;
    const int64_t *positions, *slots;
    const void *x, *beside;
    const char *inputs;
    int64_t layers, num_spans, rows, num_slots, width;
} problem;

// Run spans [first, first + count) in layers [0, cut) and then the rest; gives the stream.
static char *run(const problem *p, int64_t first, int64_t count, int32_t cut) {
    const ft_decoder *d = p->decoder;
    const size_t row = (size_t)d->hidden * item_bytes(d->type);
    const int32_t begin = p->spans[first].row;
    ft_span *spans = make_copy(p->spans + first, (size_t)count * sizeof *spans);
    int64_t rows = 0;
    for (int64_t i = 0; i < count; i++) spans[i].row -= begin, rows += spans[i].num_rows;
    void **kv = make_bytes((size_t)p->layers * sizeof *kv);
    for (int64_t i = 0; i < p->layers; i++) {
        const size_t bytes = (size_t)(p->num_slots * slot_bytes(p->shapes[d->layers[i].kind]));
        kv[i] = memset(make_bytes(bytes), 0, bytes);
    }
    ft_step_kind kinds[KINDS];
    for (int k = 0; k < KINDS; k++) {
        const int64_t units = ft_attention_plan(p->shapes[k], spans, (int32_t)count, NULL, 0);
        ft_attention_unit *all = make_bytes((size_t)units * sizeof *all);
        ft_attention_plan(p->shapes[k], spans, (int32_t)count, all, units);
        kinds[k] = (ft_step_kind){.attention = {.shape = p->shapes[k], .spans = spans,
                                                .pages = p->pages, .num_spans = (int32_t)count},
                                  .units = all, .num_units = units, .cos = p->cos[k],
                                  .sin = p->sin[k], .query_scale = p->scales[k],
                                  .width = p->widths[k], .kv_stride = slot_numbers(p->shapes[k])};
    }
    char *x = make_copy((const char *)p->x + (size_t)begin * row, (size_t)rows * row);
    void *beside = p->beside ? make_copy((const char *)p->beside + (size_t)begin * row, (size_t)rows * row)
                             : NULL;
    const size_t given = (size_t)(p->layers * p->width) * item_bytes(d->type);
    const ft_step step = {.x = x, .beside = beside, .rows = rows, .inputs_stride = p->layers * p->width,
                          .inputs = make_copy(p->inputs + (size_t)begin * given, (size_t)rows * given),
                          .kv = kv, .kinds = kinds,
                          .positions = make_copy(p->positions + begin, (size_t)rows * sizeof(int64_t)),
                          .slots = make_copy(p->slots + begin, (size_t)rows * sizeof(int64_t))};
    ft_decoder_run(d, &step, 0, cut);
    ft_decoder_run(d, &step, cut, (int32_t)p->layers);
    return x;
}

static problem make_problem(void) {
    const int type = pick(0, 1), kv_type = pick(0, 2) ? type : FT_INT8, size = pick(1, 20);
    const int beside = !pick(0, 3);
    const int64_t hidden = pick(0, 1) ? 32 * pick(1, 3) : pick(1, 90);
    problem p = {.layers = pick(1, 4), .num_spans = pick(1, 4), .width = pick(0, 1) ? pick(1, 40) : 0};
    for (int k = 0; k < KINDS; k++) p.shapes[k] = make_shape(type, kv_type, size);
    p.decoder = make_decoder(p.shapes, KINDS, hidden, p.layers, beside, p.width);
    ft_span *spans = make_bytes((size_t)p.num_spans * sizeof *spans);
    int64_t most = 0;
    for (int64_t i = 0; i < p.num_spans; i++) {
        spans[i] = (ft_span){.row = (int32_t)p.rows, .num_rows = pick(1, pick(0, 4) ? 6 : 60),
                             .start = pick(0, 40), .paths = -1};
        p.rows += spans[i].num_rows;
        if (spans[i].start + spans[i].num_rows > most) most = spans[i].start + spans[i].num_rows;
    }
    const int64_t each = (most + size - 1) / size, pages = each * p.num_spans;
    int32_t *table = make_bytes((size_t)pages * sizeof *table);
    for (int64_t i = 0; i < pages; i++) table[i] = (int32_t)(pages - 1 - i);
    int64_t *positions = make_bytes((size_t)p.rows * sizeof *positions);
    int64_t *slots = make_bytes((size_t)p.rows * sizeof *slots);
    for (int64_t i = 0; i < p.num_spans; i++) {
        spans[i].pages = (int32_t)(i * each);
        for (int64_t t = 0; t < spans[i].num_rows; t++) {
            const int64_t at = spans[i].start + t;
            positions[spans[i].row + t] = at;
            slots[spans[i].row + t] = table[i * each + at / size] * (int64_t)size + at % size;
        }
    }
    for (int k = 0; k < KINDS; k++) {
        p.widths[k] = 2 * pick(1, p.shapes[k]->head_dim / 2);
        p.cos[k] = make_numbers(type, most * p.widths[k], 1.0f);
        p.sin[k] = make_numbers(type, most * p.widths[k], 1.0f);
        p.scales[k] = pick(0, 2) ? NULL : make_numbers(type, most, 1.0f);
    }
    p.spans = spans, p.pages = table, p.positions = positions, p.slots = slots;
    p.num_slots = pages * size;
    p.inputs = make_numbers(type, p.rows * p.layers * p.width, 1.0f);
    p.x = make_numbers(type, p.rows * hidden, 1.0f);
    p.beside = beside ? make_numbers(type, p.rows * hidden, 1.0f) : NULL;
    return p;
}

static void one(void) {
    const problem p = make_problem();
    const size_t row = (size_t)p.decoder->hidden * item_bytes(p.decoder->type);
    const char *whole = run(&p, 0, p.num_spans, (int32_t)p.layers);
    const char *cut = run(&p, 0, p.num_spans, pick(0, (int)p.layers));
    same_bytes(whole, cut, (size_t)p.rows * row, "layers in two calls");
    for (int64_t i = 0; i < p.num_spans; i++)
        same_bytes(run(&p, i, 1, (int32_t)p.layers), whole + (size_t)p.spans[i].row * row,
                   (size_t)p.spans[i].num_rows * row, "a span that depends on the others");
}

int main(int count, char **arguments) {
    return at_every_level("decoder", count, arguments, one);
}
