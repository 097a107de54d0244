/* SPDX-License-Identifier: Apache-2.0 */
/* Overlapped reductions under ThreadSanitizer: lists of vectors, and models whose step goes through them. */
#include "support/match.h"
#include "tests/train/ddp_toy.h"

static int fail(const char *what)
{
    printf("%s: %s\n", what, ar_error_message());
    return 1;
}

/* Vectors with unused parameters, accumulation and spread ones. */
static int run_toys(void)
{
    for (size_t capacity = 0; capacity < 300; capacity += 60) {
        for (int native = 0; native < 2; native++) {
            toy t = {.n = 6,
                     .size = {30, 7, 40, 1, 12, 64},
                     .spread = {[1] = true, [3] = true},
                     .parallel = {.tp = 2, .dp = 2, .micro_batches = 2},
                     .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                     .micro = 2,
                     .steps = 4,
                     .ddp = {.bucket_bytes = capacity, .find_unused = true},
                     .skips = {{0, 1}, {4, 4}}};
            if (toy_run(&t) != AR_OK)
                return fail("vectors");
        }
    }
    return 0;
}

static int run_models(void)
{
    enum { SEQ = 8, BATCH = 4, STEPS = 2 };
    static const ar_parallel layouts[] = {{.dp = 2},
                                          {.tp = 2, .dp = 2, .sp = true, .micro_batches = 2},
                                          {.dp = 4, .dp_replicate = 2},
                                          {.pp = 2, .dp = 2, .micro_batches = 2}};
    const ar_config config = match_config(AR_ARCH_LLAMA, 2);
    int64_t ids[BATCH * SEQ];
    for (size_t i = 0; i < BATCH * SEQ; i++)
        ids[i] = (int64_t)(i * 7 % 11);
    const ar_batch one = {.batch = BATCH, .seq = SEQ, .input_ids = ids}, batch[STEPS] = {one, one};
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        for (int i = 0; i < 4; i++) {
            ari_cluster_result result;
            ari_cluster_options o = {.config = &config,
                                     .run.parallel = layouts[l],
                                     .batch = batch,
                                     .run.steps = STEPS,
                                     .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                     .run.clip = 1.0,
                                     .run.ddp = {.bucket_bytes = (size_t)(i / 2) * 3000},
                                     .run.numerics = i & 1 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                                     .run.threads = 1,
                                     .run.seed = 3};
            o.run.parallel.zero = layouts[l].dp_replicate > 1 ? 1 + (i + 1) % 3 : (i + (int)l) % 4;
            const ar_status st = ari_cluster_run(&result, &o);
            free(result.loss);
            free(result.reports);
            if (st != AR_OK)
                return fail("model");
        }
    }
    return 0;
}

int main(void)
{
    return run_toys() || run_models();
}
