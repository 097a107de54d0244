/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/plain.h"
#include "tests/support/test.h"

/* Groups made by split: who is in them, in which order, and that they work side by side. */
typedef struct group_run {
    int64_t got[16][4];
    int size[16], rank[16], inner_size[16], inner_rank[16];
    bool none[16];
    const char *problem;
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
    run->got[r][0] = (int64_t)1 << r;
    return sum_in(g, &run->got[r][0]);
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
            cr_assert_eq(run.got[even[i]][0], 1 << 2 | 1 << 4 | 1 << 8);
            cr_assert_eq(run.got[odd[i]][0], 1 << 1 | 1 << 5 | 1 << 7);
        }
        for (int r = 0; r < 10; r++)
            cr_assert_eq(run.none[r], r % 3 == 0);
    }
}

static ar_status rows_columns_and_a_group_of_a_group(ar_comm *c, void *arg)
{
    group_run *run = arg;
    const int r = ar_comm_rank(c);
    ar_comm *row = NULL, *column = NULL, *half = NULL;
    ar_status st = ar_comm_split(&row, c, r / 4, r);
    if (st == AR_OK)
        st = ar_comm_split(&column, c, r % 4, r);
    if (st == AR_OK)
        st = ar_comm_split(&half, row, ar_comm_rank(row) / 2, 0);
    for (int i = 0; i < 4; i++)
        run->got[r][i] = (int64_t)1 << r;
    for (int round = 0; round < 30 && st == AR_OK; round++) {
        for (int i = 0; i < 4; i++)
            run->got[r][i] = (int64_t)1 << r;
        st = sum_in(row, &run->got[r][0]);
        if (st == AR_OK)
            st = sum_in(column, &run->got[r][1]);
        if (st == AR_OK)
            st = sum_in(half, &run->got[r][2]);
        if (st == AR_OK)
            st = sum_in(c, &run->got[r][3]);
    }
    if (st == AR_OK) {
        run->inner_size[r] = ar_comm_size(half);
        run->inner_rank[r] = ar_comm_rank(half);
    }
    ar_comm_destroy(half);
    ar_comm_destroy(row);
    ar_comm_destroy(column);
    return st;
}

Test(groups, overlapping_and_nested_groups_work_side_by_side)
{
    for (int a = AR_SIM_AUTO; a <= AR_SIM_LAST; a++) {
        static group_run run;
        const ar_sim_options o = {.algorithm = (ar_sim_algorithm)a};
        const ar_status st = ar_sim_run(16, &o, rows_columns_and_a_group_of_a_group, &run, NULL);
        cr_assert_ok(st);
        for (int r = 0; r < 16; r++) {
            cr_assert_eq(run.got[r][0], (int64_t)0xf << (r / 4 * 4));
            cr_assert_eq(run.got[r][1], (int64_t)0x1111 << (r % 4));
            cr_assert_eq(run.got[r][2], (int64_t)0x3 << (r / 2 * 2));
            cr_assert_eq(run.got[r][3], 0xffff);
            cr_assert_eq(run.inner_size[r], 2);
            cr_assert_eq(run.inner_rank[r], r % 2);
        }
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
