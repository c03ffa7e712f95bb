// Counters that processes wait for. Sleeping is a futex on the awaited rank's counter; as long as
// nobody sleeps, arriving is a store and a look. A sleep is short, because death is only seen awake.
// Whether a rank is stopped is not seen here: Python counts beats (distributed/heart.py).
#include "group.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <time.h>

#include "clock.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const int64_t SLEEP_NS = 50000000;  // at most, between two looks at who is still alive
enum { LOOKS = 32 };                       // at the counter, between two at the clock

static ft_seat *seat_of(const ft_group *group, int32_t rank) { return group->seats[rank]; }

static uint32_t seen(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static void wake(uint32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);  // other processes: not private
#else
    (void)word;
#endif
}

// Returns -1 if a signal came.
static int sleep_while(ft_seat *seat, uint32_t turns, int64_t most_ns) {
    struct timespec pause = {most_ns / 1000000000, most_ns % 1000000000};
    int interrupted = 0;
    // Counted before the look at the counter, which the kernel takes: who arrives either sees a
    // sleeper, or is seen.
    __atomic_fetch_add(&seat->sleepers, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    interrupted = syscall(SYS_futex, &seat->turns, FUTEX_WAIT, turns, &pause, NULL, 0) &&
                  errno == EINTR;
#else
    pause = (struct timespec){0, 200000};
    if (seen(&seat->turns) == turns) interrupted = nanosleep(&pause, NULL) && errno == EINTR;
#endif
    __atomic_fetch_sub(&seat->sleepers, 1, __ATOMIC_SEQ_CST);
    return interrupted ? -1 : 0;
}

static int arrived(const ft_seat *seat, uint32_t turn) {
    return (int32_t)(seen(&seat->turns) - turn) >= 0;
}

// A rank whose line has closed, or -1.
static int32_t find_dead(const ft_group *group) {
    struct pollfd lines[FT_MOST_RANKS];
    for (int32_t r = 0; r < group->size; r++)
        lines[r] = (struct pollfd){.fd = group->lines[r], .events = POLLIN};
    if (poll(lines, (nfds_t)group->size, 0) > 0)
        for (int32_t r = 0; r < group->size; r++)
            if (lines[r].revents) return r;
    return -1;
}

void ft_group_arrive(const ft_group *group) {
    ft_seat *own = seat_of(group, group->rank);
    __atomic_store_n(&own->turns, own->turns + 1, __ATOMIC_SEQ_CST);
    if (seen(&own->sleepers)) wake(&own->turns);
}

int64_t ft_group_end(const ft_group *group, int32_t reason, int32_t rank) {
    ft_seat *first = seat_of(group, 0);
    uint32_t none = 0, word = (uint32_t)reason << 8 | (uint32_t)rank;
    __atomic_compare_exchange_n(&first->ended, &none, word, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    for (int32_t r = 0; r < group->size; r++) wake(&seat_of(group, r)->turns);
    return seen(&first->ended);
}

// What is left of the time after a while of waiting. A pause of this process, which was stopped or not
// given a processor, is nobody else's fault: of a sleep it counts what was to be slept.
static void spend(int64_t *left_ns, int64_t waited_ns) {
    if (waited_ns > 2 * SLEEP_NS) waited_ns = 2 * SLEEP_NS;
    if (*left_ns >= 0) *left_ns = *left_ns > waited_ns ? *left_ns - waited_ns : 0;
}

static int64_t wait_for(const ft_group *group, int32_t rank, uint32_t turn, int64_t *left_ns) {
    ft_seat *seat = seat_of(group, rank), *first = seat_of(group, 0);
    const int64_t began = now_ns();
    int64_t now = began;
    for (;;) {
        const int64_t last = now;
        now = now_ns();
        spend(left_ns, now - last);
        for (int look = 0; look < LOOKS; look++) {
            if (arrived(seat, turn)) return 0;
            relax();
        }
        if (seen(&first->ended)) return seen(&first->ended);
        if (now - began < group->spin_ns) continue;
        int32_t dead = find_dead(group);
        uint32_t turns = seen(&seat->turns);
        if ((int32_t)(turns - turn) >= 0) return 0;  // its last deed
        if (dead >= 0) return ft_group_end(group, FT_RANK_DIED, dead);
        if (!*left_ns) return ft_group_end(group, FT_RANK_LATE, rank);
        int64_t most = *left_ns < 0 || *left_ns > SLEEP_NS ? SLEEP_NS : *left_ns;
        if (sleep_while(seat, turns, most)) {
            spend(left_ns, now_ns() - now);
            return -1;
        }
    }
}

int64_t ft_group_wait(const ft_group *group, int64_t *left_ns) {
    const uint32_t turn = seat_of(group, group->rank)->turns;
    for (int32_t r = 0; r < group->size; r++) {
        if (r == group->rank) continue;
        int64_t ended = wait_for(group, r, turn, left_ns);
        if (ended) return ended;
    }
    return 0;
}
