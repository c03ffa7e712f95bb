// Matrices of GGUF's block types, kept in the file's own bits.
//
// Panels of 16 outputs, in steps of 32 inputs. A step has three places, in as many arrays:
//   values   [panel][step]: nibbles, 64 bytes for 8 inputs (byte j of an output has inputs j, low half,
//            and 4 + j), and behind the four of them higher bits: with FT_BITS5 a plane of 64 bytes, byte
//            j of an output with bit k of inputs 4k + j; with FT_BITS6 two planes, fields of two bits
//   numbers  [panel][step]: of each group of 32 or 16 inputs 16 scales, then 16 minima if it has them:
//            halves, or signed bytes
//   upper    [panel][unit], for bytes: 16 halves that scales are times, then 16 for minima
// A weight is (value - middle) * scale - minimum. What the file rounds to is what comes out: a scale and
// a minimum are exact in float32, and so is their product with a value.
#ifndef FORETOKEN_GGML_H
#define FORETOKEN_GGML_H

#include "foretoken.h"

enum { FT_STEP = 32, FT_MOST_UNIT = 256 };
// Fronts: bits of a value, or a table of 16 that nibbles are looked up in. Those of FT_SHORT4 and FT_BITS6
// are in groups of 16.
enum { FT_BITS4, FT_BITS5, FT_BITS6, FT_IQ4, FT_FP4, FT_SHORT4, FT_FRONTS };
// Forms of numbers. With FT_MINIMA a group has a minimum too, and middle is 0.
enum { FT_HALVES, FT_BYTES, FT_POWERS, FT_MINIMA = 4 };

// Values of tables, each + middle.
extern const uint8_t ft_tables[FT_FRONTS][16];

static inline int ft_front_bytes(int front) {
    return front == FT_BITS5 ? 320 : front == FT_BITS6 ? 384 : 256;
}

static inline int ft_middle(int front, int form) {
    static const uint8_t middle[FT_FRONTS] = {8, 16, 32, 128, 12, 8};
    return form & FT_MINIMA ? 0 : middle[front];
}

static inline int ft_front_group(int front) { return front == FT_BITS6 || front == FT_SHORT4 ? 16 : 32; }

// Bytes of a step's numbers, and of a unit's upper ones.
static inline int ft_number_bytes(int front, int form) {
    const int each = form & FT_MINIMA ? 2 : 1;
    return 16 * each * (FT_STEP / ft_front_group(front)) * ((form & 3) == FT_HALVES ? 2 : 1);
}

static inline int ft_upper_bytes(int form) {
    if ((form & 3) != FT_BYTES) return 0;
    return form & FT_MINIMA ? 64 : 32;
}

// ggml's types, by ggml's numbers.
enum {
    FT_Q4_0 = 2, FT_Q4_1 = 3, FT_Q5_0 = 6, FT_Q5_1 = 7, FT_Q2_K = 10, FT_Q3_K = 11, FT_Q4_K = 12,
    FT_Q5_K = 13, FT_Q6_K = 14, FT_IQ4_NL = 20, FT_IQ4_XS = 23, FT_MXFP4 = 39
};

// How a type is kept; 0 if it is not.
typedef struct {
    int32_t front, form;
    int32_t unit;         // inputs of a block
    int32_t block_bytes;  // in the file
} ft_ggml_kind;

int ft_find_ggml_kind(int32_t type, ft_ggml_kind *kind);

// Rows to be packed. `columns`: for each `width` inputs, which of the file's come there; or null.
typedef struct {
    const void *const *rows;  // [outputs], each a row of blocks
    const int32_t *columns;
    void *values, *numbers, *upper;
    int64_t outputs, inputs;
    int32_t type, width;
    int32_t unit;  // inputs that share upper numbers; divides width, if there are columns
} ft_ggml_matrix;

// Returns 0 if the type is not kept.
FT_EXPORT int ft_pack_ggml(const ft_ggml_matrix *matrix);

// How many of the floats in the rows' blocks are NaN or infinite; of MXFP4, how many scales are NaN. Only
// rows, outputs, inputs and type are read. -1 if the type is not kept.
FT_EXPORT int64_t ft_strange_ggml(const ft_ggml_matrix *matrix);

// The values of a step of one output, from its first four bytes on: [FT_STEP] whole numbers.
void ft_take_values(int front, const uint8_t *from, uint8_t *values);

// Where a step lies in its panel's arrays.
typedef struct {
    const uint8_t *values, *numbers, *upper;
} ft_ggml_step;

// The step of the output in `lane` of the panel multiplied out: [FT_STEP].
void ft_ggml_floats(int front, int form, const ft_ggml_step *step, int lane, float *to);

#endif
