/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/comm.h"
#include "ref/comm/call.h"
#include "ref/comm/rendezvous_impl.h"
#include "tests/sim/plain.h"
#include "tests/support/test.h"

/* Groups made by split: who is in them, in which order. That they work side by side is random_main.c's. */
typedef struct group_run {
    int64_t got[10];
    int size[10], rank[10];
    bool none[10];
} group_run;

static ar_status sum_in(ar_comm *c, int64_t *x)
{
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    return ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, 1, AR_I64, AR_SUM, "group");
}

static ar_status split_by_color_and_key(ar_comm *c, void *arg)
{
    group_run *run = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    /* Ranks 0 mod 3: none. The others by parity of r, in falling order of rank, ties (key 0) by rank. */
    AR_TRY(ar_comm_split(&g, c, r % 3 == 0 ? -1 : r % 2, r < 6 ? -r : 0));
    run->none[r] = !g;
    if (!g)
        return AR_OK;
    run->size[r] = ar_comm_size(g);
    run->rank[r] = ar_comm_rank(g);
    run->got[r] = (int64_t)1 << r;
    return sum_in(g, &run->got[r]);
}

Test(groups, ranks_of_one_color_are_ordered_by_key_then_rank)
{
    for (int a = AR_SIM_AUTO; a <= AR_SIM_LAST; a++) {
        static group_run run;
        const ar_sim_options o = {.algorithm = (ar_sim_algorithm)a};
        cr_assert_ok(ar_sim_run(10, &o, split_by_color_and_key, &run, NULL));
        /* even: 2, 4, 8 with keys -2, -4, 0; odd: 1, 5, 7 with keys -1, -5, 0. */
        const int even[] = {4, 2, 8}, odd[] = {5, 1, 7};
        for (int i = 0; i < 3; i++) {
            cr_assert_eq(run.rank[even[i]], i);
            cr_assert_eq(run.rank[odd[i]], i);
            cr_assert_eq(run.size[even[i]], 3);
            cr_assert_eq(run.got[even[i]], 1 << 2 | 1 << 4 | 1 << 8);
            cr_assert_eq(run.got[odd[i]], 1 << 1 | 1 << 5 | 1 << 7);
        }
        for (int r = 0; r < 10; r++)
            cr_assert_eq(run.none[r], r % 3 == 0);
    }
}

static ar_status many_splits(ar_comm *c, void *arg)
{
    (void)arg;
    const int r = ar_comm_rank(c);
    for (int i = 0; i < 200; i++) {
        ar_comm *g = NULL;
        AR_TRY(ar_comm_split(&g, c, (r + i) % 3, -r));
        int64_t x = 1;
        const ar_status st = sum_in(g, &x);
        const bool right = x == ar_comm_size(g);
        ar_comm_destroy(g);
        AR_TRY(st);
        if (!right)
            return ar_error_set(AR_ERR_DATA, "split %d: %lld", i, (long long)x);
    }
    return AR_OK;
}

Test(groups, splitting_again_and_again_keeps_nothing)
{
    cr_assert_ok(ar_sim_run(5, NULL, many_splits, NULL, NULL));
}

static ar_status destroy_the_world(ar_comm *c, void *arg)
{
    (void)arg;
    int64_t x = 1;
    ar_comm_destroy(c); /* belongs to the run: nothing happens */
    return sum_in(c, &x);
}

Test(groups, the_communicator_of_the_run_survives_a_destroy)
{
    cr_assert_ok(ar_sim_run(2, NULL, destroy_the_world, NULL, NULL));
}

static ar_status run_in_a_run(ar_comm *c, void *arg)
{
    int64_t x = 1;
    AR_TRY(sum_in(c, &x));
    if (arg)
        AR_TRY(ar_sim_run(3, NULL, run_in_a_run, NULL, NULL));
    return sum_in(c, &x);
}

Test(groups, worlds_inside_a_rank_are_worlds_of_their_own)
{
    int inner = 1;
    cr_assert_ok(ar_sim_run(2, NULL, run_in_a_run, &inner, NULL));
}

/* Its work may be a queue's, which goes on without it: who waits for a third member waits for that one. */
Test(groups, a_rank_that_has_entered_its_last_call_may_return_before_the_others_come)
{
    enum { RANKS = 3, WAIT_NS = 20000000 };
    ari_world *w = NULL;
    const ari_call call = {.kind = ARI_BARRIER, .tag = "last"};
    ari_member waiter;
    cr_assert_ok(ari_world_create(&w, RANKS, WAIT_NS, NULL));
    ari_group *g = ari_world_group(w);
    ari_member_init(&waiter, g, 1);
    atomic_store(&g->slot[0].entered, 1);
    atomic_fetch_add(&g->gate, 1);
    ari_world_returned(w, 0, AR_OK, "");
    cr_expect_eq(ari_member_enter(&waiter, NULL, &call, NULL), AR_ERR_TIMEOUT);
    cr_expect(strstr(ari_world_error(w), "for rank 2"), "%s", ari_world_error(w));
    ari_world_destroy(w);
}
