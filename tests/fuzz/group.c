// Ranks as threads: what one reads after a turn is what the others wrote for it, and every wait ends.
//
// Arguments: number of rounds, seed.
#include "group.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "helpers/making.h"

enum { MOST_SEATS = 4 };

typedef struct {
    _Alignas(64) ft_seat seat;
    uint64_t buffers[2];
} segment;

typedef struct {
    ft_group group;
    int32_t turns, stays_away;  // who stays away does so after that many turns; -1: nobody
    int64_t wait_ns, ended;
} rank;

static uint64_t what(int32_t rank, int32_t turn) { return (uint64_t)rank << 32 | (uint32_t)turn; }

static void *work(void *argument) {
    rank *r = argument;
    ft_group *g = &r->group;
    for (int32_t turn = 0; turn < r->turns && !r->ended; turn++) {
        if (r->stays_away == turn) return NULL;
        segment *own = g->seats[g->rank];
        own->buffers[turn % 2] = what(g->rank, turn);
        ft_group_arrive(g);
        int64_t left_ns = r->wait_ns;
        do r->ended = ft_group_wait(g, &left_ns);
        while (r->ended == -1);
        for (int32_t other = 0; other < g->size && !r->ended; other++) {
            const segment *theirs = g->seats[other];
            wanted(theirs->buffers[turn % 2] == what(other, turn), "what was written for this turn");
        }
    }
    return NULL;
}

static void one(void) {
    static segment segments[MOST_SEATS];
    memset(segments, 0, sizeof segments);
    const int32_t size = pick(1, MOST_SEATS), away = pick(0, 3) ? -1 : pick(0, size - 1);
    const uint32_t begun = pick(0, 1) ? 0 : UINT32_MAX - (uint32_t)pick(0, 5);
    const int dies = pick(0, 1), turns = pick(1, 40), leaves = pick(0, turns - 1);
    int line[2];
    if (pipe(line)) abort();
    rank ranks[MOST_SEATS];
    pthread_t threads[MOST_SEATS];
    for (int32_t r = 0; r < size; r++) {
        segments[r].seat.turns = begun;
        ranks[r] = (rank){.turns = turns, .stays_away = r == away ? leaves : -1};
        ranks[r].wait_ns = away < 0 || dies ? -1 : 3000000;
        ranks[r].group = (ft_group){.rank = r, .size = size, .spin_ns = pick(0, 1) * 20000};
        for (int32_t other = 0; other < size; other++) {
            ranks[r].group.seats[other] = &segments[other];
            ranks[r].group.lines[other] = other == away && dies ? line[0] : -1;
        }
    }
    for (int32_t r = 0; r < size; r++) pthread_create(&threads[r], NULL, work, &ranks[r]);
    if (away >= 0) pthread_join(threads[away], NULL);
    close(line[1]);
    for (int32_t r = 0; r < size; r++)
        if (r != away) pthread_join(threads[r], NULL);
    close(line[0]);
    // Where threads wait for their turn on the processor, another rank may be found late first.
    const uint32_t word = segments[0].seat.ended;
    wanted((word != 0) == (away >= 0 && size > 1), "an end if somebody stays away");
    wanted(!word || (int)(word >> 8) == (dies ? FT_RANK_DIED : FT_RANK_LATE), "its reason");
    wanted(!word || !dies || (int32_t)(word & 255) == away, "the one that died");
    for (int32_t r = 0; r < size; r++)
        wanted(ranks[r].ended == word || (r == away && !ranks[r].ended), "the same end for all");
    const int64_t first = ft_group_end(&ranks[0].group, FT_RANK_LEFT, 0);
    const int64_t own = (int64_t)FT_RANK_LEFT << 8;
    wanted(first == (word ? word : own), "the first end stands");
    wanted(ft_group_end(&ranks[0].group, FT_RANK_LATE, 0) == first, "an end is an end");
}

int main(int count, char **arguments) {
    const int rounds = 10 * (count > 1 ? atoi(arguments[1]) : 20);
    begin_making(count > 2 ? strtoull(arguments[2], NULL, 10) : 0);
    for (int i = 0; i < rounds; i++) one();
    printf("group: ok\n");
    return 0;
}
