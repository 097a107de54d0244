/* SPDX-License-Identifier: Apache-2.0 */
/* Objects that do not belong together: a step, its DDP object, its optimizer. Each would train, and wrongly. */
#include "anyrank/context.h"
#include "anyrank/train.h"
#include "support/match.h"
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

enum { B = 2, S = 4, MOST = 64 };
static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8};

typedef struct job {
    size_t left_out;   /* parameters that the DDP object does not hold, the last ones */
    int zero;          /* of the object */
    bool sharded;      /* the optimizer */
    bool of_other;     /* it has the shares of another object, of other buckets */
    bool not_given;    /* the step gets no object */
    bool frozen;       /* what is left out requires no gradient */
    bool weight_moved; /* any */
} job;

static ar_status make_other(ar_ddp **d, ar_ctx *ctx, ar_param **p, size_t n)
{
    ar_ddp_options o = ar_ddp_defaults();
    o.zero = 1;
    o.bucket_bytes = 0;
    return ar_ddp_create_params(d, ctx, "other", p, n, &o);
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    job *j = user;
    const ar_config c = match_config(AR_ARCH_GPT2, 1);
    const ar_optimizer_options options = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids};
    ar_ddp_options buckets = ar_ddp_defaults();
    ar_train_options step = {.parallel = {.dp = ar_comm_size(ar_ctx_dp(ctx))}, .clip = 1.0};
    ar_train_result result;
    ar_param *p[MOST];
    OWNED(ar_model_destroy) ar_model *m = NULL;
    OWNED(ar_ddp_destroy) ar_ddp *d = NULL;
    OWNED(ar_ddp_destroy) ar_ddp *other = NULL;
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    buckets.zero = j->zero;
    AR_TRY(ar_model_create(&m, ctx, &c, NULL));
    AR_TRY(ar_model_fresh(m, ctx, 1));
    const size_t n = ar_module_params(ar_model_module(m), p, MOST, false);
    for (size_t i = n - j->left_out; j->frozen && i < n; i++)
        p[i]->requires_grad = false;
    if (j->of_other) { /* one object at a time holds a parameter */
        AR_TRY(make_other(&other, ctx, p, n));
        AR_TRY(ar_optimizer_create_sharded(&o, ctx, other, &options));
        for (size_t i = 0; i < n; i++)
            p[i]->hooks = 0;
    }
    AR_TRY(ar_ddp_create_params(&d, ctx, "object", p, n - j->left_out, &buckets));
    if (!o)
        AR_TRY(j->sharded ? ar_optimizer_create_sharded(&o, ctx, d, &options)
                          : ar_optimizer_create(&o, ctx, p, n, &options));
    step.ddp = j->not_given ? NULL : d;
    const uint64_t version = p[0]->version;
    const ar_status st = ar_train_step(&result, m, ctx, o, &batch, 1, &step);
    if (ar_comm_rank(ar_ctx_dp(ctx)) == 0)
        j->weight_moved = p[0]->version != version;
    return st;
}

static ar_status run(job *j, int dp)
{
    const ar_run o = {.parallel.dp = dp};
    return rank_run(&o, rank_main, j);
}

static void expect_refused(job j, int dp, const char *says)
{
    cr_expect_refused(run(&j, dp), AR_ERR_ARG, says);
    cr_expect_not(j.weight_moved);
}

Test(ddp_refusals, an_object_over_part_of_the_parameters_that_train)
{
    for (int dp = 1; dp <= 2; dp++)
        expect_refused((job){.left_out = 2}, dp, "object does not hold transformer.ln_f.weight");
    job j = {.left_out = 2, .frozen = true};
    cr_expect_ok(run(&j, 2));
    cr_expect(j.weight_moved);
}

Test(ddp_refusals, an_object_that_the_step_is_not_given)
{
    for (int dp = 1; dp <= 2; dp++)
        expect_refused((job){.not_given = true}, dp, "transformer.wte.weight is in the buckets of object");
}

Test(ddp_refusals, an_optimizer_of_whole_parameters_for_shares_of_gradients)
{
    expect_refused((job){.zero = 1}, 2,
                   "the data-parallel ranks share out its gradient (ZeRO), but not this optimizer");
    job j = {.zero = 1, .sharded = true};
    cr_expect_ok(run(&j, 2));
    cr_expect(j.weight_moved);
}

Test(ddp_refusals, an_optimizer_of_other_shares)
{
    expect_refused((job){.zero = 1, .of_other = true}, 2, "both need the buckets of one DDP object, other");
}
