/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of models for ThreadSanitizer: transfers of pipelines, buckets, ZeRO's gathers and layers' collectives on queues
 * next to the passes, of steps that end well, in one loss, and of steps that a rank ends in the middle. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/match.h"
#include "verify/run/cluster_run.h"

enum { SEQ = 8, BATCH = 6, STEPS = 2, MOST = 8 };

static const ar_parallel layouts[] = {
    {.pp = 2, .micro_batches = 4},
    {.pp = 3, .micro_batches = 3, .schedule = AR_PP_GPIPE, .stages = {3, {1, 2, 1}}},
    {.pp = 2, .dp = 2, .micro_batches = 3, .schedule = AR_PP_INTERLEAVED, .virtual_stages = 2},
    {.pp = 2, .dp = 2, .tp = 2, .sp = true, .overlap = 2, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE},
    {.pp = 2, .dp = 2, .micro_batches = 2, .zero = 3},
    {.dp = 2, .micro_batches = 2, .zero = 1},
    {.tp = 2, .dp = 2, .sp = true, .micro_batches = 2, .zero = 2},
    {.dp = 4, .dp_replicate = 2, .micro_batches = 1, .zero = 3},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static ar_status fail_once(void *user, const ar_tap_event *e)
{
    int *left = user;
    if (e->pass != 'b' || strstr(e->name, ".h.2") == NULL || (*left)-- > 0)
        return AR_OK;
    return ar_error_set(AR_ERR_DATA, "no more of %s", e->name);
}

/* loss: of both steps. after: reports of a block until a rank fails; -1: none does. */
static ar_status run(float *loss, const ar_parallel *p, ar_numerics numerics, int after)
{
    const ar_config config = match_config(AR_ARCH_GPT2, 4);
    int left[MOST];
    int64_t ids[BATCH * SEQ];
    void *users[MOST];
    for (size_t i = 0; i < BATCH * SEQ; i++)
        ids[i] = (int64_t)(i * 7 % 11);
    for (int r = 0; r < MOST; r++) {
        left[r] = after;
        users[r] = &left[r];
    }
    const ar_batch one = {.batch = BATCH, .seq = SEQ, .input_ids = ids}, batch[STEPS] = {one, one};
    ari_cluster_result result;
    ari_cluster_options o = {.config = &config, .batch = batch, .run.steps = STEPS, .run.seed = 3};
    o.run.parallel = *p;
    o.run.numerics = numerics;
    o.run.threads = 1;
    o.run.clip = 1.0;
    o.run.ddp = (ar_ddp_options){.bucket_bytes = 1000, .find_unused = true};
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.tap = after < 0 ? NULL : fail_once;
    o.tap_user = users;
    const ar_status st = ari_cluster_run(&result, &o);
    if (st == AR_OK)
        memcpy(loss, result.loss, STEPS * sizeof *loss);
    free(result.loss);
    free(result.reports);
    return st;
}

int main(void)
{
    float first[STEPS], loss[STEPS];
    for (int i = 0; i < LAYOUTS; i++) {
        if (run(i == 0 ? first : loss, &layouts[i], AR_NUMERICS_EXACT, -1) != AR_OK) {
            printf("layout %d: %s\n", i, ar_error_message());
            return 1;
        }
        if (i > 0 && memcmp(first, loss, sizeof loss) != 0) {
            printf("layout %d: losses %a and %a, expected %a and %a\n", i, (double)loss[0], (double)loss[1],
                   (double)first[0], (double)first[1]);
            return 1;
        }
        if (run(loss, &layouts[i], AR_NUMERICS_NATIVE, -1) != AR_OK) {
            printf("layout %d, native: %s\n", i, ar_error_message());
            return 1;
        }
        if (run(loss, &layouts[i], AR_NUMERICS_EXACT, layouts[i].pp > 1 ? 3 : 0) != AR_ERR_DATA ||
            !strstr(ar_error_message(), layouts[i].pp > 1 ? "micro-batch " : "no more of ")) {
            printf("layout %d, where a rank fails: %s\n", i, ar_error_message());
            return 1;
        }
    }
    return 0;
}
