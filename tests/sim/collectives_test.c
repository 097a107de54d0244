/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/batch.h"
#include "tests/support/small.h"
#include "tests/support/test.h"

/* What the random collectives of random_main.c, which are held to their definitions bit for bit, can see at all; and more
 * ranks than those have. */

Test(collectives, the_order_of_ranks_shows_in_the_data)
{
    /* If the order of additions did not matter for these inputs, no test could see a wrong one. */
    float x[8], forward, backward;
    int differing = 0;
    for (size_t i = 0; i < 100; i++) {
        for (int r = 0; r < 8; r++) {
            float all[100];
            plain_fill(all, AR_F32, 77, r, 100);
            x[r] = all[i];
        }
        forward = x[1] + x[2];
        backward = x[0] + x[1];
        for (int s = 3; s <= 8; s++) {
            forward += x[s % 8];
            backward += x[s - 1];
        }
        differing += first_difference(&forward, &backward, sizeof forward) >= 0;
    }
    cr_assert(differing > 20, "only %d of 100 sums depend on the order", differing);
}

Test(collectives, the_checker_rejects_one_flipped_bit_anywhere)
{
    SCOPED(case_fini) coll_case k = {.kind = ALL_REDUCE, .dtype = AR_F32, .op = AR_SUM, .n = 3, .count = 5};
    batch b = {.k = &k, .n = 1};
    char why[256];
    case_init(&k, 1);
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT};
    cr_assert_ok(ar_sim_run(3, &o, run_batch, &b, NULL));
    cr_assert(case_holds(&k, why, sizeof why), "%s", why);
    for (int r = 0; r < 3; r++) {
        for (size_t bit = 0; bit < (GUARD + 20 + GUARD) * 8; bit++) {
            k.store[r][bit / 8] ^= (unsigned char)(1u << bit % 8);
            cr_assert(!case_holds(&k, why, sizeof why), "rank %d bit %zu of the output or its guards", r, bit);
            k.store[r][bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
        k.in[r][7] ^= 1;
        cr_assert(!case_holds(&k, why, sizeof why), "rank %d: a changed input", r);
        k.in[r][7] ^= 1;
    }
}

/* --- many ranks --------------------------------------------------------------------------------------------------- */

static ar_status sum_ranks(ar_comm *c, void *arg)
{
    int64_t *sums = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    ar_status st = AR_OK;
    int64_t x[100];
    for (int round = 0; round < by_scale(4, 20, 20) && st == AR_OK; round++) {
        for (int i = 0; i < 100; i++)
            x[i] = (int64_t)r * 1000 + i + round;
        st = ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, 100, AR_I64, AR_SUM, "many");
    }
    sums[r] = x[99];
    return st;
}

Test(collectives, far_more_ranks_than_cores_complete)
{
    for (int algorithm = AR_SIM_AUTO; algorithm <= AR_SIM_LAST; algorithm++) {
        int64_t sums[64] = {0};
        const ar_sim_options o = {.algorithm = (ar_sim_algorithm)algorithm};
        cr_assert_ok(ar_sim_run(64, &o, sum_ranks, sums, NULL));
        for (int r = 0; r < 64; r++)
            cr_assert_eq(sums[r], 63 * 64 / 2 * 1000 + 64 * (99 + by_scale(4, 20, 20) - 1));
    }
}
