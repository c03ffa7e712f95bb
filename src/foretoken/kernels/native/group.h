// Processes of one machine that take turns together, over memory that they share.
//
// Every process (rank) has a seat at the start of a segment that all have mapped. A turn: a rank
// writes to its segment, calls ft_group_arrive, and ft_group_wait returns when all ranks have arrived:
// then it may read what they wrote. With two buffers that take turns nothing else is needed: who has
// arrived at turn n + 1 has read everything of turn n, so what it wrote in turn n is free in n + 2.
//
// A wait looks for its time a few microseconds, then sleeps. It ends early when the group does, which
// every rank is told by one word in the seat of rank 0: somebody ended it, was late, or is dead.
#ifndef FORETOKEN_GROUP_H
#define FORETOKEN_GROUP_H

#include "foretoken.h"

enum { FT_MOST_RANKS = 64 };
// Why a group has ended: the word is one of these times 256, plus the rank that was the reason.
enum { FT_RANK_LEFT = 1, FT_RANK_DIED = 2, FT_RANK_LATE = 3, FT_RANK_STILL = 4 };

typedef struct {
    // All in cache lines of their own: the first is written by its owner alone, the second by those
    // who wait for it, the third (used in the seat of rank 0) once.
    uint32_t turns, pad0[15];     // how many the rank has arrived at; modulo 2^32
    uint32_t sleepers, pad1[15];  // ranks that sleep until it arrives
    uint32_t ended, pad2[15];     // 0: the group lives
    uint32_t beats, pad3[15];     // counted up by its owner as long as it lives, for whoever watches
} ft_seat;

typedef struct {
    void *seats[FT_MOST_RANKS];     // an ft_seat of each rank, aligned to 64, begun with zeros
    int32_t lines[FT_MOST_RANKS];   // descriptors that can be read, or hang up, when a rank has died;
                                    // -1: somebody else watches that one
    int32_t rank, size;
    int64_t spin_ns;  // look so long before sleeping
} ft_group;

// This rank has written what it has for the next turn.
FT_EXPORT void ft_group_arrive(const ft_group *group);

// Until all ranks have arrived at this rank's turn, for *left_ns at most, which becomes what is left of
// it; negative: without end. Pauses of this process do not count. Returns 0, the word of a group that
// has ended (a rank that is late ends it), or -1: a signal came, call again.
FT_EXPORT int64_t ft_group_wait(const ft_group *group, int64_t *left_ns);

// End the group unless it has ended, and wake who sleeps. Returns the word that stands.
FT_EXPORT int64_t ft_group_end(const ft_group *group, int32_t reason, int32_t rank);

#endif
