// Which instruction sets there are, and which is in use.
#include "foretoken.h"

#include <stdatomic.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

static int has(uint32_t word, int bit) { return (word >> bit) & 1; }

// Linux hands out the tile registers only to processes that ask; for all their threads at once.
static int may_use_tiles(void) {
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

static int has_avxvnni(void) {
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, 4);
}

int ft_cpu_level(void) {
    uint32_t a, b, c, d, b7, c7, d7, a71, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return FT_PORTABLE;  // OSXSAVE
    int fma = has(c, 12) && has(c, 28) && has(c, 29);                        // FMA, AVX, F16C
    uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return FT_PORTABLE;
    if ((state & 0x6) != 0x6 || !fma || !has(b7, 5)) return FT_PORTABLE;
    if (!__get_cpuid_count(7, 1, &a71, &b, &c, &unused)) a71 = 0;
    int wide = has(b7, 16) && has(b7, 17) && has(b7, 30) && has(b7, 31);  // F, DQ, BW, VL
    if ((state & 0xe6) != 0xe6 || !wide) return has_avxvnni() ? FT_AVXVNNI : FT_AVX2;
    if (!has(c7, 11) || !has(a71, 5)) return FT_AVX512;  // VNNI, BF16
    int tiles = has(d7, 24) && has(d7, 22) && (state & 0x60000) == 0x60000;
    return tiles && may_use_tiles() ? FT_AMX : FT_AVX512BF16;
}
#elif defined(__aarch64__)
int ft_cpu_level(void) {
#if defined(__linux__)
    // Bits of the kernel's words; its own header may be older than the processor.
    enum { ASIMD = 1, ASIMDDP = 20, I8MM = 13, BF16 = 14 };
    const unsigned long base = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
    if (!(base >> ASIMD & 1)) return FT_PORTABLE;
    if (!(base >> ASIMDDP & 1)) return FT_NEON;
    return (more >> I8MM) & (more >> BF16) & 1 ? FT_NEONBF16 : FT_NEONDOT;
#else
    return FT_NEON;
#endif
}
#else
int ft_cpu_level(void) { return FT_PORTABLE; }
#endif

// Of all that were measured only AMD's family 25, Zen 4, is slower with it.
static int cpu_fetches_near(void) {
#if defined(__x86_64__)
    uint32_t a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return 1;
    const int amd = b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
    if (!amd || !__get_cpuid(1, &a, &b, &c, &d)) return 1;
    return ((a >> 8) & 15) + ((a >> 20) & 255) != 25;
#else
    return 1;
#endif
}

static atomic_int near = -1;

int ft_fetches_near(void) {
    int known = atomic_load_explicit(&near, memory_order_relaxed);
    if (known < 0) {
        known = cpu_fetches_near();
        atomic_store_explicit(&near, known, memory_order_relaxed);
    }
    return known;
}

void ft_set_fetches_near(int wanted) {
    atomic_store_explicit(&near, wanted, memory_order_relaxed);
}

static atomic_int level;

int ft_level(void) { return atomic_load_explicit(&level, memory_order_relaxed); }

int ft_set_level(int wanted) {
    int most = ft_cpu_level();
    int chosen = wanted < FT_PORTABLE ? FT_PORTABLE : wanted > most ? most : wanted;
#if defined(__x86_64__)
    if (chosen == FT_AVXVNNI && !has_avxvnni()) chosen = FT_AVX2;
#endif
    atomic_store_explicit(&level, chosen, memory_order_relaxed);
    return chosen;
}

void ft_advise_huge(void *start, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t size = (uintptr_t)2 << 20;
    uintptr_t first = ((uintptr_t)start + size - 1) & ~(size - 1);
    uintptr_t end = ((uintptr_t)start + bytes) & ~(size - 1);
    if (end > first) (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}
