/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "support/bits.h"
#include "tests/support/test.h"
#include "tests/train/native_run.h"

static const ar_parallel native_layouts[] = {{.tp = 1}, {.dp = 2}, {.tp = 2, .dp = 2}, {.dp = 2, .zero = 1}};
enum { NATIVE_LAYOUTS = sizeof native_layouts / sizeof *native_layouts };

/* With AdamW and clipping. */
static inline native_run native_run_of(ar_parallel parallel, int steps)
{
    return (native_run){.run = {.parallel = parallel,
                                .steps = (uint64_t)steps,
                                .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                .clip = 1.0,
                                .ddp = ar_ddp_defaults(),
                                .numerics = AR_NUMERICS_NATIVE}};
}

static inline void native_must(native_run *run)
{
    const ar_status st = native_train(run);
    cr_assert_ok(st);
}

static inline void native_expect_same_weights(const native_rank *a, const native_rank *b, const char *what)
{
    cr_assert(a->n == b->n && a->n > 0, "%s", what);
    cr_expect_eq(first_different_bits(a->weights, b->weights, a->n), a->n, "%s", what);
}
