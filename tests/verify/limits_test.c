/* SPDX-License-Identifier: Apache-2.0 */
/* Where a check must not say more than it knows: memory that ran out, errors that cannot be measured, angles that have
 * no sine, shards of different sizes. */
#include "tests/verify/support.h"

#include "verify/check/check_run.h"
#include "verify/run/run.h"

static const int64_t ids[] = {3, 1, 256, 128, 5, 9, 129, 6, 64, 3};

static ar_status body_without_memory(void *user, ar_ctx *ctx)
{
    (void)user, (void)ctx;
    return ar_error_set(AR_ERR_MEMORY, "no memory for a test");
}

Test(limits, memory_that_runs_out_in_a_rank_is_no_result_of_the_layout)
{
    ar_config c = config_of(tiny_models[TINY_STACK]);
    const ar_batch batch = {.batch = 2, .seq = 5, .input_ids = ids};
    SCOPED(ari_reference_fini) ari_reference ref = reference_of(&c, &batch);
    ari_cluster_options o = cluster_of(&c, &batch, 2);
    o.body = body_without_memory;
    ar_check_run run = {0};
    cr_expect_eq(ari_check_run(&run, &ref, &o), AR_ERR_MEMORY);
    cr_expect(strstr(ar_error_message(), "tp=2") && strstr(ar_error_message(), "no memory for a test"), "%s",
              ar_error_message());
    cr_expect_null(strchr(ar_error_message(), '\n'), "more than one line: %s", ar_error_message());
    cr_expect(!run.error && !run.reports && run.result != AR_CHECK_ERROR);
}

#define STACK_OF(range, eps)                                                                                                \
    "{\"model_type\": \"anyrank-stack\", \"vocab_size\": 257, \"hidden_size\": 16, \"intermediate_size\": 24, "             \
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"max_position_embeddings\": 128, \"initializer_range\": " range \
    ", \"layer_norm_eps\": " eps "}"

/* Rows of zeros without eps: 0/0 in the first norm. */
Test(limits, a_baseline_without_a_gradient_norm_says_where_that_began)
{
    const int tp = 1;
    ar_check_report *r = NULL;
    OWNED(end_folder) char *folder = new_model(STACK_OF("0.0", "0.0"));
    ar_check_options o = check_of(folder, &tp, 1, 2, 6);
    o.run.steps = 1;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    o.run.clip = 1.0;
    cr_expect_refused(ar_check(&r, &o), AR_ERR_DATA, "gradient norm of step 1");
    cr_expect_says("the first tensor that is not finite is layers.0.ln1:fwd of step 1");
}

/* What a check says of its error against binary64. */
static double error_of(const char *json)
{
    const int tp = 1;
    OWNED(end_folder) char *folder = new_model(json);
    ar_check_options o = check_of(folder, &tp, 1, 2, 6);
    o.skip_f64 = false;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    const double error = r->max_error_vs_f64;
    return error;
}

Test(limits, an_error_that_cannot_be_measured_is_not_told_as_zero)
{
    const double ordinary = error_of(STACK_OF("0.02", "1e-5")), both = error_of(STACK_OF("0.0", "0.0"));
    cr_expect(ordinary > 0.0 && ordinary < 1e-5, "%g", ordinary);
    cr_expect(isnan(both), "rows of zeros without eps are NaN in both baselines, the error is told as %g", both);
}

/* A sine of such an angle is not defined: the baseline's would be NaN, and every rank would stop. */
Test(limits, rotary_angles_of_two_to_the_twenty_are_refused)
{
    static const struct {
        double theta, factor;
        size_t seq;
        bool fits;
    } cases[] = {{1e4, 1.0, 1u << 20, true},  {1e4, 1.0, (1u << 20) + 1, false}, {1e4, 2.0, (1u << 20) + 1, true},
                 {1e-3, 1.0, 2, true},        {1e-3, 1.0, 1u << 20, false},      {1e-300, 1.0, 1, false},
                 {1e300, 1.0, 1u << 20, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ar_config c = config_of(tiny_models[TINY_LLAMA]);
        c.rope = (ar_rope){.kind = AR_ROPE_LINEAR, .theta = cases[i].theta, .factor = cases[i].factor};
        c.max_positions = SIZE_MAX;
        const ar_status st = ari_run_check_positions(&c, cases[i].seq);
        cr_expect_eq(st, cases[i].fits ? AR_OK : AR_ERR_CONFIG, "theta %g, factor %g, %zu positions: %s",
                     cases[i].theta, cases[i].factor, cases[i].seq, ar_status_name(st));
    }
    const ar_config without = config_of(tiny_models[TINY_STACK]);
    cr_expect_ok(ari_run_check_positions(&without, 1u << 24));
}
