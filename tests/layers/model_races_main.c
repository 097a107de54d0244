/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models on 2, 4 and 8 ranks, directly and around the ring, with sequences and samples shared out too, and
 * sequences over context-parallel ranks, compared with the baseline: a plain program, so that ThreadSanitizer can watch
 * the ranks, their queues and the collectives under real layers. */
#include <stdio.h>

#include "support/match.h"

static const int64_t ids[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 1, 2, 3, 5};

static bool same(ar_arch arch, ar_sim_algorithm algorithm, const ar_parallel *layout, const int *tps)
{
    match_case c = {.config = match_config(arch, 2),
                    .batch = {.batch = 2, .seq = 8, .input_ids = ids},
                    .run = {.parallel = *layout, .sim.algorithm = algorithm},
                    .seed = 3};
    c.config.heads = c.config.kv_heads = 8;
    if (match(&c, tps, NULL) == AR_OK)
        return true;
    printf("arch %d, algorithm %d, sp %d dp %d cp %d: %s\n", (int)arch, (int)algorithm, layout->sp, layout->dp,
           layout->cp, ar_error_message());
    return false;
}

int main(void)
{
    static const int tps[] = {2, 4, 8, 0}, few[] = {1, 2, 0};
    static const ar_parallel layouts[] = {{.sp = false}, {.sp = true}, {.sp = true, .dp = 2, .overlap = 2}};
    static const ar_parallel contexts[] = {{.cp = 2, .zigzag = true}, {.cp = 4, .cp_inner = 2, .sp = true}};
    bool ok = true;
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_STACK && ok; arch++) {
        for (int algorithm = AR_SIM_DIRECT; algorithm <= AR_SIM_RING && ok; algorithm++) {
            for (size_t i = 0; i < sizeof layouts / sizeof *layouts && ok; i++)
                ok = same((ar_arch)arch, (ar_sim_algorithm)algorithm, &layouts[i], tps);
            for (size_t i = 0; i < sizeof contexts / sizeof *contexts && ok; i++)
                ok = same((ar_arch)arch, (ar_sim_algorithm)algorithm, &contexts[i], few);
        }
    }
    return ok ? 0 : 1;
}
