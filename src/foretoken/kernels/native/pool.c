// The process's one pool of threads for kernels.
//
// A call publishes a job and works on it itself; workers that are awake, or wake in time, take items
// too. It ends when all items are done, not when all workers have looked: a worker that the system
// is not running costs nothing, unless it was stopped in the middle of an item.
//
// A job is a slot that is reused. `ticket` packs its number and its next item in one word, so that a
// worker that comes late cannot take an item of a newer job with an older job's task.
#include "foretoken.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "clock.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { ITEM_BITS = 32 };
static const uint64_t ITEM_MASK = ((uint64_t)1 << ITEM_BITS) - 1;
static const int64_t SPIN_NS = 40000;   // a worker looks for the next job this long, then sleeps
static const int64_t POLITE_NS = 5000;  // after this long it lets others run while it looks

static struct {
    _Alignas(64) _Atomic uint64_t ticket;  // job number, next item
    _Alignas(64) _Atomic int64_t left;     // items of the job that are not done
    _Alignas(64) _Atomic uint32_t number;  // of the newest job; the workers' futex
    _Atomic int sleepers;
    _Alignas(64) _Atomic(ft_task) task;
    _Atomic(void *) context;
    _Atomic int64_t items;
} job;

static pthread_mutex_t entrance = PTHREAD_MUTEX_INITIALIZER;
static atomic_int wanted_threads = 1;
static int started = 0;  // workers; guarded by `entrance`
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void sleep_while(uint32_t number) {
    atomic_fetch_add(&job.sleepers, 1);
    // A fallback without futexes would poll; Linux is what is supported.
#if defined(__linux__)
    syscall(SYS_futex, &job.number, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
#else
    struct timespec pause = {0, 200000};
    if (atomic_load(&job.number) == number) nanosleep(&pause, NULL);
#endif
    atomic_fetch_sub(&job.sleepers, 1);
}

static void wake_workers(int count) {
#if defined(__linux__)
    syscall(SYS_futex, &job.number, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
#else
    (void)count;
#endif
}

// Take items of job `number` until there are none.
static void work_on(uint32_t number, int worker) {
    ft_task task = atomic_load_explicit(&job.task, memory_order_relaxed);
    void *context = atomic_load_explicit(&job.context, memory_order_relaxed);
    int64_t items = atomic_load_explicit(&job.items, memory_order_relaxed);
    uint64_t seen = atomic_load_explicit(&job.ticket, memory_order_acquire);
    int64_t done = 0;
    for (;;) {
        // The exchange below proves that the job is still `number`, hence that the three values
        // above, which its owner wrote before the ticket, belong to it.
        if ((uint32_t)(seen >> ITEM_BITS) != number) break;
        int64_t item = (int64_t)(seen & ITEM_MASK);
        if (item >= items) break;
        atomic_thread_fence(memory_order_acquire);
        if (!atomic_compare_exchange_weak_explicit(&job.ticket, &seen, seen + 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        task(context, item, worker);
        done++;
        seen = atomic_load_explicit(&job.ticket, memory_order_acquire);
    }
    if (done) atomic_fetch_sub_explicit(&job.left, done, memory_order_acq_rel);
}

static void *worker_main(void *argument) {
    int worker = (int)(intptr_t)argument;
    uint32_t seen = 0;
    for (;;) {
        int64_t began = 0;
        int polite = 0;
        for (unsigned turn = 0;; turn++) {
            if (atomic_load_explicit(&job.number, memory_order_acquire) != seen) break;
            relax();
            if (polite) sched_yield();
            if (turn % 64) continue;
            int64_t now = now_ns();
            if (!began) began = now;
            polite = now - began > POLITE_NS;
            if (now - began > SPIN_NS) sleep_while(seen);
        }
        seen = atomic_load_explicit(&job.number, memory_order_acquire);
        if (worker < ft_threads()) work_on(seen, worker);
    }
    return NULL;
}

// A forked child has none of its parent's workers.
static void after_fork(void) {
    started = 0;
    atomic_store(&job.sleepers, 0);
    pthread_mutex_init(&entrance, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

static void start_workers(int threads) {
    pthread_once(&fork_once, watch_forks);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (started < threads - 1) {
        pthread_t thread;
        intptr_t worker = started + 1;
        if (pthread_create(&thread, &attributes, worker_main, (void *)worker)) break;
        started++;
    }
    pthread_attr_destroy(&attributes);
}

void ft_parallel(ft_task task, void *context, int64_t items) {
    int threads = ft_threads();
    if (threads == 1 || items < 2 || items >= (int64_t)ITEM_MASK ||
        pthread_mutex_trylock(&entrance)) {
        for (int64_t item = 0; item < items; item++) task(context, item, 0);
        return;
    }
    if (started < threads - 1) start_workers(threads);
    uint32_t number = atomic_load_explicit(&job.number, memory_order_relaxed) + 1;
    // No ticket matches while the values change: late workers of the last job fail their exchange.
    atomic_store(&job.ticket, ((uint64_t)number << ITEM_BITS) | ITEM_MASK);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&job.task, task, memory_order_relaxed);
    atomic_store_explicit(&job.context, context, memory_order_relaxed);
    atomic_store_explicit(&job.items, items, memory_order_relaxed);
    atomic_store_explicit(&job.left, items, memory_order_relaxed);
    atomic_store(&job.ticket, (uint64_t)number << ITEM_BITS);
    atomic_store(&job.number, number);
    int sleepers = atomic_load(&job.sleepers);
    if (sleepers) wake_workers(sleepers);
    work_on(number, 0);
    for (unsigned turn = 0; atomic_load_explicit(&job.left, memory_order_acquire) > 0; turn++) {
        relax();
        if (turn > 2000) sched_yield();
    }
    pthread_mutex_unlock(&entrance);
}

int ft_threads(void) { return atomic_load_explicit(&wanted_threads, memory_order_relaxed); }

void ft_set_threads(int threads) {
    int most = threads < 1 ? 1 : threads > FT_MOST_THREADS ? FT_MOST_THREADS : threads;
    atomic_store_explicit(&wanted_threads, most, memory_order_relaxed);
}

typedef struct {
    void *start[FT_SCRATCH_SLOTS];
    size_t bytes[FT_SCRATCH_SLOTS];
} scratch_memory;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static _Thread_local scratch_memory *scratch;

static void free_scratch(void *memory) {
    scratch_memory *mine = memory;
    for (int slot = 0; slot < FT_SCRATCH_SLOTS; slot++) free(mine->start[slot]);
    free(mine);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *ft_scratch(int slot, size_t bytes) {
    if (!scratch) {
        pthread_once(&scratch_once, make_scratch_key);
        scratch = calloc(1, sizeof *scratch);
        if (!scratch) return NULL;
        pthread_setspecific(scratch_key, scratch);
    }
    if (scratch->bytes[slot] < bytes) {
        free(scratch->start[slot]);
        size_t rounded = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
        scratch->start[slot] = aligned_alloc(64, rounded);
        scratch->bytes[slot] = scratch->start[slot] ? rounded : 0;
    }
    return scratch->start[slot];
}
