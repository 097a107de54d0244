/* SPDX-License-Identifier: Apache-2.0 */
/* A user's language model under layouts that share out positions, features, samples and layers: the same bits, and the
 * right gradients. */
#include "anyrank/check_module.h"
#include "support/own_lm.h"
#include "support/small.h"
#include "tests/support/test.h"

OWNER(ar_gradcheck_module_report, ar_gradcheck_module_report_destroy)

static ar_check_module_options options(const ar_parallel *layouts, size_t n)
{
    ar_check_module_options o = {.parallel = layouts, .layouts = n, .run = {.steps = 2, .clip = 1.0, .threads = 1}};
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    return o;
}

static void expect_same(const ar_check_report *r)
{
    for (size_t i = 0; i < r->runs; i++) {
        char text[96];
        ar_parallel_text(text, sizeof text, &r->run[i].parallel);
        cr_expect_eq(r->run[i].result, AR_CHECK_SAME, "%s: %s %s %s", text, r->run[i].first.tensor,
                     r->run[i].first.pattern, r->run[i].error ? r->run[i].error : "");
    }
}

Test(own_lm, positions_are_shared_out_with_the_same_bits)
{
    static const ar_parallel layouts[] = {{.tp = 2},
                                          {.tp = 2, .sp = true},
                                          {.tp = 4, .sp = true, .keep_gathered = true},
                                          {.cp = 2},
                                          {.cp = 4, .zigzag = true},
                                          {.cp = 2, .cp_inner = 2},
                                          {.cp = 2, .tp = 2, .sp = true},
                                          {.cp = 2, .dp = 2, .micro_batches = 2, .zero = 1},
                                          {.dp = 2, .tp = 2, .sp = true, .zero = 3}};
    const own_lm lm = {.tied = false};
    const ar_module_case c = own_lm_case(&lm);
    const ar_check_module_options o = options(layouts, sizeof layouts / sizeof *layouts);
    OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
    cr_assert_ok(ar_check_module(&r, &c, &o));
    expect_same(r);
}

Test(own_lm, gradients_agree_with_differences)
{
    const own_lm lm = {.tied = true};
    const ar_module_case c = own_lm_case(&lm);
    const ar_check_module_options o = options(NULL, 0);
    OWNED(ar_gradcheck_module_report_destroy) ar_gradcheck_module_report *r = NULL;
    char text[4096];
    cr_assert_ok(ar_gradcheck_module(&r, &c, &o));
    ar_gradcheck_module_text(r, text, sizeof text);
    cr_expect(r->ok, "%s", text);
}
