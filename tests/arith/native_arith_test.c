/* SPDX-License-Identifier: Apache-2.0 */
/* The native arithmetic alone: fp32 sums, within the a-priori bound of sums of n products in any order, and the same
 * bits from run to run. */
#include <float.h>

#include "anyrank/arith.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"
#include "tests/support/test.h"

enum { MOST_RANKS = 4, M = 6, N = 8, K = 60, MOST_PARTS = 3 };

/* gamma_n = n*u/(1 - n*u), u = 2^-24: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1. */
static void expect_near(float actual, plain_sum expected, size_t n)
{
    const double nu = (double)n * 0x1p-24, bound = nu / (1.0 - nu) * expected.magnitude + (double)FLT_TRUE_MIN;
    cr_assert(fabs((double)actual - expected.value) <= bound, "%a, expected %a within %a", (double)actual,
              expected.value, bound);
}

typedef struct native_job {
    bool along_k; /* the ranks and the parts share K; else B's rows are in parts, on one rank */
    int parts;
    float a[M * K], b[N * K];
    float y[MOST_RANKS][M * N];
} native_job;

static ar_parts cut(const ar_tensor *t, int dim, int n, bool along_k)
{
    ar_parts p = {.n = n, .along_k = along_k};
    for (int i = 0; i < n; i++) {
        size_t start = 0, count = 0;
        ar_comm_slice(t->shape[dim], n, i, &start, &count);
        p.part[i] = ar_tensor_slice(t, dim, start, count);
    }
    return p;
}

static ar_status native_rank(ar_ctx *ctx, void *user)
{
    native_job *j = user;
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t a_shape[2] = {M, K}, b_shape[2] = {N, K}, y_shape[2] = {M, N};
    ar_comm *group = j->along_k ? ar_ctx_tp(ctx) : NULL;
    const ar_operand *oa = NULL, *ob = NULL;
    ar_sum *sum = NULL;
    ar_tensor a, b, y;
    size_t start = 0, count = K;
    AR_TRY(rank_upload(ctx, &a, 2, a_shape, j->a));
    AR_TRY(rank_upload(ctx, &b, 2, b_shape, j->b));
    if (j->along_k)
        ar_comm_slice(K, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    a = ar_tensor_slice(&a, 1, start, count);
    b = ar_tensor_slice(&b, 1, start, count);
    const ar_parts pb = cut(&b, j->along_k ? 1 : 0, j->parts, j->along_k);
    const ar_parts pa = j->along_k ? cut(&a, 1, j->parts, true) : (ar_parts){.n = 1, .part = {a}};
    AR_TRY(arith->operand_b(ctx, &ob, &pb, true, K, group, NULL, "b"));
    AR_TRY(arith->operand_a(ctx, &oa, &pa, ob, "a"));
    AR_TRY(arith->contract(ctx, &sum, oa, ob));
    AR_TRY(arith->fold(ctx, sum, ar_ctx_queue(ctx), group, AR_ALL, "fold"));
    AR_TRY(ar_ctx_tensor(ctx, &y, AR_F32, 2, y_shape));
    AR_TRY(arith->round(ctx, &y, sum, NULL));
    return ar_ctx_download(ctx, j->y[rank_of(ctx)], &y);
}

static void fill_job(native_job *j)
{
    fill_values(j->a, M * K, 1, 1.0);
    fill_values(j->b, N * K, 2, 1.0);
    for (size_t i = 0; i < M * K; i++)
        j->a[i] = ldexpf(j->a[i], (int)(i % 9) - 4);
}

Test(native_arith, contractions_stay_within_the_bound_however_they_are_cut)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (int parts = 1; parts <= MOST_PARTS; parts++) {
            static native_job j;
            const rank_run_options o = {.ranks = ranks, .numerics = AR_NUMERICS_NATIVE};
            j.along_k = ranks > 1 || parts == 2;
            j.parts = parts;
            fill_job(&j);
            cr_assert_ok(rank_run(&o, native_rank, &j));
            for (int r = 0; r < ranks; r++) {
                for (size_t i = 0; i < M * N; i++)
                    expect_near(j.y[r][i], plain_dot(K, j.a + i / N * K, 1, j.b + i % N * K, 1), K);
            }
        }
    }
}

Test(native_arith, ranks_agree_and_runs_repeat_to_the_bit)
{
    static native_job first, second;
    const rank_run_options o = {.ranks = 4, .numerics = AR_NUMERICS_NATIVE};
    first.along_k = second.along_k = true;
    first.parts = second.parts = 1;
    fill_job(&first);
    fill_job(&second);
    cr_assert_ok(rank_run(&o, native_rank, &first));
    cr_assert_ok(rank_run(&o, native_rank, &second));
    for (int r = 0; r < 4; r++) {
        cr_assert_eq(first_different_bits(first.y[r], first.y[0], M * N), M * N, "rank %d", r);
        cr_assert_eq(first_different_bits(second.y[r], first.y[r], M * N), M * N, "rank %d", r);
    }
}

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
    ar_comm_slice(TOKENS, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    for (int half = 0; half < 2; half++) {
        size_t at = 0, tokens = 0;
        ar_comm_slice(count, 2, half, &at, &tokens);
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
    AR_TRY(ar_layout_replicate(&layout, 2, shape, (int)r, (int)ranks_of(ctx)));
    AR_TRY(ar_param_init(&w, ctx, "w", &layout, g->transposed));
    AR_TRY(ar_layout_replicate(&layout, 1, &out, (int)r, (int)ranks_of(ctx)));
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
        const rank_run_options o = {.ranks = ranks, .numerics = AR_NUMERICS_NATIVE};
        g.transposed = ranks % 2 == 0;
        fill_values(g.x, TOKENS * IN, 1, 1.0);
        fill_values(g.dy, TOKENS * OUT, 2, 1.0);
        cr_assert_ok(rank_run(&o, gradient_rank, &g));
        for (int r = 0; r < ranks; r++) {
            for (size_t i = 0; i < OUT * IN; i++) /* one addition more: to the zeroed gradient */
                expect_near(g.w[r][g.transposed ? i % IN * OUT + i / IN : i],
                            plain_dot(TOKENS, g.dy + i / IN, OUT, g.x + i % IN, IN), TOKENS + 1);
            for (size_t i = 0; i < OUT; i++)
                expect_near(g.b[r][i], plain_dot(TOKENS, g.dy + i, OUT, &one, 0), TOKENS);
        }
    }
}
