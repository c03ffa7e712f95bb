// Reads memory as fast as the threads can: the limit that kernels are measured against.
#include "foretoken.h"

typedef uint64_t lanes __attribute__((vector_size(16)));

enum { PIECE = 1 << 20 };

typedef struct {
    const char *start;
    size_t bytes;
    uint64_t *sums;
} reading;

static void read_piece(void *context, int64_t item, int worker) {
    const reading *r = context;
    size_t first = (size_t)item * PIECE, end = first + PIECE < r->bytes ? first + PIECE : r->bytes;
    lanes sum[4] = {{0}};
    for (size_t at = first; at + 64 <= end; at += 64) {
        const lanes *line = (const lanes *)(r->start + at);
        __builtin_prefetch(r->start + at + 4096);
        for (int i = 0; i < 4; i++) sum[i] ^= line[i];
    }
    const lanes all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    r->sums[worker] ^= all[0] ^ all[1];
}

// XOR of the 8-byte words in [start, start + bytes); start aligned to 64.
FT_EXPORT uint64_t ft_read_memory(const void *start, size_t bytes) {
    uint64_t sums[FT_MOST_THREADS] = {0}, sum = 0;
    reading r = {start, bytes, sums};
    ft_parallel(read_piece, &r, (int64_t)((bytes + PIECE - 1) / PIECE));
    for (int i = 0; i < FT_MOST_THREADS; i++) sum ^= sums[i];
    return sum;
}
