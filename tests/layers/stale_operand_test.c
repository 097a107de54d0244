/* SPDX-License-Identifier: Apache-2.0 */
/* Packed weights are kept from step to step. Weights set from outside between two steps must reach the second one,
 * forward and backward, and so must those of a tied parameter. */
#include "anyrank/param.h"
#include "ref/context/context_private.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/module_private.h"
#include "ref/models/model_private.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 2, S = 5 };
static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};

typedef struct stale_job {
    const match_case *c;
    match_weights *before, *after;
    const char *only;     /* the one weight that is set; NULL: all */
    bool behind_its_back; /* the mistake: new values without a new version */
    float loss[4];
} stale_job;

static ar_status write_values(ar_model *m, ar_ctx *ctx, const stale_job *j)
{
    enum { MOST = 64 };
    ar_param *p[MOST];
    const size_t n = ar_module_params(ar_model_module(m), p, MOST, false);
    for (size_t i = 0; i < n && i < MOST; i++) {
        const uint64_t version = p[i]->version;
        const size_t count = ari_volume(p[i]->layout.shape, p[i]->layout.ndim); /* a rank may have a part of it */
        if (!j->only || strcmp(p[i]->name, j->only) == 0)
            AR_TRY(ar_param_set(p[i], ctx, match_weights_find(j->after, p[i]->name, count)));
        if (j->behind_its_back)
            p[i]->version = version;
        AR_TRY(ari_tap(ctx, p[i]->name, 'i', &p[i]->value, &p[i]->layout));
    }
    return AR_OK;
}

/* `quiet` is the first step's context, over the same device and group, to which nobody listens. */
static ar_status two_steps(ar_ctx *ctx, ar_ctx *quiet, stale_job *j, ar_model *m, ar_saved *saved)
{
    AR_TRY(ari_model_set(m, quiet, match_weights_find, j->before));
    AR_TRY(ari_model_forward(m, quiet, saved, &j->c->batch));
    AR_TRY(ari_model_backward(m, quiet, saved, &j->c->batch));
    AR_TRY(ari_model_zero_grad(m, quiet));
    ari_saved_clear(saved);
    ar_ctx_end_step(quiet);
    if (j->behind_its_back || j->only)
        AR_TRY(write_values(m, ctx, j));
    else
        AR_TRY(ari_model_set(m, ctx, match_weights_find, j->after));
    AR_TRY(ari_model_forward(m, ctx, saved, &j->c->batch));
    AR_TRY(ari_model_loss(m, ctx, &j->loss[rank_of(ctx)], ari_batch_targets(&j->c->batch)));
    AR_TRY(ari_model_backward(m, ctx, saved, &j->c->batch));
    return ar_module_reduce_grads(ar_model_module(m), ctx);
}

static ar_status stale_rank(ar_ctx *ctx, void *user)
{
    stale_job *j = user;
    const ar_ctx_options o = {.device = ar_ctx_device(ctx), .tp = ar_ctx_tp(ctx)};
    OWNED(ar_ctx_destroy) ar_ctx *quiet = NULL;
    OWNED(ar_model_destroy) ar_model *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    AR_TRY(ar_ctx_create(&quiet, &o));
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_model_create(&m, ctx, &j->c->config, NULL));
    return two_steps(ctx, quiet, j, m, saved);
}

/* The second step against a baseline that never saw the first one's weights. */
static ar_status second_step(ar_arch arch, int tp, bool behind_its_back)
{
    match_case c = {.config = match_config(arch, 2), .batch = {B, S, ids}, .seed = 1};
    SCOPED(match_weights_fini) match_weights before = {.seed = 1}, after = {.seed = 2};
    SCOPED(ari_reference_fini) ari_reference unused = {0}, r = {0};
    c.config.kv_heads = 4;
    cr_assert_ok(match_baseline(&c, &before, &unused));
    cr_assert_ok(match_baseline(&c, &after, &r));
    stale_job j = {.c = &c, .before = &before, .after = &after, .behind_its_back = behind_its_back};
    return match_taps(&r, &(ar_run){.parallel.tp = tp}, stale_rank, &j, j.loss);
}

Test(stale_operand, second_step_uses_the_weights_set_between)
{
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_STACK; arch++) {
        for (int tp = 1; tp <= 4; tp *= 2)
            cr_assert_eq(second_step((ar_arch)arch, tp, false), AR_OK, "arch %d: %s", arch, ar_error_message());
    }
}

typedef struct one_weight {
    match_case c;
    match_weights before, after, other; /* after: as before, but for one of `other` */
} one_weight;

static ar_status set_one(one_weight *o, size_t i, int tp)
{
    float *const usual = o->after.at[i].values;
    SCOPED(ari_reference_fini) ari_reference r = {0};
    o->after.at[i].values = o->other.at[i].values;
    stale_job j = {.c = &o->c, .before = &o->before, .after = &o->after, .only = o->after.at[i].name};
    ar_status st = match_baseline(&o->c, &o->after, &r);
    if (st == AR_OK)
        st = match_taps(&r, &(ar_run){.parallel.tp = tp}, stale_rank, &j, j.loss);
    o->after.at[i].values = usual;
    return st;
}

/* Several weights are packed into one operand, which is stale if any of them has changed. */
Test(stale_operand, one_weight_alone_set_between_reaches_the_second_step)
{
    for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_STACK; arch++) {
        one_weight o = {{.config = match_config((ar_arch)arch, 1), .batch = {B, S, ids}, .seed = 1},
                        {.seed = 1},
                        {.seed = 1},
                        {.seed = 2}};
        o.c.config.kv_heads = 4;
        match_weights *const each[] = {&o.before, &o.after, &o.other};
        for (int i = 0; i < 3; i++) {
            SCOPED(ari_reference_fini) ari_reference unused = {0};
            cr_assert_ok(match_baseline(&o.c, each[i], &unused));
        }
        for (size_t i = 0; i < o.after.count; i++)
            cr_assert_eq(set_one(&o, i, 1 + (int)(i % 2)), AR_OK, "%s: %s", o.after.at[i].name, ar_error_message());
        for (int i = 0; i < 3; i++)
            match_weights_fini(each[i]);
    }
}

/* The tests above see a stale operand: here the versions stay, and with them the packed weights of the first step. */
Test(stale_operand, values_changed_without_a_new_version_are_found)
{
    cr_assert_eq(second_step(AR_ARCH_LLAMA, 1, true), AR_ERR_DATA, "packed weights were not kept, or not compared");
}
