/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models on 2, 4 and 8 ranks, directly and around the ring, with sequences and samples shared out too, compared
 * with the baseline: a plain program, so that
 * ThreadSanitizer can watch the ranks and the collectives under real layers. */
#include <stdio.h>

#include "support/match.h"

int main(void)
{
    static const int64_t ids[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 1, 2, 3, 5};
    static const int tps[] = {2, 4, 8, 0};
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_STACK; arch++) {
        for (int algorithm = AR_SIM_DIRECT; algorithm <= AR_SIM_RING; algorithm++) {
            for (int layout = 0; layout < 3; layout++) {
                match_case c = {.config = match_config((ar_arch)arch, 2), .batch = {2, 8, ids}, .seed = 3};
                c.algorithm = (ar_sim_algorithm)algorithm;
                c.sp = layout > 0;
                c.dp = layout == 2 ? 2 : 1;
                c.config.heads = c.config.kv_heads = 8;
                if (match(&c, tps, NULL) != AR_OK) {
                    printf("arch %d, algorithm %d, layout %d: %s\n", arch, algorithm, layout, ar_error_message());
                    return 1;
                }
            }
        }
    }
    return 0;
}
