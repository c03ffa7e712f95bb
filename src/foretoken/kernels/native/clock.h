// The time, and how to look again without pushing others aside.
#ifndef FORETOKEN_CLOCK_H
#define FORETOKEN_CLOCK_H

#include <stdint.h>
#include <time.h>

// Nanoseconds of a clock that only goes on.
static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Between two looks at a word that another thread writes.
static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
