// Where chains of drafts end before their number: the rules of foretoken.proposers.chain.
#ifndef FORETOKEN_STOP_H
#define FORETOKEN_STOP_H

#include <stdint.h>

typedef struct {
    float least_sure;  // chance of a best next token
    int64_t least;     // drafts in any case
    float *sure;       // [steps, spans], written: the chances of best next tokens
    int64_t *lengths;  // [spans], begun with 0: how many drafts count; fewer than were made: it ended
} ft_stop;

// After the chances of step `at` are known: counts the drafts of that step that stay, of spans that
// did not end before. Returns whether one of them goes on.
int ft_stop_after(const ft_stop *stop, int64_t at, int64_t spans);

// Whether a span that did not end was left undecided at step `at`; those of spans that ended become
// token 0. Without a rule (null) none ends.
int ft_stop_open(const ft_stop *stop, int64_t at, int64_t spans, int64_t *tokens);

// Both for tokens [steps, spans] that are all there. Returns the number of steps that count, fewer than
// all where a token is undecided or the rule ended every span.
int64_t ft_stop_through(const ft_stop *stop, int64_t steps, int64_t spans, int64_t *tokens);

#endif
