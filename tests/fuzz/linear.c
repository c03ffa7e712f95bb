// Random layers, rows and strides through the linear kernels, built with sanitizers.
//
// Every buffer is exactly as large as it has to be. Rows alone must have the bits of rows together,
// float32 results be close to sums in double precision, and, for integer weights, every instruction
// set must give the same bits. AMX's kernels take part with emulated tiles, whose bfloat16 sums must
// have the bits that the tiles' order gives. Arguments: number of rounds, seed.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "helpers/emulated_amx.h"
#include "linear.h"
#include "packing.h"

enum { EMULATED = FT_AMX + 1 };

static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % below);
}

static float number(void) { return (float)((int)draw(2001) - 1000) / 1000.0f; }

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float of_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static void *memory(size_t bytes) {
    void *start = malloc(bytes ? bytes : 1);
    if (!start) abort();
    return start;
}

static float *numbers(int64_t count, float most) {
    float *all = memory((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) all[i] = number() * most;
    return all;
}

// A layer, and its matrix [outputs padded][inputs] in the order of the panels.
typedef struct {
    ft_linear layer;
    float *matrix;
    int64_t padded_outputs;
} example;

static void set_weight(char *weight, const ft_linear *l, int64_t panel, int64_t k, int n, float *is) {
    const int64_t padded = ft_padded_inputs(l);
    if (l->weight_type == FT_WEIGHT_FLOAT32) {
        ((float *)weight)[(panel * padded + k) * 16 + n] = *is = number();
    } else if (l->weight_type == FT_WEIGHT_BFLOAT16) {
        const uint16_t value = to_bf16(number());
        ((uint16_t *)weight)[(panel * (padded / 2) + k / 2) * 32 + n * 2 + k % 2] = value;
        *is = of_bf16(value);
    } else if (l->weight_type == FT_WEIGHT_INT8) {
        const int value = (int)draw(256) - 128;
        weight[(panel * (padded / 4) + k / 4) * 64 + n * 4 + k % 4] = (char)(value + 128);
        *is = (float)value;
    } else {
        const int value = (int)draw(16), half = k % 8 >= 4;
        char *at = weight + (panel * (padded / 8) + k / 8) * 64 + n * 4 + k % 4;
        *at = (char)(half ? (*at & 15) | value << 4 : (*at & ~15) | value);
        *is = (float)value;
    }
}

// The bits of a float16 below 2^(exponents - 7) in size, below its normal numbers too.
static uint16_t half_bits(uint32_t exponents) {
    const uint32_t exponent = draw(8) ? 8 + draw(exponents) : 0;
    return (uint16_t)(draw(2) << 15 | exponent << 10 | draw(1024));
}

static double of_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, part = bits & 1023;
    const double size = exponent ? ldexp(1024 + part, exponent - 25) : ldexp(part, -24);
    return bits >> 15 ? -size : size;
}

// Scales or zero points as the layer has them: `values`, or halves, which `values` are then made of.
static void *of_groups(const ft_linear *l, float *values, int64_t count, uint32_t exponents) {
    if (!l->halves) return values;
    uint16_t *halves = memory((size_t)count * 2);
    for (int64_t i = 0; i < count; i++) {
        halves[i] = half_bits(exponents);
        values[i] = (float)of_half(halves[i]);
    }
    return halves;
}

static example make(void) {
    static const int bits[] = {32, 16, 8, 4};
    example e = {.layer = {.weight_type = (int)draw(4), .gated = draw(4) == 0}};
    ft_linear *l = &e.layer;
    const int wide = draw(6) == 0;
    // Many outputs: several tiles share the inputs of many rows.
    const int many = draw(10) == 0;
    l->inputs = 1 + draw(many ? 300 : wide ? 700 : 150);
    if (draw(3) == 0) l->inputs = ft_round_up(l->inputs, FT_BLOCK);
    l->outputs = (1 + draw(many ? 1100 : wide ? 60 : 140)) * (l->gated ? 2 : 1);
    l->x_type = l->weight_type == FT_WEIGHT_FLOAT32 ? FT_FLOAT32 : (int)draw(2);
    l->y_type = (int)draw(2);
    l->x_bits = draw(2) ? 8 : 16;
    if (l->weight_type == FT_WEIGHT_INT4 || (l->weight_type == FT_WEIGHT_INT8 && draw(2))) {
        l->group = 32 << draw(3);
        l->inputs = ft_round_up(l->inputs, l->group);
        l->halves = (int)draw(2);
    }
    const int64_t padded = ft_padded_inputs(l), panels = ft_panels(l);
    const int64_t groups = l->group ? padded / l->group : 1;
    e.padded_outputs = panels * FT_PANEL;
    char *weight = memory((size_t)(e.padded_outputs * padded * bits[l->weight_type] / 8));
    memset(weight, 0, (size_t)(e.padded_outputs * padded * bits[l->weight_type] / 8));
    e.matrix = memory((size_t)(e.padded_outputs * l->inputs) * 4);
    // Scales that make dequantized weights about 1 in size, like the others.
    const float steps = l->weight_type == FT_WEIGHT_INT8 ? 128 : 12;
    const int64_t count = e.padded_outputs * groups;
    float *scale = NULL, *zero = NULL;
    if (l->weight_type >= FT_WEIGHT_INT8) {
        scale = numbers(count, 1 / steps);
        l->scale = of_groups(l, scale, count, 5);
    }
    if (l->weight_type == FT_WEIGHT_INT4 && draw(2)) {
        zero = numbers(count, 9);
        l->zero = of_groups(l, zero, count, 10);
    }
    if (draw(2)) l->bias = numbers(e.padded_outputs, 1);
    if (draw(4) == 0) l->norm = numbers(l->inputs, 1), l->norm_eps = 1e-5f;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < l->inputs; k++)
            for (int n = 0; n < FT_PANEL; n++) {
                const int64_t output = panel * FT_PANEL + n;
                float *is = e.matrix + output * l->inputs + k;
                set_weight(weight, l, panel, k, n, is);
                if (l->weight_type < FT_WEIGHT_INT8) continue;
                const int64_t group = l->group ? k / l->group : 0;
                const int64_t at = (panel * groups + group) * FT_PANEL + n;
                const float middle = l->weight_type == FT_WEIGHT_INT8 ? 0 : zero ? zero[at] : 8;
                *is = (*is - middle) * scale[at];
            }
    if (l->halves) free(scale), free(zero);
    l->weight = weight;
    return e;
}

static void *copy_rows(const float *values, int type, int64_t count) {
    void *rows = memory((size_t)count * (type == FT_BFLOAT16 ? 2 : 4));
    for (int64_t i = 0; i < count; i++)
        if (type == FT_BFLOAT16)
            ((uint16_t *)rows)[i] = to_bf16(values[i]);
        else
            ((float *)rows)[i] = values[i];
    return rows;
}

static double at(const void *rows, int type, int64_t index) {
    return type == FT_BFLOAT16 ? of_bf16(((const uint16_t *)rows)[index])
                               : ((const float *)rows)[index];
}

static double output_of(const example *e, const double *x, int64_t output) {
    double sum = e->layer.bias ? e->layer.bias[output] : 0;
    for (int64_t k = 0; k < e->layer.inputs; k++)
        sum += e->matrix[output * e->layer.inputs + k] * x[k];
    return sum;
}

// How far rounded activations may bring an output from what it would be: six times the deviation. Each
// is off by up to half a step, evenly. Steps of 8 bits are no larger than the largest activation / 127;
// of what a norm leaves as bfloat16, than the activation / 128.
static double rounding_of(const example *e, const double *x, int64_t output) {
    const ft_linear *l = &e->layer;
    double peak = 0, squares = 0, products = 0;
    for (int64_t k = 0; k < l->inputs; k++) {
        const double weight = e->matrix[output * l->inputs + k];
        peak = fmax(peak, fabs(x[k]));
        squares += weight * weight, products += weight * weight * x[k] * x[k];
    }
    const int bytes = l->weight_type >= FT_WEIGHT_INT8 && l->x_bits == 8;
    const int rounded = l->norm && l->x_type == FT_BFLOAT16;
    const double wide = bytes ? peak * peak * squares / (127 * 127) : 0;
    return 6 * sqrt((wide + (rounded ? products / (128 * 128) : 0)) / 12);
}

static void check_row(const example *e, const ft_linear_rows *rows, int64_t row, double *x) {
    const ft_linear *l = &e->layer;
    const int64_t columns = l->gated ? l->outputs / 2 : l->outputs;
    double squares = 0;
    for (int64_t k = 0; k < l->inputs; k++) {
        x[k] = at(rows->x, l->x_type, row * rows->x_stride + k);
        squares += x[k] * x[k];
    }
    const double factor = 1 / sqrt(squares / (double)l->inputs + l->norm_eps);
    for (int64_t k = 0; k < l->inputs && l->norm; k++) x[k] *= factor * l->norm[k];
    for (int64_t column = 0; column < columns; column++) {
        const int64_t panel = column / FT_PANEL, n = column % FT_PANEL;
        const int64_t output = l->gated ? panel * 2 * FT_PANEL + n : column, up = output + FT_PANEL;
        double y = output_of(e, x, output);
        // Rounding of rows and results; sums of up to some hundred terms of about 1 each.
        double room = 0.02 * sqrt((double)l->inputs) * (l->gated ? 30 : 4), rounding = rounding_of(e, x, output);
        if (l->gated) {
            const double other = output_of(e, x, up), gate = y / (1 + exp(-y));
            rounding = fabs(gate) * rounding_of(e, x, up) + 1.1 * fabs(other) * rounding;
            y = gate * other;
        }
        if (rows->residual)
            y += at(rows->residual, l->y_type, row * rows->residual_stride + column);
        const double found = at(rows->y, l->y_type, row * rows->y_stride + column);
        room += 0.02 * fabs(y) + rounding;
        if (!(fabs(found - y) <= room)) {
            printf("row %ld column %ld: %g, expected %g; type %d group %d %ld x %ld\n", (long)row,
                   (long)column, found, y, l->weight_type, l->group, (long)l->outputs,
                   (long)l->inputs);
            exit(1);
        }
    }
}

// The order of tiles: of every 32 inputs even and odd products by themselves, then both to the sum.
static float tiled_sum(const example *e, const ft_linear_rows *rows, int64_t row, int64_t output) {
    const ft_linear *l = &e->layer;
    float sum = 0;
    for (int64_t start = 0; start < l->inputs; start += 32) {
        float part[2] = {0, 0};
        for (int64_t k = start; k < start + 32 && k < l->inputs; k++) {
            const double x = at(rows->x, l->x_type, row * rows->x_stride + k);
            part[k % 2] += of_bf16(to_bf16((float)x)) * e->matrix[output * l->inputs + k];
        }
        sum += part[0] + part[1];
    }
    return l->bias ? sum + l->bias[output] : sum;
}

static void check_tiled(const example *e, const ft_linear_rows *rows, int64_t row) {
    for (int64_t output = 0; output < e->layer.outputs; output++) {
        const float wanted = tiled_sum(e, rows, row, output);
        if (((const float *)rows->y)[row * rows->y_stride + output] == wanted) continue;
        printf("row %ld output %ld is not in the order of tiles\n", (long)row, (long)output);
        exit(1);
    }
}

static void call(const example *e, const ft_linear_rows *rows, int level) {
    if (level == EMULATED)
        run_emulated(&e->layer, rows);
    else
        ft_linear_run(&e->layer, rows);
}

// Bytes of all results at this level, rows together or alone.
static void run(const example *e, const ft_linear_rows *rows, int level, int alone) {
    const int x_bytes = e->layer.x_type == FT_BFLOAT16 ? 2 : 4;
    const int y_bytes = e->layer.y_type == FT_BFLOAT16 ? 2 : 4;
    ft_set_level(level);
    ft_set_fetches_near((int)draw(2));
    if (!alone) {
        call(e, rows, level);
        return;
    }
    for (int64_t row = 0; row < rows->rows; row++) {
        ft_linear_rows one = *rows;
        one.rows = 1;
        one.x = (const char *)rows->x + row * rows->x_stride * x_bytes;
        one.y = (char *)rows->y + row * rows->y_stride * y_bytes;
        if (rows->residual)
            one.residual = (const char *)rows->residual + row * rows->residual_stride * y_bytes;
        call(e, &one, level);
    }
}

// Rows in panels: every unit where linear.h wants it, and zeros behind the last row.
static void pack_some(void) {
    ft_panel_rows p = {.outputs = 1 + draw(70), .units = 1 + draw(90), .halves = (int32_t)draw(2)};
    p.flip = draw(2) ? 0x80808080 : 0;
    const int64_t bytes = p.units * (p.halves ? 8 : 4), panels = (p.outputs + 15) / 16;
    p.row_bytes = bytes + (int64_t)draw(3);
    uint8_t *rows = memory((size_t)(p.row_bytes * (p.outputs - 1) + bytes));
    for (int64_t i = 0; i < p.row_bytes * (p.outputs - 1) + bytes; i++) rows[i] = (uint8_t)draw(p.halves ? 16 : 256);
    uint8_t *found = memory((size_t)(panels * p.units * 64));
    p.rows = rows, p.packed = found;
    ft_pack_rows(&p);
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t unit = 0; unit < p.units; unit++)
            for (int n = 0; n < 16; n++)
                for (int j = 0; j < 4; j++) {
                    const int64_t output = panel * 16 + n;
                    const uint8_t *row = rows + output * p.row_bytes;
                    int is = 0;
                    if (output < p.outputs)
                        is = p.halves ? row[unit * 8 + j] | row[unit * 8 + 4 + j] << 4 : row[unit * 4 + j];
                    if ((is ^ (int)(p.flip & 255)) != found[((panel * p.units + unit) * 16 + n) * 4 + j]) abort();
                }
    free(rows);
    free(found);
}

static void one_round(void) {
    pack_some();
    example e = make();
    const ft_linear *l = &e.layer;
    const int64_t columns = l->gated ? l->outputs / 2 : l->outputs;
    ft_linear_rows rows = {.rows = 1 + draw(draw(4) ? 9 : 180)};
    rows.x_stride = l->inputs + draw(9), rows.y_stride = columns + draw(9);
    rows.residual_stride = columns + draw(9);
    const int64_t last = rows.rows - 1;
    float *x = numbers(last * rows.x_stride + l->inputs, 1);
    float *r = numbers(last * rows.residual_stride + columns, 1);
    void *xs = copy_rows(x, l->x_type, last * rows.x_stride + l->inputs);
    void *rs = copy_rows(r, l->y_type, last * rows.residual_stride + columns);
    const size_t bytes = (size_t)(last * rows.y_stride + columns) * (l->y_type == FT_BFLOAT16 ? 2 : 4);
    char *together = memory(bytes), *alone = memory(bytes), *first = memory(bytes);
    memset(together, 0, bytes), memset(alone, 0, bytes);
    rows.x = xs;
    rows.residual = draw(2) ? rs : NULL;
    double *wide = memory((size_t)l->inputs * sizeof(double));
    const int tiled = l->weight_type == FT_WEIGHT_BFLOAT16 && l->y_type == FT_FLOAT32 && !l->norm &&
                      !l->gated && !rows.residual;
    for (int level = 0; level <= EMULATED; level++) {
        if (level == EMULATED ? !emulated_amx_runs() : level > ft_cpu_level()) continue;
        ft_set_threads(1 + (int)draw(3));
        rows.y = together;
        run(&e, &rows, level, 0);
        for (int64_t row = 0; row < rows.rows; row += 1 + draw(20)) {
            check_row(&e, &rows, row, wide);
            if (tiled && level == EMULATED) check_tiled(&e, &rows, row);
        }
        rows.y = alone;
        run(&e, &rows, level, 1);
        if (memcmp(together, alone, bytes)) printf("bits depend on rows, level %d\n", level), exit(1);
        const int same = l->weight_type >= FT_WEIGHT_INT8 && !l->norm && !l->gated;
        if (level == 0) memcpy(first, together, bytes);
        if (same && memcmp(together, first, bytes)) printf("level %d differs\n", level), exit(1);
    }
    free(x), free(r), free(xs), free(rs), free(together), free(alone), free(first), free(wide);
    free(e.matrix), free((void *)l->weight), free((void *)l->scale), free((void *)l->zero);
    free((void *)l->bias), free((void *)l->norm);
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 200;
    state = count > 2 ? (uint64_t)atoll(arguments[2]) : 1;
    for (int i = 0; i < rounds; i++) one_round();
    printf("linear: %d rounds, levels 0 to %d%s\n", rounds, ft_cpu_level(),
           emulated_amx_runs() ? ", and AMX emulated" : "");
    return 0;
}
