/* SPDX-License-Identifier: Apache-2.0 */
/* A user's hook of the buckets of a data-parallel object, and what of a bucket is public. */
#include "anyrank/context.h"
#include "ref/train/ddp_private.h"
#include "ref/train/units.h"
#include "tests/support/test.h"
#include "train/ddp_toy.h"

/* A function of each element by itself. */
static float clamped(float g)
{
    return g > 0.25f ? 0.25f : g < -0.25f ? -0.25f : g;
}

static ar_status clamp(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n)
{
    (void)user, (void)b, (void)p, (void)start;
    for (size_t i = 0; i < n; i++)
        g[i] = clamped(g[i]);
    return AR_OK;
}

static ar_status halve(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n)
{
    (void)user, (void)p;
    if (b->state != AR_BUCKET_FILLING || start != 0)
        return ar_error_set(AR_ERR_ARG, "a term of what is reduced already");
    for (size_t i = 0; i < n; i++)
        g[i] *= 0.5f;
    return AR_OK;
}

static toy toy_of(int dp)
{
    return (toy){.n = 3, .size = {40, 30, 20}, .ddp = {.bucket_bytes = 300}, .micro = 2, .run.parallel = {.dp = dp}};
}

Test(ddp_hook, replaces_a_sum_by_a_function_of_it_in_every_mode)
{
    toy plain = toy_of(3);
    cr_assert_ok(toy_run(&plain));
    for (int mode = 0; mode < 4; mode++) {
        toy t = toy_of(3);
        t.ddp.hook = clamp;
        t.ddp.mode = mode % 2 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        t.run.numerics = mode < 2 ? AR_NUMERICS_EXACT : AR_NUMERICS_NATIVE;
        plain.run.numerics = t.run.numerics;
        cr_assert_ok(toy_run(&plain));
        cr_assert_ok(toy_run(&t));
        bool changed = false;
        for (size_t i = 0; i < 90; i++) {
            const float expected = clamped(plain.rank[0].grad[i]);
            changed = changed || expected != plain.rank[0].grad[i];
            for (int r = 0; r < 3; r++)
                cr_expect_eq(t.rank[r].grad[i], expected, "mode %d, rank %d, element %zu: %.9g, expected %.9g", mode, r,
                             i, (double)t.rank[r].grad[i], (double)expected);
        }
        cr_expect(changed);
    }
}

/* Two micro-batches, after each of which ZeRO-2 and -3 reduce. */
static ar_status shares(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const bool units = ari_ddp_options_of(d).zero >= 2;
    toy t = toy_of(2);
    AR_TRY(ar_ddp_start(d));
    for (int micro = 0; micro < 2; micro++) {
        ar_ddp_set_sync(d, micro == 1);
        AR_TRY(ari_ddp_begin_backward(units ? d : NULL, 0, true));
        AR_TRY(toy_pass(ctx, &t, params, micro, 0));
        AR_TRY(ari_ddp_end_backward(units ? d : NULL, 0));
    }
    AR_TRY(ar_ddp_wait(d));
    for (size_t i = 0, at = 0; i < n; at += t.size[i++]) {
        const size_t start = params[i]->own_start, count = params[i]->own_count;
        const ar_param_share *s = params[i]->share;
        float whole[TOY_ELEMENTS];
        ar_tensor g;
        if (!units)
            AR_TRY(rank_read_gradient(ctx, whole, params[i]));
        if (units && count > 0) {
            AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, 1, &count));
            AR_TRY(ar_ctx_arith(ctx)->bucket_take(ctx, ar_ctx_queue(ctx), g.data, ar_const(s->grad), s->elements,
                                                  s->offset, count, AR_F32));
            AR_TRY(ar_ctx_download(ctx, whole + start, &g));
        }
        memcpy(out->grad + at + start, whole + start, count * sizeof *whole);
    }
    return AR_OK;
}

/* Sums, and the terms of each micro-batch: halving them halves the sum. */
Test(ddp_hook, of_shares_sees_the_share)
{
    for (int zero = 0; zero < 8; zero++) {
        toy whole = toy_of(2), t = toy_of(2);
        t.ddp.hook_terms = zero >= 4;
        t.run.numerics = whole.run.numerics = zero >= 4 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
        t.ddp.hook = zero >= 4 ? halve : clamp;
        whole.ddp.hook = zero >= 4 ? NULL : clamp;
        t.ddp.mode = zero % 2 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        t.ddp.zero = zero % 4;
        t.body = t.ddp.zero ? shares : NULL;
        cr_assert_ok(toy_run(&whole));
        cr_assert_ok(toy_run(&t));
        for (size_t i = 0; i < 90; i++) {
            const float got = t.rank[0].grad[i] + (t.body ? t.rank[1].grad[i] : 0.0f);
            const float expected = zero >= 4 ? 0.5f * whole.rank[0].grad[i] : whole.rank[0].grad[i];
            cr_expect_float_eq(got, expected, zero >= 4 ? 1e-6f : 0.0f, "%d, element %zu: %.9g, expected %.9g", zero, i,
                               (double)got, (double)expected);
        }
    }
}

static ar_status refuse(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n)
{
    (void)user, (void)b, (void)start, (void)g, (void)n;
    return ar_error_set(AR_ERR_DATA, "no gradient of %s", p->name);
}

Test(ddp_hook, an_error_of_it_ends_the_step)
{
    for (int zero = 0; zero < 4; zero++) {
        toy t = toy_of(2);
        t.ddp.zero = zero;
        t.ddp.hook = refuse;
        t.body = zero ? shares : NULL;
        cr_expect_eq(toy_run(&t), AR_ERR_DATA, "ZeRO-%d", zero);
        cr_expect_says("no gradient of p");
    }
}

Test(ddp_hook, of_terms_comes_before_the_sum_in_native_numerics_alone)
{
    toy plain = toy_of(2), t = toy_of(2);
    plain.run.numerics = t.run.numerics = AR_NUMERICS_NATIVE;
    t.ddp.hook = halve;
    t.ddp.hook_terms = true;
    cr_assert_ok(toy_run(&plain));
    cr_assert_ok(toy_run(&t));
    for (size_t i = 0; i < 90; i++)
        cr_expect_eq(t.rank[1].grad[i], 0.5f * plain.rank[1].grad[i], "element %zu", i);
    t.run.numerics = AR_NUMERICS_EXACT;
    cr_expect_eq(toy_run(&t), AR_ERR_UNSUPPORTED);
    cr_expect_says("a hook of terms in exact numerics");
}

static ar_status look(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)n;
    const toy t = toy_of(2);
    AR_TRY(ar_ddp_start(d));
    AR_TRY(toy_pass(ctx, &t, params, 0, 0));
    const ar_bucket_info b = ari_ddp_bucket(d, 0);
    AR_TRY(ar_event_sync(b.reduced, 0));
    float grad[2][TOY_ELEMENTS];
    AR_TRY(rank_read_gradient(ctx, grad[0], b.param[0]));
    AR_TRY(ar_ddp_wait(d));
    AR_TRY(rank_read_gradient(ctx, grad[1], b.param[0]));
    out->has[0] = grad[0][0] == grad[1][0] && grad[0][0] != 0.0f;
    return AR_OK;
}

Test(ddp_hook, a_bucket_s_event_says_when_its_gradients_are_sums)
{
    toy t = toy_of(2);
    t.body = look;
    cr_assert_ok(toy_run(&t));
    cr_expect(t.rank[0].has[0] && t.rank[1].has[0]);
}
