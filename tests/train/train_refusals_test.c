/* SPDX-License-Identifier: Apache-2.0 */
/* What a training step refuses, and that nothing has changed then. */
#include "anyrank/context.h"
#include "anyrank/train.h"
#include "ref/train/train_private.h"
#include "support/bits.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 2, S = 4, MOST = 64, MOST_ELEMENTS = 4000, RANKS = 4 };
static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8};

typedef struct job {
    ar_train_options options; /* of the step */
    ar_batch batch;           /* all zero: of `ids` */
    size_t poisoned;          /* the parameter that holds an infinity, of all of them; SIZE_MAX: none */
    float before[RANKS][MOST_ELEMENTS], after[RANKS][MOST_ELEMENTS];
    size_t elements[RANKS];
    uint64_t versions[RANKS];
    ar_status status[RANKS];
    char message[RANKS][200];
} job;

static ar_status read_all(ar_ctx *ctx, float *out, size_t *elements, ar_param *const *p, size_t n)
{
    *elements = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t count = ar_tensor_count(&p[i]->value);
        if (*elements + count > MOST_ELEMENTS)
            return ar_error_set(AR_ERR_INTERNAL, "no room for %s", p[i]->name);
        AR_TRY(ar_ctx_download(ctx, out + *elements, &p[i]->value));
        *elements += count;
    }
    return AR_OK;
}

static uint64_t versions_of(ar_param *const *p, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += p[i]->version;
    return sum;
}

static ar_status poison(ar_ctx *ctx, ar_param *p)
{
    static const float bad = INFINITY;
    const size_t one = 1;
    ar_tensor first;
    AR_TRY(ar_tensor_view(&first, AR_F32, 1, &one, p->value.data));
    return ar_ctx_upload(ctx, &first, &bad);
}

/* The step's own error is a result here: every rank gets one, and all go on to the end. */
static ar_status try_step(ar_ctx *ctx, job *j, ar_model *m, ar_optimizer *o, ar_param *const *p, size_t n)
{
    const ar_batch usual = {.batch = B, .seq = S, .input_ids = ids}, batch = j->batch.batch ? j->batch : usual;
    const size_t r = (size_t)ar_comm_rank(ar_ctx_tp(ctx));
    ar_train_result result;
    if (j->poisoned < n)
        AR_TRY(poison(ctx, p[j->poisoned]));
    const uint64_t versions = versions_of(p, n);
    AR_TRY(read_all(ctx, j->before[r], &j->elements[r], p, n));
    j->status[r] = ar_train_step(&result, m, ctx, o, &batch, 3, &j->options);
    snprintf(j->message[r], sizeof j->message[r], "%s", j->status[r] == AR_OK ? "" : ar_error_message());
    j->versions[r] = versions_of(p, n) - versions;
    return read_all(ctx, j->after[r], &j->elements[r], p, n);
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    const ar_config c = match_config(AR_ARCH_GPT2, 1);
    const ar_optimizer_options options = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    ar_param *p[MOST];
    OWNED(ar_model_destroy) ar_model *m = NULL;
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    AR_TRY(ar_model_create(&m, ctx, &c, NULL));
    AR_TRY(ar_model_fresh(m, ctx, 1));
    const size_t n = ar_module_params(ar_model_module(m), p, MOST, false);
    AR_TRY(ar_optimizer_create(&o, ctx, p, n, &options));
    AR_TRY(try_step(ctx, user, m, o, p, n));
    return ari_optimizer_steps(o) > 1 ? ar_error_set(AR_ERR_INTERNAL, "more than one step") : AR_OK;
}

static void run(job *j, int tp)
{
    const ar_run o = {.parallel.tp = tp};
    cr_assert_ok(rank_run(&o, rank_main, j));
}

static void expect_refused(const job *j, int ranks, ar_status st, const char *message)
{
    for (int r = 0; r < ranks; r++) {
        cr_expect_eq(j->status[r], st, "rank %d: %s", r, ar_status_name(j->status[r]));
        cr_expect(strstr(j->message[r], message), "rank %d: '%s' does not say '%s'", r, j->message[r], message);
        cr_expect_eq(j->versions[r], 0, "rank %d", r);
        cr_expect_eq(first_different_bits(j->after[r], j->before[r], j->elements[r]), j->elements[r]);
    }
}

Test(train_refusals, a_gradient_norm_that_is_not_finite_changes_no_weight)
{
    for (int tp = 1; tp <= 2; tp++) {
        static job j;
        j = (job){.options = {.parallel = {.tp = tp}, .clip = 1.0}, .poisoned = 3};
        run(&j, tp);
        expect_refused(&j, tp, AR_ERR_DATA, "the gradient norm is not finite at step 3; no weight was changed");
    }
}

Test(train_refusals, without_clipping_such_gradients_reach_the_weights)
{
    static job j = {.options = {.parallel = {.tp = 2}}, .poisoned = 3};
    run(&j, 2);
    cr_expect_eq(j.status[0], AR_OK, "%s", j.message[0]);
    cr_expect_gt(j.versions[0], 0);
}

Test(train_refusals, a_layout_that_is_not_the_contexts_is_refused)
{
    static const ar_train_options wrong[] = {{.parallel = {.tp = 4}},
                                             {.parallel = {.tp = 2, .dp = 2}},
                                             {.parallel = {.tp = 2, .cp = 2}},
                                             {.parallel = {.tp = 2, .cp_inner = 2}},
                                             {.parallel = {.tp = 2, .sp = true}}};
    static const char *const says[] = {"layout tp=4 in a context of tp=2", "layout dp=2 tp=2 in a context of tp=2",
                                       "layout cp=2 tp=2 in a context of tp=2",
                                       "inner 2 in a context whose inner group has 1 ranks",
                                       "layout tp=2 sp in a context of tp=2"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        static job j;
        j = (job){.options = wrong[i], .poisoned = SIZE_MAX};
        run(&j, 2);
        expect_refused(&j, 2, AR_ERR_ARG, says[i]);
    }
}

Test(train_refusals, a_batch_without_input_or_with_the_mask_of_another_is_refused)
{
    static const float mask[3 * S * S];
    static job j;
    j = (job){.options = {.parallel = {.tp = 2}}, .poisoned = SIZE_MAX, .batch = {.batch = B, .seq = S}};
    run(&j, 2);
    expect_refused(&j, 2, AR_ERR_ARG, "takes its input from the batch, which has none");
    j.batch =
        (ar_batch){.batch = B, .seq = S, .input_ids = ids, .additive_mask = mask, .mask_batch = 3, .mask_heads = 1};
    run(&j, 2);
    expect_refused(&j, 2, AR_ERR_SHAPE, "additive_mask is [3, 1, s, s]");
    j.batch.mask_batch = 1;
    j.batch.mask_heads = 3;
    run(&j, 2);
    expect_refused(&j, 2, AR_ERR_SHAPE, "additive_mask has 3 heads, expected 1 or ");
}

Test(train_refusals, a_largest_norm_below_0_or_nan_is_refused)
{
    static const double wrong[] = {-1.0, NAN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        static job j;
        j = (job){.options = {.parallel = {.tp = 1}, .clip = wrong[i]}, .poisoned = SIZE_MAX};
        run(&j, 1);
        expect_refused(&j, 1, AR_ERR_ARG, "the largest gradient norm is");
    }
}
