// llama.cpp's steps, one at a time, timed: what its own benchmarks do, but all in one process that takes
// turns with others.
//
//     llama_rows MODEL THREADS FLASH REPACK UBATCH CONTEXT SEQUENCES
//
// FLASH, REPACK: 1 or 0. It has a context for one sequence of up to PROMPT + CONTEXT tokens and one for SEQUENCES
// sequences of CONTEXT tokens and a few more; all are filled with CONTEXT tokens at first. A line
// `step SEQUENCES TOKEN ...` has the tokens of a step, shared among so many sequences, each of which wants
// logits; `prompt TOKEN ...` has a prompt whose last token does. The answer is a line with the seconds up to
// the largest logit of each such row, and its token. Steps leave no tokens behind.
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-cpu.h"
#include "llama.h"

enum { PROMPT = 2048, MORE = 32, LONGEST = 1 << 16 };

static int vocabulary;
static int chosen[PROMPT];

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void silent(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static void fail(const char *what) {
    fprintf(stderr, "llama_rows: %s\n", what);
    exit(1);
}

// Seconds of one batch: `count` tokens of `sequences` sequences from `start` on.
static double decode(struct llama_context *context, const llama_token *tokens, int count, int sequences, int start,
                     bool all) {
    struct llama_batch batch = llama_batch_init(count, 0, 1);
    const int each = count / sequences;
    for (int i = 0; i < count; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = start + i % each;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = i / each;
        batch.logits[i] = (int8_t)(all || i == count - 1);
    }
    batch.n_tokens = count;
    const double began = seconds();
    if (llama_decode(context, batch)) fail("a step failed");
    llama_synchronize(context);
    for (int i = all ? 0 : count - 1; i < count; i++) {
        const float *logits = llama_get_logits_ith(context, i);
        int most = 0;
        for (int token = 1; token < vocabulary; token++)
            if (logits[token] > logits[most]) most = token;
        chosen[i] = most;
    }
    const double taken = seconds() - began;
    llama_batch_free(batch);
    return taken;
}

static void fill(struct llama_context *context, int sequences, int length) {
    llama_token tokens[4096];
    for (int s = 0; s < sequences; s++) {
        llama_memory_seq_rm(llama_get_memory(context), s, -1, -1);
        struct llama_batch batch = llama_batch_init(length, 0, 1);
        for (int i = 0; i < length; i++) {
            tokens[i] = (7919 * i + 31 * s) % vocabulary;
            batch.token[i] = tokens[i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = s;
            batch.logits[i] = (int8_t)(i == length - 1);
        }
        batch.n_tokens = length;
        if (llama_decode(context, batch)) fail("filling failed");
        llama_batch_free(batch);
    }
    llama_synchronize(context);
}

int main(int argc, char **argv) {
    if (argc != 8) fail("MODEL THREADS FLASH REPACK UBATCH CONTEXT SEQUENCES");
    const int threads = atoi(argv[2]), flash = atoi(argv[3]), ubatch = atoi(argv[5]);
    const int length = atoi(argv[6]), sequences = atoi(argv[7]);
    llama_log_set(silent, NULL);
    llama_backend_init();
    struct llama_model_params loading = llama_model_default_params();
    loading.use_extra_bufts = atoi(argv[4]);
    struct llama_model *model = llama_model_load_from_file(argv[1], loading);
    if (!model) fail("the model cannot be loaded");
    vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct ggml_threadpool_params pooled = ggml_threadpool_params_default(threads);
    struct ggml_threadpool *pool = ggml_threadpool_new(&pooled);
    struct llama_context *contexts[2];
    for (int i = 0; i < 2; i++) {
        struct llama_context_params params = llama_context_default_params();
        params.n_ctx = (uint32_t)(i ? sequences * (length + MORE) : PROMPT + length + MORE);
        params.n_seq_max = (uint32_t)(i ? sequences : 1);
        params.n_batch = PROMPT;
        params.n_ubatch = (uint32_t)ubatch;
        params.n_threads = params.n_threads_batch = threads;
        params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        contexts[i] = llama_init_from_model(model, params);
        if (!contexts[i]) fail("there is no context");
        llama_attach_threadpool(contexts[i], pool, pool);
        fill(contexts[i], i ? sequences : 1, length);
    }
    static char line[LONGEST];
    static llama_token tokens[PROMPT];
    puts("{}");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        const bool is_step = !strncmp(line, "step ", 5);
        char *word = strtok(line, " \n");
        const int of = is_step ? atoi(strtok(NULL, " \n")) : 1;
        int count = 0;
        while ((word = strtok(NULL, " \n")) && count < PROMPT) tokens[count++] = atoi(word);
        struct llama_context *context = contexts[of > 1];
        if (!is_step) llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
        printf("%.9f", decode(context, tokens, count, of, is_step ? length : 0, is_step));
        for (int i = is_step ? 0 : count - 1; i < count; i++) printf(" %d", chosen[i]);
        puts("");
        fflush(stdout);
        for (int s = 0; is_step && s < of; s++) llama_memory_seq_rm(llama_get_memory(context), s, length, -1);
        if (!is_step) fill(context, 1, length);
    }
    return 0;
}
