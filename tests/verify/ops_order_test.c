/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations in the order of micro-batches and schedules, beside the list that visits what is the
 * same once: the same sums. Random layouts are compared with what runs record in random_layouts_test. */
#include "ref/models/parallel_private.h"
#include "support/row.h"
#include "tests/verify/ops_find.h"
#include "verify/check/check_run.h"

typedef struct sums {
    size_t passes, calls, elements;
    double multiply_adds;
} sums;

static ar_status add_sums(void *user, const ari_operation *op)
{
    sums *s = user;
    s->passes += op->kind == ARI_OPERATION_EMBEDDING ? op->times : 0;
    s->calls += (size_t)op->calls * op->times;
    s->multiply_adds += op->multiply_adds * (double)op->times;
    for (int i = 0; i < op->calls; i++)
        s->elements += op->call[i].elements * op->times;
    return AR_OK;
}

/* Every rank's sums of its list, in order and visited once. */
static void expect_same_sums(ari_step_case t)
{
    char layout[160];
    t.run.ddp = ar_ddp_defaults();
    ari_parallel_text(layout, sizeof layout, &t.run.parallel);
    for (int rank = 0; rank < ar_parallel_world(&t.run.parallel); rank++) {
        sums each = {0}, once = {0};
        cr_assert_ok(ari_operations(&t, ARI_OPS_STEP, rank, add_sums, &each));
        cr_assert_ok(ari_operations(&t, ARI_OPS_ONCE, rank, add_sums, &once));
        cr_expect_gt(each.elements, 0);
        cr_expect(each.passes == once.passes && each.calls == once.calls && each.elements == once.elements &&
                      each.multiply_adds == once.multiply_adds,
                  "%s, batch %zu, rank %d: %zu passes, %zu calls of %zu elements; once: %zu, %zu, %zu", layout,
                  t.run.batch, rank, each.passes, each.calls, each.elements, once.passes, once.calls, once.elements);
    }
}

/* 11 samples on 2 ranks, 6 and 5, in 4 micro-batches each: 2+2+1+1 and 2+1+1+1; and some that are empty. */
Test(ops_order, micro_batches_that_do_the_same_can_be_visited_once)
{
    const ar_config c = config_of(LLAMA(31, 24, 36, 2, 24, 12, 4, false));
    const size_t batches[] = {11, 5, 1};
    for (size_t i = 0; i < 3 * 4; i++) {
        const size_t order = i % 4;
        const ar_parallel p = {.tp = 2, .dp = 2, .sp = true, .micro_batches = 4, .forward_first = order % 2 != 0};
        expect_same_sums(case_of(&c, p, batches[i / 4], 12, order < 2 ? AR_NUMERICS_EXACT : AR_NUMERICS_NATIVE));
    }
}

/* A schedule cuts passes in two, and has another order; it neither adds calls nor leaves any out, up to the step's
 * end. */
Test(ops_order, schedules_have_the_same_calls_in_another_order)
{
    const ar_config c = config_of(LLAMA(31, 24, 36, 4, 24, 12, 4, true));
    for (size_t i = 0; i < AR_PP_SCHEDULES * 4; i++) {
        ar_parallel p = ROW(.pp = 2, .tp = 2, .dp = 2, .sp = true, .overlap = 3, .micro_batches = 4,
                            .schedule = (ar_pp_schedule)(i % AR_PP_SCHEDULES), .zero = (int)(i / AR_PP_SCHEDULES));
        p.virtual_stages = p.schedule == AR_PP_INTERLEAVED ? 2 : 1;
        expect_same_sums(case_of(&c, p, 11, 12, AR_NUMERICS_EXACT));
    }
}

/* Two ranks add up the gradients' norm where one clips. */
static const char *cause_of_calls(double clip_of_run, double clip_of_list)
{
    const ar_config c = config_of(STACK(31, 24, 36, 1, 24, 4));
    const int64_t tokens[24] = {0};
    const ar_batch batch = {.batch = 2, .seq = 12, .input_ids = tokens};
    const char *cause = NULL;
    ari_cluster_result result;
    ari_cluster_options o = ROW(.config = &c, .batch = &batch,
                                .run = {.parallel = {.tp = 2},
                                        .batch = 2,
                                        .seq = 12,
                                        .steps = 1,
                                        .clip = clip_of_run,
                                        .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                        .ddp = ar_ddp_defaults(),
                                        .threads = 1});
    cr_assert_ok(ar_trace_create(&o.run.sim.trace));
    cr_assert_ok(ari_cluster_run(&result, &o));
    o.run.clip = clip_of_list;
    cr_expect_eq(ari_recorded_calls(&cause, NULL, &o, o.run.sim.trace) == AR_OK, clip_of_run == clip_of_list);
    cr_expect(clip_of_run >= clip_of_list || strstr(ar_error_message(), "rank 0: the layout has all_reduce"), "%s",
              ar_error_message());
    free(result.loss);
    ar_trace_destroy(o.run.sim.trace);
    return cause;
}

Test(ops_order, a_collective_more_or_less_than_the_lists_is_named)
{
    cr_expect_null(cause_of_calls(0.1, 0.1));
    cr_expect_str_eq(cause_of_calls(0.1, 0.0), "collective_added");
    cr_expect_str_eq(cause_of_calls(0.0, 0.1), "collective_left_out");
}
