// What programs of tests/fuzz make at random: numbers, buffers without a byte to spare, layers.
#ifndef MAKING_H
#define MAKING_H

#include "decoder.h"
#include "draw.h"
#include "embedding.h"
#include "feature_rows.h"
#include "stop.h"

void begin_making(uint64_t seed);
int pick(int least, int most);
float uniform(float most);  // -most to most

// Exactly so many bytes; free_made frees all that was made.
void *make_bytes(size_t bytes);
void *make_copy(const void *from, size_t bytes);
void free_made(void);

size_t item_bytes(int type);
// Numbers of FT_FLOAT32 or FT_BFLOAT16.
void *make_numbers(int type, int64_t count, float most);
// Any weights that fit so many inputs; activations of `type`.
ft_linear *make_linear(int type, int y_type, int64_t inputs, int64_t outputs);
// Rows of `type` for so many tokens, of floats or of such a layer.
const ft_embedding *make_embedding(int type, int64_t tokens, int64_t width);
// Features of so many slots, of which rows of `width` are read, in one piece or more.
ft_features make_features(int type, int64_t slots, int64_t width);
// Any mixture over rows of `hidden`.
const ft_experts *make_experts(int type, int64_t hidden);
ft_attention_shape *make_shape(int type, int kv_type, int page_size);
// Layers, each of a kind with one of these shapes; of `beside`, each takes rows beside the stream too, and
// some of them `inputs` numbers.
ft_decoder *make_decoder(ft_attention_shape *const *shapes, int kinds, int64_t hidden, int64_t layers, int beside,
                         int64_t inputs);
// What a slot of one layer takes, in numbers of its type and in bytes.
int64_t slot_numbers(const ft_attention_shape *shape);
int64_t slot_bytes(const ft_attention_shape *shape);
// Ways to choose a token; `greedy`: the best.
ft_draw_row make_draw(int greedy);
// A rule that begins, over its own buffers.
ft_stop make_stop(int64_t steps, int64_t spans);

// The main of a program that runs `one` on every instruction set, with one to three threads. The
// arguments are the number of rounds and the seed.
int at_every_level(const char *name, int count, char **arguments, void (*one)(void));

// End the program unless it holds.
void wanted(int holds, const char *what);
void same_bytes(const void *a, const void *b, size_t bytes, const char *what);
// What is true of any call that drafts: a count within its bounds, tokens of the vocabulary.
void check_drafted(int64_t done, int64_t steps, int64_t spans, const int64_t *tokens,
                   int64_t vocabulary, const ft_stop *stop);

#endif
