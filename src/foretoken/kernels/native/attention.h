// Causal attention of spans over paged keys and values, read where they lie.
//
// A span is a run of tokens of one sequence. Its row t stands at position start + t and sees the
// keys at positions [0, start + t], with a window the last `window` of them. Query heads come in
// group-major order: head g * num_kv_heads + k reads key head k.
//
// Order of arithmetic, and with it a row's bits, depends on the row's position alone. Keys are
// taken in blocks of 16 and sections of 512 that begin at multiples of these numbers; softmax is
// online over the blocks of a section from a fresh state: a row's peak moves, and what it summed is
// scaled, where a block has a score more than 8 (in powers of two) above it. The sections are then
// merged in order, and a head's sink last, as a section of one key whose value is 0.
// A key that a row does not see takes part as an exact zero. Threads share work by rows and key
// heads, so nothing above can depend on them either.
//
// Keys and values kept as FT_INT8 give the bits of the same numbers, multiplied out, in `type`.
//
// A span with `paths` is a tree. A row's path is its depth (0 for a child of the committed text),
// then the indices within the span of its ancestors in order of depth, itself last. It stands at
// start + depth, and its keys from `start` on are those of its path, each at start + its depth: the
// bits it would have if its path alone were run as a chain. Rows may come after `known` tokens of
// the tree whose keys are already in the store; indices then count those too.
//
// A span of FT_TOGETHER is a block: its rows see each other, later ones too. A window still ends at its
// distance behind a row's own position.
#ifndef FORETOKEN_ATTENTION_H
#define FORETOKEN_ATTENTION_H

#include "foretoken.h"

// What ft_span.paths says where there are none.
enum { FT_CHAIN = -1, FT_TOGETHER = -2 };

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim, page_size;
    int32_t type;  // FT_FLOAT32 or FT_BFLOAT16: of queries and output
    int32_t kv_type;  // of keys and values: `type`, or FT_INT8, which is rounded to `type` when read
    int32_t window;  // 0: none
    float scale;  // of q k^T
    float softcap;  // c * tanh(s / c) of the scaled scores; 0: none
} ft_attention_shape;

typedef struct {
    int32_t row;  // its first row of the queries and of the output
    int32_t num_rows;
    int32_t start;  // position of its first row
    int32_t pages;  // index into the page numbers of its page table's first entry
    int32_t paths;  // index of its tree paths, [num_rows, known + num_rows + 1]; or FT_CHAIN, FT_TOGETHER
    int32_t known;  // tokens of the tree before its rows; a chain has none
} ft_span;

typedef struct {
    const ft_attention_shape *shape;
    const ft_span *spans;
    const int32_t *pages;  // page numbers of all spans' tables
    const int32_t *paths;  // tree paths of all spans; may be NULL
    const void *q;  // [T, H, h]; rows q_stride elements apart
    const void *kv;  // [slots, 2 * K heads]; slots kv_stride numbers of kv_type apart
    void *out;  // [T, H, h]; rows out_stride elements apart
    const float *sinks;  // [H], as the queries: a score beside those of the keys, without a value, neither
                         // scaled nor capped; or NULL
    int64_t q_stride, kv_stride, out_stride;
    int32_t num_spans;
} ft_attention_call;

// A part of a call that one thread computes: rows x key heads of one span.
typedef struct {
    int32_t span;
    int32_t first_row, end_row;  // within the span
    int32_t first_head, end_head;  // key heads
} ft_attention_unit;

// Cuts the spans into units for ft_threads() threads. Returns how many there are, and writes at
// most `capacity` of them; the plan holds for every call with these spans.
FT_EXPORT int64_t ft_attention_plan(const ft_attention_shape *shape, const ft_span *spans,
                                    int32_t num_spans, ft_attention_unit *units, int64_t capacity);
FT_EXPORT void ft_attention_run(const ft_attention_call *call, const ft_attention_unit *units,
                                int64_t num_units);

// An instruction set's kernel.
typedef struct {
    int ready;  // 0: this build has none
    // Floats of scratch memory that a unit of so many rows and key heads needs.
    size_t (*scratch)(const ft_attention_shape *shape, int rows, int heads);
    // `next`: the unit that this thread will most likely run next, or null.
    void (*run)(const ft_attention_call *call, const ft_attention_unit *unit,
                const ft_attention_unit *next, float *scratch);
} ft_attention_kernel;

extern const ft_attention_kernel ft_attention_portable, ft_attention_avx2, ft_attention_avx512,
    ft_attention_avx512bf16, ft_attention_neon, ft_attention_neonbf16;
// The same bits, faster where a key head has many rows.
extern const ft_attention_kernel ft_attention_wide_avx2, ft_attention_wide_avx512,
    ft_attention_wide_avx512bf16;

#endif
