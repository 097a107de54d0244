/* SPDX-License-Identifier: Apache-2.0 */
/* Loss scaling with an overflow and bf16 storage, on two by two ranks whose gradients are summed while the backward
 * pass runs: under ThreadSanitizer without a race, and with the same weights twice. */
#include <stdio.h>

#include "anyrank/train.h"
#include "tests/train/native_run.h"

static native_run first, second;

static native_run run_of(ar_parallel parallel, ar_loss_scaling *scaling)
{
    return (native_run){.run = {.parallel = parallel,
                                .steps = 3,
                                .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                .clip = 1.0,
                                .ddp = {.bucket_bytes = 2000},
                                .numerics = AR_NUMERICS_NATIVE,
                                .storage = AR_BF16},
                        .scaling = scaling,
                        .large = true};
}

static bool run_twice(ar_parallel parallel)
{
    ar_loss_scaling scaling = ar_loss_scaling_defaults(true);
    scaling.scale = 0x1p126;
    scaling.backoff = 0x1p-20;
    first = run_of(parallel, &scaling);
    second = run_of(parallel, &scaling);
    if (native_train(&first) != AR_OK || native_train(&second) != AR_OK) {
        fprintf(stderr, "%s\n", ar_error_message());
        return false;
    }
    const native_rank *a = &first.rank[1], *b = &second.rank[1];
    const bool same = a->n == b->n && memcmp(a->weights, b->weights, a->n * sizeof *a->weights) == 0;
    if (!same || !a->skipped[0] || a->updates != 2)
        fprintf(stderr, "weights %s, first step %s, %d updates\n", same ? "the same" : "differ",
                a->skipped[0] ? "left out" : "taken", (int)a->updates);
    return same && a->skipped[0] && a->updates == 2;
}

int main(void)
{
    const bool whole = run_twice((ar_parallel){.tp = 2, .dp = 2});
    const bool shares = run_twice((ar_parallel){.tp = 2, .dp = 2, .zero = 1});
    return whole && shares ? 0 : 1;
}
