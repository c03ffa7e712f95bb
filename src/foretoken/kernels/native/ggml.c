// Reads blocks as GGUF files have them, and packs them in panels; see ggml.h.
#include "ggml.h"

#include <string.h>

#include "scalar.h"

enum { PANEL = 16 };

const uint8_t ft_tables[FT_FRONTS][16] = {
    // IQ4's values (llama.cpp's kvalues_iq4nl), + 128.
    [FT_IQ4] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    // Twice the values of FP4 (OCP Microscaling Formats 1.0, E2M1), + 12.
    [FT_FP4] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
};

int ft_find_ggml_kind(int32_t type, ft_ggml_kind *kind) {
    static const struct {
        int32_t type;
        ft_ggml_kind kind;
    } all[] = {
        {FT_Q4_1, {FT_BITS4, FT_HALVES | FT_MINIMA, 32, 20}},
        {FT_Q5_0, {FT_BITS5, FT_HALVES, 32, 22}},
        {FT_Q5_1, {FT_BITS5, FT_HALVES | FT_MINIMA, 32, 24}},
        {FT_Q2_K, {FT_SHORT4, FT_BYTES | FT_MINIMA, 256, 84}},
        {FT_Q3_K, {FT_SHORT4, FT_BYTES, 256, 110}},
        {FT_Q4_K, {FT_BITS4, FT_BYTES | FT_MINIMA, 256, 144}},
        {FT_Q5_K, {FT_BITS5, FT_BYTES | FT_MINIMA, 256, 176}},
        {FT_Q6_K, {FT_BITS6, FT_BYTES, 256, 210}},
        {FT_IQ4_NL, {FT_IQ4, FT_HALVES, 32, 18}},
        {FT_IQ4_XS, {FT_IQ4, FT_BYTES, 256, 136}},
        {FT_MXFP4, {FT_FP4, FT_POWERS, 32, 17}},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].type == type) {
            *kind = all[i].kind;
            return 1;
        }
    return 0;
}

// One block as it was read: of 32 inputs, or of 256.
typedef struct {
    uint8_t values[FT_MOST_UNIT];
    // Of each group: halves, or bytes that the upper ones are times.
    uint16_t scale[FT_MOST_UNIT / 16], minimum[FT_MOST_UNIT / 16];
    uint16_t upper, upper_minimum;
} block;

static uint16_t half_at(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

static uint32_t four(const uint8_t *at) {
    uint32_t bytes;
    memcpy(&bytes, at, 4);
    return bytes;
}

// Nibbles of 32 inputs: low halves of the 16 bytes, then high ones.
static void read_nibbles(const uint8_t *at, uint8_t *values) {
    for (int i = 0; i < 16; i++) {
        values[i] = at[i] & 15;
        values[16 + i] = at[i] >> 4;
    }
}

// Bits that 32 inputs have above their nibbles.
static void read_fifth_bits(const uint8_t *at, uint8_t *values) {
    for (int k = 0; k < 8; k++) {
        // Four bits, each into a byte of its own.
        const uint32_t bits = at[k / 2] >> 4 * (k % 2) & 15;
        const uint32_t there = four(values + 4 * k) | (bits * 0x00204081u & 0x01010101) << 4;
        memcpy(values + 4 * k, &there, 4);
    }
}

// Eight scales and minima of six bits each, in twelve bytes.
static void read_sixes(const uint8_t *at, block *b) {
    for (int i = 0; i < 4; i++) {
        b->scale[i] = at[i] & 63;
        b->minimum[i] = at[4 + i] & 63;
        b->scale[4 + i] = (uint16_t)((at[8 + i] & 15) | at[i] >> 6 << 4);
        b->minimum[4 + i] = (uint16_t)(at[8 + i] >> 4 | at[4 + i] >> 6 << 4);
    }
}

// Nibbles of 256 inputs: of each 64, low halves of 32 bytes, then high ones.
static void read_long_nibbles(const uint8_t *at, uint8_t *values) {
    for (int part = 0; part < 4; part++, at += 32, values += 64)
        for (int i = 0; i < 32; i++) {
            values[i] = at[i] & 15;
            values[32 + i] = at[i] >> 4;
        }
}

static void read_q4_k(const uint8_t *at, block *b) {
    b->upper = half_at(at);
    b->upper_minimum = half_at(at + 2);
    read_sixes(at + 4, b);
    read_long_nibbles(at + 16, b->values);
}

static void read_q5_k(const uint8_t *at, block *b) {
    b->upper = half_at(at);
    b->upper_minimum = half_at(at + 2);
    read_sixes(at + 4, b);
    read_long_nibbles(at + 48, b->values);
    for (int group = 0; group < 8; group++)
        for (int i = 0; i < 32; i++)
            b->values[group * 32 + i] |= (uint8_t)((at[16 + i] >> group & 1) << 4);
}

static void read_q6_k(const uint8_t *at, block *b) {
    const uint8_t *low = at, *high = at + 128, *scale = at + 192;
    for (int part = 0; part < 2; part++, low += 64, high += 32) {
        uint8_t *const to = b->values + part * 128;
        for (int i = 0; i < 32; i++) {
            to[i] = (uint8_t)((low[i] & 15) | (high[i] & 3) << 4);
            to[32 + i] = (uint8_t)((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
            to[64 + i] = (uint8_t)(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
            to[96 + i] = (uint8_t)(low[32 + i] >> 4 | high[i] >> 6 << 4);
        }
    }
    for (int i = 0; i < 16; i++) b->scale[i] = scale[i];
    b->upper = half_at(at + 208);
}

static void read_q2_k(const uint8_t *at, block *b) {
    const uint8_t *low = at + 16;
    for (int i = 0; i < 16; i++) {
        b->scale[i] = at[i] & 15;
        b->minimum[i] = at[i] >> 4;
    }
    for (int part = 0; part < 2; part++, low += 32)
        for (int field = 0; field < 4; field++)
            for (int i = 0; i < 32; i++)
                b->values[part * 128 + field * 32 + i] = low[i] >> 2 * field & 3;
    b->upper = half_at(at + 80);
    b->upper_minimum = half_at(at + 82);
}

// Values -4 to 3 become 4 to 11, so that they have the middle of all nibbles.
static void read_q3_k(const uint8_t *at, block *b) {
    const uint8_t *const high = at, *low = at + 32, *const scale = at + 96;
    for (int part = 0; part < 2; part++, low += 32)
        for (int field = 0; field < 4; field++)
            for (int i = 0; i < 32; i++) {
                const int bit = high[i] >> (part * 4 + field) & 1;
                b->values[part * 128 + field * 32 + i] = (uint8_t)((low[i] >> 2 * field & 3) + 4 * bit + 4);
            }
    for (int i = 0; i < 16; i++) {
        const int four = i < 8 ? scale[i] & 15 : scale[i - 8] >> 4;
        const int two = scale[8 + i % 4] >> 2 * (i / 4) & 3;
        b->scale[i] = (uint8_t)((four | two << 4) - 32);
    }
    b->upper = half_at(at + 108);
}

static void read_iq4_xs(const uint8_t *at, block *b) {
    b->upper = half_at(at);
    const uint16_t high = half_at(at + 2);
    for (int i = 0; i < 8; i++) {
        const int low = at[4 + i / 2] >> 4 * (i % 2) & 15;
        b->scale[i] = (uint8_t)((low | (high >> 2 * i & 3) << 4) - 32);
        read_nibbles(at + 8 + 16 * i, b->values + 32 * i);
    }
}

static void read_block(int32_t type, const uint8_t *at, block *b) {
    switch (type) {
        case FT_Q4_1:
            b->scale[0] = half_at(at);
            b->minimum[0] = half_at(at + 2) ^ 0x8000;  // the file's is added
            read_nibbles(at + 4, b->values);
            break;
        case FT_Q5_0:
            b->scale[0] = half_at(at);
            read_nibbles(at + 6, b->values);
            read_fifth_bits(at + 2, b->values);
            break;
        case FT_Q5_1:
            b->scale[0] = half_at(at);
            b->minimum[0] = half_at(at + 2) ^ 0x8000;
            read_nibbles(at + 8, b->values);
            read_fifth_bits(at + 4, b->values);
            break;
        case FT_IQ4_NL:
            b->scale[0] = half_at(at);
            read_nibbles(at + 2, b->values);
            break;
        case FT_MXFP4:
            b->scale[0] = at[0];
            read_nibbles(at + 1, b->values);
            break;
        case FT_Q2_K: read_q2_k(at, b); break;
        case FT_Q3_K: read_q3_k(at, b); break;
        case FT_Q4_K: read_q4_k(at, b); break;
        case FT_Q5_K: read_q5_k(at, b); break;
        case FT_Q6_K: read_q6_k(at, b); break;
        default: read_iq4_xs(at, b); break;
    }
}

// The values of a step into its output's place, four bytes at a time.
static void put_values(int front, const uint8_t *values, uint8_t *to) {
    for (int eight = 0; eight < 4; eight++) {
        const uint32_t low = four(values + 8 * eight), high = four(values + 8 * eight + 4);
        const uint32_t both = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
        memcpy(to + 64 * eight, &both, 4);
    }
    if (front == FT_BITS5) {
        uint32_t bits = 0;
        for (int k = 0; k < 8; k++) bits |= (four(values + 4 * k) >> 4 & 0x01010101) << k;
        memcpy(to + 256, &bits, 4);
    }
    if (front == FT_BITS6)
        for (int plane = 0; plane < 2; plane++) {
            uint32_t bits = 0;
            for (int k = 0; k < 4; k++)
                bits |= (four(values + 16 * plane + 4 * k) >> 4 & 0x03030303) << 2 * k;
            memcpy(to + 256 + 64 * plane, &bits, 4);
        }
}

void ft_take_values(int front, const uint8_t *from, uint8_t *values) {
    for (int eight = 0; eight < 4; eight++) {
        const uint32_t both = four(from + 64 * eight);
        const uint32_t halves[2] = {both & 0x0f0f0f0f, both >> 4 & 0x0f0f0f0f};
        memcpy(values + 8 * eight, halves, 8);
    }
    for (int k = 0; k < 8 && (front == FT_BITS5 || front == FT_BITS6); k++) {
        const uint32_t plane = four(from + 256 + (front == FT_BITS6 ? k / 4 * 64 : 0));
        const uint32_t bits = front == FT_BITS5 ? plane >> k & 0x01010101 : plane >> 2 * (k % 4) & 0x03030303;
        const uint32_t there = four(values + 4 * k) | bits << 4;
        memcpy(values + 4 * k, &there, 4);
    }
}

// The number of output `lane` among 16.
static float number_at(int form, const uint8_t *numbers, int lane) {
    if ((form & 3) == FT_HALVES) return half_to_float(half_at(numbers + 2 * lane));
    if ((form & 3) == FT_POWERS) return power_of_two(numbers[lane]);
    return (float)(int8_t)numbers[lane];
}

void ft_ggml_floats(int front, int form, const ft_ggml_step *step, int lane, float *to) {
    const int minima = form & FT_MINIMA ? 1 : 0, middle = ft_middle(front, form), group = ft_front_group(front);
    const int width = PANEL * ((form & 3) == FT_HALVES ? 2 : 1);
    uint8_t values[FT_STEP];
    ft_take_values(front, step->values + 4 * lane, values);
    if (front == FT_IQ4 || front == FT_FP4)
        for (int i = 0; i < FT_STEP; i++) values[i] = ft_tables[front][values[i]];
    float upper = 1.0f, upper_minimum = 1.0f;
    if (ft_upper_bytes(form)) {
        upper = half_to_float(half_at(step->upper + 2 * lane));
        if (minima) upper_minimum = half_to_float(half_at(step->upper + 2 * (PANEL + lane)));
    }
    for (int first = 0; first < FT_STEP; first += group) {
        const uint8_t *const at = step->numbers + first / group * (1 + minima) * width;
        const float scale = number_at(form, at, lane) * upper;
        const float minimum = minima ? number_at(form, at + width, lane) * upper_minimum : 0.0f;
        for (int i = first; i < first + group; i++) {
            const float product = (float)(values[i] - middle) * scale;
            to[i] = minima ? product - minimum : product;
        }
    }
}

static void put_number(int halves, uint8_t *to, int index, uint16_t number) {
    if (halves)
        memcpy(to + 2 * index, &number, 2);
    else
        to[index] = (uint8_t)number;
}

// Scales of a step's groups into the places of output `lane`, and minima behind them.
static void put_numbers(const ft_ggml_kind *kind, const block *b, int first, int lane, uint8_t *to) {
    const int halves = (kind->form & 3) == FT_HALVES, minima = kind->form & FT_MINIMA ? 1 : 0;
    for (int i = 0; i < FT_STEP / ft_front_group(kind->front); i++) {
        const int at = i * (1 + minima) * PANEL + lane;
        put_number(halves, to, at, b->scale[first + i]);
        if (minima) put_number(halves, to, at + PANEL, b->minimum[first + i]);
    }
}

typedef struct {
    const ft_ggml_matrix *matrix;
    ft_ggml_kind kind;
} packing;

// The block that input `input` of the packed matrix comes from, and where in it.
static int64_t source_of(const ft_ggml_matrix *m, int64_t input) {
    if (!m->columns) return input;
    return (int64_t)m->columns[input / m->width] * m->width + input % m->width;
}

static void pack_output(const packing *p, int64_t output) {
    const ft_ggml_matrix *m = p->matrix;
    const ft_ggml_kind *kind = &p->kind;
    const uint8_t *const row = m->rows[output];
    const int64_t steps = m->inputs / FT_STEP, panel = output / PANEL;
    const int lane = (int)(output % PANEL);
    const int step_bytes = ft_front_bytes(kind->front);
    const int number_bytes = ft_number_bytes(kind->front, kind->form);
    const int upper_bytes = ft_upper_bytes(kind->form);
    int64_t at_block = -1;
    block b;
    for (int64_t step = 0; step < steps; step++) {
        const int64_t from = source_of(m, step * FT_STEP), which = from / kind->unit;
        const int inside = (int)(from % kind->unit);
        if (which != at_block) {
            read_block(m->type, row + which * kind->block_bytes, &b);
            at_block = which;
        }
        const int64_t place = panel * steps + step;
        put_values(kind->front, b.values + inside, (uint8_t *)m->values + place * step_bytes + 4 * lane);
        put_numbers(kind, &b, inside / ft_front_group(kind->front), lane, (uint8_t *)m->numbers + place * number_bytes);
        if (!upper_bytes || step * FT_STEP % m->unit) continue;
        const int64_t unit = (panel * m->inputs + step * FT_STEP) / m->unit;
        uint8_t *const upper = (uint8_t *)m->upper + unit * upper_bytes;
        put_number(1, upper, lane, b.upper);
        if (kind->form & FT_MINIMA) put_number(1, upper, PANEL + lane, b.upper_minimum);
    }
}

static void pack_panel(void *context, int64_t panel, int worker) {
    (void)worker;
    const packing *p = context;
    const int64_t end = (panel + 1) * PANEL, outputs = p->matrix->outputs;
    for (int64_t output = panel * PANEL; output < end && output < outputs; output++) pack_output(p, output);
}

int ft_pack_ggml(const ft_ggml_matrix *matrix) {
    packing p = {.matrix = matrix};
    if (!ft_find_ggml_kind(matrix->type, &p.kind)) return 0;
    ft_parallel(pack_panel, &p, (matrix->outputs + PANEL - 1) / PANEL);
    return 1;
}

// Where blocks have 16-bit floats: one or two places.
static int find_floats(int32_t type, int places[2]) {
    switch (type) {
        case FT_Q2_K: places[0] = 80, places[1] = 82; return 2;
        case FT_Q3_K: places[0] = 108; return 1;
        case FT_Q6_K: places[0] = 208; return 1;
        case FT_Q4_1: case FT_Q5_1: case FT_Q4_K: case FT_Q5_K: places[0] = 0, places[1] = 2; return 2;
        default: places[0] = 0; return 1;
    }
}

typedef struct {
    const ft_ggml_matrix *matrix;
    ft_ggml_kind kind;
    int64_t found;
} search;

static void count_strange(void *context, int64_t panel, int worker) {
    (void)worker;
    search *s = context;
    const ft_ggml_matrix *m = s->matrix;
    const int64_t blocks = m->inputs / s->kind.unit, end = (panel + 1) * PANEL;
    int places[2];
    const int floats = find_floats(m->type, places), powers = s->kind.form == FT_POWERS;
    int64_t found = 0;
    for (int64_t output = panel * PANEL; output < end && output < m->outputs; output++) {
        const uint8_t *at = m->rows[output];
        for (int64_t i = 0; i < blocks; i++, at += s->kind.block_bytes)
            for (int j = 0; j < floats; j++)
                found += powers ? *at == 255 : (half_at(at + places[j]) & 0x7c00) == 0x7c00;
    }
    if (found) __atomic_fetch_add(&s->found, found, __ATOMIC_RELAXED);
}

int64_t ft_strange_ggml(const ft_ggml_matrix *matrix) {
    search s = {.matrix = matrix};
    if (!ft_find_ggml_kind(matrix->type, &s.kind)) return -1;
    ft_parallel(count_strange, &s, (matrix->outputs + PANEL - 1) / PANEL);
    return s.found;
}
