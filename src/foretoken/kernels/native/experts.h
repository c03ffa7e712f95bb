// A mixture of experts: each row goes through the few matrices that its router chooses.
//
// Order of arithmetic, and with it a row's bits, depends on the row alone. Scores: float32, along the
// inputs in order, a product, then a sum. Choice: the larger first, of equal ones the lower index.
// Experts: as linear.h has them. Results: times their weights, added in float32 from the largest weight
// on, of equal ones the lower index; then the shared expert, then the residual; rounded once. A row with
// a NaN is NaN, and no other is. Experts that no row chose are not read.
#ifndef FORETOKEN_EXPERTS_H
#define FORETOKEN_EXPERTS_H

#include "linear.h"
#include "rows.h"

enum { FT_SCORE_NONE, FT_SCORE_SOFTMAX, FT_SCORE_SIGMOID };
// What is made of the chosen scores.
enum { FT_WEIGHTS_KEPT, FT_WEIGHTS_NORMED, FT_WEIGHTS_SOFTMAX, FT_WEIGHTS_SIGMOID };
// Beside FT_SILU and FT_GELU_TANH. FT_CLAMPED_SWISH: g = min(gate, limit), u = clamp(up, -limit, limit): (u + 1) g sigmoid(alpha g).
// FT_RELU_SQUARED has no gate.
enum { FT_CLAMPED_SWISH = 3, FT_RELU_SQUARED = 4 };
// The parts of a call. Where processes share the outputs of all matrices, each gives the others its part of
// what is gated after the first half.
enum { FT_WHOLE, FT_TO_GATED, FT_FROM_GATED };
enum { FT_MOST_EXPERTS = 1024, FT_MOST_CHOSEN = 32 };

typedef struct {
    const float *router;       // [panel][hidden][16] of experts, with shared_gated one output more
    const float *router_bias;  // of the experts' scores, or null
    const float *choice_bias;  // added to scores for the choice alone, or null
    const float *weight_scale; // what the weight of each expert is multiplied by at last, or null
    const ft_linear *const *gate_up;  // [experts]; what is `next` to one are more of its outputs
    const ft_linear *const *down;     // [experts], float32 results; y has their outputs
    const ft_linear *shared_gate_up, *shared_down;  // of what all rows go through, or null
    int64_t hidden, inner, shared_inner;  // of gate_up: down may take more, of other processes
    int32_t experts, chosen;
    int32_t score, weights;
    int32_t groups, open_groups;  // the choice is among the experts of the best groups, by the sum of their
                                  // two best; 0: among all
    int32_t shared_gated;         // the shared result times the sigmoid of the router's last output
    int32_t activation, shared_activation;
    int32_t type;                 // of rows, residual and result
    int32_t rounds_router;        // whether scores are rounded to bfloat16
    float floor;                  // FT_WEIGHTS_NORMED: least sum
    float added;                  // FT_WEIGHTS_NORMED: added to the sum
    float scale;                  // of all weights
    float softcap;                // of scores: softcap tanh(score / softcap); or 0
    float limit, alpha;           // of FT_CLAMPED_SWISH
} ft_experts;

typedef struct {
    const void *x;         // [rows, hidden]
    const void *by;        // like x: what the router reads; null: x
    void *y;               // [rows, outputs of down]
    const void *residual;  // like y, or null; may be y itself
    int64_t rows;
    int64_t *distinct;  // is increased by the number of experts that were read; or null
    // Between two halves, else null. The second does not read x and by.
    int64_t *routes;  // [rows, chosen + 1]: what the first half tells the second: weight and expert, 32 bits each
    void *gated;      // [rows, chosen, inner], of the second half inputs of down; not in the order of rows
    void *shared;     // [rows, shared_inner], likewise
    int32_t half;
} ft_experts_rows;

FT_EXPORT void ft_experts_run(const ft_experts *experts, const ft_experts_rows *rows);

#endif
