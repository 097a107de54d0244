/* SPDX-License-Identifier: Apache-2.0 */
/* Many more ranks than cores: 64 of them train, compare, and fail as two do. */
#include "tests/support/asleep.h"
#include "tests/verify/support.h"

enum { RANKS = 64, BATCH = 8, SEQ = 16 };

/* Eight ways to split its heads, and two KV heads that eight ranks share. */
static const char model[] = LLAMA(256, 64, 96, 1, 8, 2, 8, false);

static ar_check_options steps_of(const char *folder, const ar_parallel *p, size_t layouts)
{
    ar_check_options o = check_layouts(folder, p, layouts, BATCH, SEQ);
    o.run.steps = 2;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.clip = 1.0;
    o.run.threads = 2;
    return o;
}

Test(many_ranks, have_the_bits_of_one)
{
    static const ar_parallel layouts[] = {{.dp = 8, .tp = 8}, {.dp = 8, .tp = 8, .sp = true}};
    OWNED(end_folder) char *folder = new_model(model);
    for (int algorithm = AR_SIM_DIRECT; algorithm <= AR_SIM_RING; algorithm++) {
        ar_check_options o = steps_of(folder, layouts, sizeof layouts / sizeof *layouts);
        if (small_only()) { /* one of them each */
            o.parallel += algorithm == AR_SIM_RING ? 1 : 0;
            o.layouts = 1;
        }
        o.run.sim.algorithm = (ar_sim_algorithm)algorithm;
        cr_assert_eq(ar_parallel_world(&layouts[0]), RANKS);
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        expect_same(r, algorithm == AR_SIM_RING ? "ring" : "direct");
    }
}

Test(many_ranks, all_hear_what_two_disagree_about)
{
    const ar_parallel layout = {.dp = 8, .tp = 8};
    OWNED(end_folder) char *folder = new_model(model);
    ar_check_options o = steps_of(folder, &layout, 1);
    o.run.fault = "collective_size_mismatch";
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    const ar_check_run *run = &r->run[0];
    size_t meet = 0, told = 0;
    cr_assert_eq(run->result, AR_CHECK_ERROR);
    cr_expect(strstr(run->error, "'loss max'"), "%s", run->error);
    for (int k = 0; k < RANKS; k++) {
        meet += strcmp(run->reports[k].status, "AR_ERR_MISMATCH") == 0;
        told += strcmp(run->reports[k].status, "AR_ERR_ABORTED") == 0;
    }
    cr_expect(meet == 8 && told == RANKS - 8, "%zu met, %zu were told", meet, told);
}

static ar_status one_is_late(ar_comm *c, void *arg)
{
    OWNED(ar_queue_destroy) ar_queue *q = arg;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    const char *wrong = ar_comm_rank(c) == RANKS / 2 ? others_stay_asleep() : "";
    return wrong[0] ? ar_error_set(AR_ERR_DATA, "%s", wrong) : ar_comm_barrier(c, q, "late");
}

/* Spinning or yielding, they would take all cores for as long as the last one does not come. */
Test(many_ranks, leave_the_cores_alone_while_they_wait)
{
    const ar_sim_options o = {.timeout_ns = UINT64_C(600000000000)};
    cr_assert_ok(ar_sim_run(RANKS, &o, one_is_late, NULL, NULL));
}
