// What the C files share: exported names, the instruction set in use, the pool of threads.
//
// One shared library, loaded by ctypes. A file whose name ends with a level (*_avx2.c, *_neondot.c, ...)
// is compiled for that instruction set and must only be called when ft_level() allows it; every
// other file is compiled for the base of the architecture. Such a file keeps a guard (#if defined(__AVX2__) ...)
// and exports a null table where its compiler flags did not work or the architecture is another.
#ifndef FORETOKEN_H
#define FORETOKEN_H

#include <stddef.h>
#include <stdint.h>

#define FT_EXPORT __attribute__((visibility("default")))

// Types of activations, keys and values. FT_INT8 is of keys and values alone: each head of a slot is
// its numbers, -127 to 127, and behind them a float32, not aligned, that they are multiplied with.
enum { FT_FLOAT32 = 0, FT_BFLOAT16 = 1, FT_INT8 = 2 };
enum { FT_SCALE_BYTES = 4 };

// Levels of an architecture count from FT_PORTABLE, each with all of those below it. On x86: FT_AVX2
// includes FMA and F16C, FT_AVXVNNI adds VNNI to it, FT_AVX512 means F, BW, VL and DQ, FT_AVX512BF16 adds
// BF16 and VNNI, FT_AMX its tiles for bfloat16. A processor may have FT_AVX512 and above without FT_AVXVNNI. On aarch64: FT_NEON is its base, FT_NEONDOT adds dot products of bytes, FT_NEONBF16
// those of bfloat16 and products of small matrices of either (I8MM).
enum { FT_PORTABLE, FT_AVX2, FT_AVXVNNI, FT_AVX512, FT_AVX512BF16, FT_AMX };
enum { FT_NEON = 1, FT_NEONDOT, FT_NEONBF16 };

// The best level that both the processor and the operating system have.
FT_EXPORT int ft_cpu_level(void);
// The level in use; ft_set_level returns the one that now is, at most ft_cpu_level(), and FT_AVX2 in
// place of FT_AVXVNNI where the processor has none.
FT_EXPORT int ft_level(void);
// Whether weights are fetched into the L1 cache ahead of their use, or only into the next one: which
// of them is faster depends on the processor. Set it to compare; negative: as the processor likes it.
FT_EXPORT int ft_fetches_near(void);
FT_EXPORT void ft_set_fetches_near(int wanted);
FT_EXPORT int ft_set_level(int level);

// The pool. ft_parallel calls task(context, item, worker) once for every item in [0, items), items
// handed out one by one in order; returns when all are done. worker is in [0, ft_threads()) and no
// two calls that run at the same time share one: index scratch memory by it. The caller takes part
// as worker 0, so a machine that is busy elsewhere slows a call down but never stalls it. Called
// while another thread is inside, or for one item, or with one thread, it is a plain loop. Results
// must not depend on which worker does an item. Workers wait a few ten microseconds, then sleep.
typedef void (*ft_task)(void *context, int64_t item, int worker);
FT_EXPORT void ft_parallel(ft_task task, void *context, int64_t items);
FT_EXPORT int ft_threads(void);
FT_EXPORT void ft_set_threads(int threads);
enum { FT_MOST_THREADS = 256 };

// Memory of at least `bytes`, aligned to 64, private to the calling thread and kept for its next
// call with the same `slot` (0 to FT_SCRATCH_SLOTS - 1): contents do not survive that call. Null if
// there is none.
enum { FT_SCRATCH_SLOTS = 5 };
void *ft_scratch(int slot, size_t bytes);

// Ask for huge pages for the whole 2 MiB pages inside [start, start + bytes).
FT_EXPORT void ft_advise_huge(void *start, size_t bytes);

#endif
