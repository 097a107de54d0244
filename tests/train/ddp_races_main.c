/* SPDX-License-Identifier: Apache-2.0 */
/* Overlapped reductions of lists of vectors under ThreadSanitizer; of models: steps_races_main.c. */
#include "tests/train/ddp_toy.h"

/* Vectors with unused parameters, accumulation and spread ones. */
int main(void)
{
    for (size_t capacity = 0; capacity < 300; capacity += 60) {
        for (int native = 0; native < 2; native++) {
            toy t = {.n = 6,
                     .size = {30, 7, 40, 1, 12, 64},
                     .spread = {[1] = true, [3] = true},
                     .run.parallel = {.tp = 2, .dp = 2, .micro_batches = 2},
                     .run.numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                     .micro = 2,
                     .steps = 4,
                     .ddp = {.bucket_bytes = capacity, .find_unused = true},
                     .skips = {{0, 1}, {4, 4}}};
            if (toy_run(&t) != AR_OK) {
                printf("%s\n", ar_error_message());
                return 1;
            }
        }
    }
    return 0;
}
