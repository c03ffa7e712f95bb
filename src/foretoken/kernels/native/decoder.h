// Layers of a Llama-like decoder in one call: norm, q k v, rotary positions, attention, output and
// residual, norm, gate and up, activation, down and residual; or experts in place of these or beside.
//
// Exactly the calls that linear.h, rows.h and attention.h offer one by one, in the same order and
// with the same roundings between them: the bits are those of a layer run call by call.
#ifndef FORETOKEN_DECODER_H
#define FORETOKEN_DECODER_H

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "rows.h"

typedef struct {
    const ft_linear *qkv, *out;  // qkv: of queries alone, where the layer reads what another one keeps
    const ft_linear *gate;  // [H * h], of what qkv is given: its sigmoid times what attention gives; or null
    const ft_linear *gate_up, *down;
    const ft_experts *experts;  // in place of gate_up and down, or beside them; or null
    const float *sinks;         // of ft_attention_call, or null
    const void *attention_norm, *mlp_norm;         // weights [hidden]; or null: of nothing
    const void *after_attention, *after_mlp;       // of norms before a residual is added, or null
    // With experts beside gate_up and down: of what these give, before and after the experts, and of what
    // the router reads of the stream. mlp_norm is that of gate_up.
    const void *after_plain, *experts_norm, *after_experts, *router_norm;
    const void *query_norm, *key_norm;             // [head_dim], or of all heads together; or null
    const void *value_norm;                        // [head_dim], or null
    const void *beside_norm;  // of step->beside, [hidden]: normed, it stands before the normed
                              // stream in what qkv is given, [rows, 2 hidden]; or null
    int64_t from_norm;        // whether the stream goes on from attention_norm's output
    int64_t whole_norms;      // whether query_norm and key_norm reach over all heads together
    int64_t turns_first;      // of ft_rotary_call
    int64_t keeps;            // whether it makes keys and values; else those of its store are read
    int64_t kind;
    // Of what the layer gets beside the stream, after its other parts, or null: x + norm(back(act(gate(x)) given)).
    const ft_linear *input_gate, *input_back;
    const void *input_norm;
    float scale;  // what the stream is multiplied by at last
} ft_layer;

typedef struct {
    const ft_layer *layers;
    int64_t hidden;     // width of the residual stream
    int32_t type;       // of all activations
    int32_t norm_type;  // of all weights of norms
    int32_t activation;
    float eps;
    float branch_scale;  // what a layer's two parts give is multiplied with, where no norm follows them
} ft_decoder;

// What layers of a kind share in a step.
typedef struct {
    ft_attention_call attention;  // q, kv and out are filled in layer by layer
    const ft_attention_unit *units;
    int64_t num_units;
    const void *cos, *sin;  // tables of ft_rotary_call
    const void *query_scale;  // [positions], what queries are multiplied by at last; or null
    int64_t width, kv_stride;
} ft_step_kind;

typedef struct {
    void *x;                   // [rows, hidden]: the residual stream, changed in place
    const int64_t *positions;  // of the rows, in the tables of cos and sin
    const int64_t *slots;      // where keys and values go; or null: first_slot + row
    int64_t first_slot, rows;
    void *const *kv;  // the layers' stores
    ft_step_kind *kinds;
    void *beside;  // [rows, hidden], of layers with beside_norm; else null
    const void *inputs;    // [rows, all layers, width], of layers with input_gate; else null
    int64_t inputs_stride; // numbers of a row
    char *const *kept;    // where the input of each layer is kept, by slot, or null; or null: of none
    int64_t kept_stride;  // bytes from a slot to the next
    int64_t *distinct;    // is increased by the experts that were read, of all layers; or null
} ft_step;

// Run layers [first, end).
FT_EXPORT void ft_decoder_run(const ft_decoder *decoder, const ft_step *step, int32_t first,
                              int32_t end);

#endif
