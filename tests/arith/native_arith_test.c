/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients in the native arithmetic alone: fp32 sums, within the a-priori bound of sums of n products in any order. Its
 * products are held to the same bound by tests/cpu/native_gemm_test.c, and over ranks by tests/layers/linear_test.c. */
#include "anyrank/context.h"
#include "ref/comm/comm_private.h"
#include "ref/core/tensor_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

enum { MOST_RANKS = 4 };

/* Gradients: two calls add up, zeroing forgets, the group sums. */
enum { TOKENS = 10, OUT = 3, IN = 4 };
typedef struct gradient_job {
    bool transposed;
    float x[TOKENS * IN], dy[TOKENS * OUT];
    float w[MOST_RANKS][OUT * IN], b[MOST_RANKS][OUT];
} gradient_job;

static ar_status add_share(ar_ctx *ctx, const gradient_job *g, ar_param *w, ar_param *b)
{
    size_t start = 0, count = 0;
    ari_comm_slice(TOKENS, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    for (int half = 0; half < 2; half++) {
        size_t at = 0, tokens = 0;
        ari_comm_slice(count, 2, half, &at, &tokens);
        const size_t x_shape[2] = {tokens, IN}, dy_shape[2] = {tokens, OUT};
        ar_tensor x, dy;
        AR_TRY(rank_upload(ctx, &x, 2, x_shape, g->x + (start + at) * IN));
        AR_TRY(rank_upload(ctx, &dy, 2, dy_shape, g->dy + (start + at) * OUT));
        AR_TRY(ar_ctx_arith(ctx)->grad_contract(ctx, &(ar_grad_terms){w, dy}, 1, &x, 1, NULL));
        AR_TRY(ar_ctx_arith(ctx)->grad_rows(ctx, b, &dy, (ar_cbuf){NULL}));
    }
    return AR_OK;
}

static ar_status download(ar_ctx *ctx, float *to, const ar_param *p)
{
    ar_tensor g;
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ar_ctx_arith(ctx)->grad_value(ctx, &g, p));
    return ar_ctx_download(ctx, to, &g);
}

static ar_status gradient_rank(ar_ctx *ctx, void *user)
{
    gradient_job *g = user;
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t r = rank_of(ctx), shape[2] = {g->transposed ? IN : OUT, g->transposed ? OUT : IN};
    const size_t out = OUT;
    SCOPED(ar_param_fini) ar_param w = {0}, b = {0};
    ar_param *all[2] = {&w, &b};
    ar_layout layout;
    AR_TRY(ari_layout_replicate(&layout, 2, shape, (int)r, (int)ranks_of(ctx)));
    AR_TRY(ar_param_init(&w, ctx, "w", &layout, g->transposed));
    AR_TRY(ari_layout_replicate(&layout, 1, &out, (int)r, (int)ranks_of(ctx)));
    AR_TRY(ar_param_init(&b, ctx, "b", &layout, false));
    AR_TRY(add_share(ctx, g, &w, &b));
    for (int i = 0; i < 2; i++)
        AR_TRY(arith->grad_zero(ctx, all[i]));
    AR_TRY(add_share(ctx, g, &w, &b));
    for (int i = 0; i < 2; i++)
        AR_TRY(arith->grad_reduce(ctx, all[i], ar_ctx_tp(ctx), "gradients"));
    AR_TRY(download(ctx, g->w[r], &w));
    return download(ctx, g->b[r], &b);
}

Test(native_arith, gradients_stay_within_the_bound_however_they_are_cut)
{
    const float one = 1.0f;
    for (int ranks = 1; ranks <= 4; ranks++) {
        static gradient_job g;
        const ar_run o = {.parallel.tp = ranks, .numerics = AR_NUMERICS_NATIVE};
        g.transposed = ranks % 2 == 0;
        fill_values(g.x, TOKENS * IN, 1, 1.0);
        fill_values(g.dy, TOKENS * OUT, 2, 1.0);
        cr_assert_ok(rank_run(&o, gradient_rank, &g));
        for (int r = 0; r < ranks; r++) {
            for (size_t i = 0; i < OUT * IN; i++) /* one addition more: to the zeroed gradient */
                expect_near("dW", g.w[r][g.transposed ? i % IN * OUT + i / IN : i],
                            plain_dot(TOKENS, g.dy + i / IN, OUT, g.x + i % IN, IN), TOKENS + 1);
            for (size_t i = 0; i < OUT; i++)
                expect_near("db", g.b[r][i], plain_dot(TOKENS, g.dy + i, OUT, &one, 0), TOKENS);
        }
    }
}
