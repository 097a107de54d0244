/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters at the start: each data-parallel group gets its first rank's, and shards stay apart. */
#include "anyrank/context.h"
#include "anyrank/param.h"
#include "ref/layers/param_private.h"
#include "support/rank_run.h"
#include "support/scoped.h"
#include "tests/support/test.h"

enum { TP = 2, DP = 3, ROWS = 4, COLS = 2, OWN = ROWS / TP * COLS };

typedef struct job {
    float values[TP * DP][OWN];
    uint64_t versions[TP * DP];
} job;

/* Row i of the matrix as data-parallel rank d holds it before: 100d + 10i + column. */
static ar_status send(ar_ctx *ctx, ar_param *p, job *j)
{
    const int tp_rank = ar_comm_rank(ar_ctx_tp(ctx)), dp_rank = ar_comm_rank(ar_ctx_dp(ctx));
    const int rank = dp_rank * TP + tp_rank;
    float full[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++)
        full[i] = (float)(100 * dp_rank + 10 * (i / COLS) + i % COLS);
    AR_TRY(ar_param_set(p, ctx, full));
    const uint64_t version = p->version;
    AR_TRY(ari_params_broadcast(&p, 1, ctx));
    j->versions[rank] = p->version - version;
    return ar_ctx_download(ctx, j->values[rank], &p->value);
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    const size_t shape[2] = {ROWS, COLS};
    ar_layout layout;
    SCOPED(ar_param_fini) ar_param p = {0};
    AR_TRY(ar_layout_shard(&layout, 2, shape, 0, ar_comm_rank(ar_ctx_tp(ctx)), ar_comm_size(ar_ctx_tp(ctx))));
    AR_TRY(ar_param_init(&p, ctx, "matrix", &layout, false));
    return send(ctx, &p, user);
}

static void run(job *j)
{
    const ar_run o = {.parallel = {.tp = TP, .dp = DP}};
    cr_assert_ok(rank_run(&o, rank_main, j));
}

static const float shard[TP][OWN] = {{0, 1, 10, 11}, {20, 21, 30, 31}};

Test(broadcast, every_rank_has_the_first_ones_values_of_its_own_shard)
{
    job j = {0};
    run(&j);
    for (int r = 0; r < TP * DP; r++) {
        for (int i = 0; i < OWN; i++)
            cr_expect_eq(j.values[r][i], shard[r % TP][i], "rank %d, element %d", r, i);
        cr_expect_eq(j.versions[r], 1, "rank %d keeps what it made of the old values", r);
    }
}
