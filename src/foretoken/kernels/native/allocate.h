// Which sequences draft how far in a step: the search of foretoken.control.adaptive.allocation.
//
// That module says what is searched for and is the reference, down to the order of its sums.
#ifndef FORETOKEN_ALLOCATE_H
#define FORETOKEN_ALLOCATE_H

#include "foretoken.h"

// A drafter: DraftOption, for N sequences and K drafts of each at most.
typedef struct {
    const double *survival;  // [N, K]
    const double *depth_s;   // [K + 1]
    const double *start_s;   // [N]
    double slot_s;
} ft_draft_option;

// StepOptions with the drafters, and what was found.
typedef struct {
    const double *rows_s;             // [rows]
    const double *bound_s, *token_s;  // [sequences]
    const ft_draft_option *options;   // [num_options]
    int64_t rows, sequences, drafts, num_options;
    double plain_s, margin;
    int64_t *counts;   // [sequences], written: how many drafts of each
    int64_t *drafter;  // [sequences], written: the option that drafts for each; -1: none
    int64_t depth;                      // written; 0: nobody drafts
    double seconds, tokens, unguarded;  // written
} ft_allocate_call;

// Returns 0 where nothing could be found for want of memory, or because an option has more drafts
// than the step has rows for.
FT_EXPORT int32_t ft_allocate(ft_allocate_call *call);

#endif
