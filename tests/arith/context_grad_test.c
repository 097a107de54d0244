/* SPDX-License-Identifier: Apache-2.0 */
/* Weight gradients of samples whose tokens are on several ranks: however they are dealt out, the sum has the bits of one
 * contraction for each sample and of the plain accumulator over the samples. */
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

enum { MOST_RANKS = 12, MOST_ELEMENTS = 64 };

/* A gradient [out, in] of `samples` samples of `each` tokens. */
typedef struct gradient_case {
    int dp, cp, tp; /* cp divides each, tp divides in */
    size_t samples, each, out, in;
    bool transposed;
    size_t nan_at; /* of x; 0: none */
    bool largest;  /* every integer is the largest one */
} gradient_case;

typedef struct gradient_job {
    gradient_case c;
    float *x, *dy;                           /* [samples, each, in], [samples, each, out] */
    size_t *dealt;                           /* [each], a permutation: cp rank r has the r-th run of each/cp of these */
    float actual[MOST_RANKS][MOST_ELEMENTS]; /* of every rank, its columns [out, in/tp] */
} gradient_job;

/* The columns [first, first + width) of this rank's tokens of samples [start, start + count). */
static float *own_tokens(const gradient_job *j, const float *from, size_t features, size_t first, size_t width,
                         size_t cp_rank, size_t start, size_t count)
{
    const size_t own = j->c.each / (size_t)j->c.cp;
    float *to = malloc((count * own * width + 1) * sizeof *to);
    for (size_t i = 0; to && i < count * own; i++) {
        const size_t token = (start + i / own) * j->c.each + j->dealt[cp_rank * own + i % own];
        memcpy(to + i * width, from + token * features + first, width * sizeof *to);
    }
    return to;
}

static ar_status contract_own(gradient_job *j, ar_ctx *ctx, ar_param *w, size_t start, size_t count)
{
    const size_t tp = rank_of(ctx), width = j->c.in / (size_t)j->c.tp, cp = (size_t)ar_comm_rank(ctx->sequence);
    const size_t tokens = count * j->c.each / (size_t)j->c.cp, x_shape[2] = {tokens, width};
    const size_t dy_shape[2] = {tokens, j->c.out};
    OWNED(free) float *own_x = own_tokens(j, j->x, j->c.in, tp * width, width, cp, start, count);
    OWNED(free) float *own_dy = own_tokens(j, j->dy, j->c.out, 0, j->c.out, cp, start, count);
    ar_tensor x, dy;
    if (!own_x || !own_dy)
        return AR_ERR_MEMORY;
    AR_TRY(rank_upload(ctx, &x, 2, x_shape, own_x));
    AR_TRY(rank_upload(ctx, &dy, 2, dy_shape, own_dy));
    return ctx->arith->grad_contract(ctx, &(ar_grad_terms){w, dy}, 1, &x, count, ctx->tp);
}

static ar_status gradient_rank(ar_ctx *ctx, void *user)
{
    gradient_job *j = user;
    const size_t width = j->c.in / (size_t)j->c.tp;
    const size_t shape[2] = {j->c.transposed ? width : j->c.out, j->c.transposed ? j->c.out : width};
    SCOPED(ar_param_fini) ar_param w = {0};
    ar_layout layout;
    ar_tensor g;
    size_t start = 0, count = 0;
    ari_comm_slice(j->c.samples, j->c.dp, ari_ctx_data_rank(ctx), &start, &count);
    AR_TRY(ari_layout_replicate(&layout, 2, shape, (int)rank_of(ctx), j->c.tp));
    AR_TRY(ar_param_init(&w, ctx, "w", &layout, j->c.transposed));
    if (count > 0)
        AR_TRY(contract_own(j, ctx, &w, start, count));
    AR_TRY(ctx->arith->grad_reduce(ctx, &w, ar_ctx_dp(ctx), "w"));
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, 2, shape));
    AR_TRY(ctx->arith->grad_value(ctx, &g, &w));
    return ar_ctx_download(ctx, j->actual[ar_comm_rank(ctx->world)], &g);
}

static gradient_job *job_new(const gradient_case *c)
{
    gradient_job *j = calloc(1, sizeof *j);
    const size_t tokens = c->samples * c->each;
    cr_assert_not_null(j);
    *j = (gradient_job){.c = *c, .x = plain_new(tokens * c->in), .dy = plain_new(tokens * c->out)};
    j->dealt = malloc(c->each * sizeof *j->dealt);
    cr_assert_not_null(j->dealt);
    fill_values(j->x, tokens * c->in, 1, 1.0);
    fill_values(j->dy, tokens * c->out, 2, 1.0);
    /* Tokens and samples of very different magnitude: an exponent that one rank alone has shows. */
    for (size_t i = 0; i < tokens * c->out; i++)
        j->dy[i] = ldexpf(j->dy[i], (int)(i / c->out % c->each * 7 % 23) + (int)(i / c->out / c->each * 11) - 40);
    for (size_t i = 0; c->largest && i < tokens * c->in; i++)
        j->x[i] = 0x1.fffffep-1f;
    for (size_t i = 0; c->largest && i < tokens * c->out; i++)
        j->dy[i] = 0x1.fffffep-1f;
    if (c->nan_at > 0)
        j->x[c->nan_at] = NAN;
    for (size_t i = 0, seed = 1; i < c->each; i++) { /* Durstenfeld's shuffle, from the front */
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const size_t k = (seed >> 33) % (i + 1);
        j->dealt[i] = j->dealt[k];
        j->dealt[k] = i;
    }
    return j;
}

static void job_free(gradient_job *j)
{
    free(j->x);
    free(j->dy);
    free(j->dealt);
    free(j);
}
OWNER(gradient_job, job_free)

static void expect_the_definition(const gradient_case *c)
{
    OWNED(job_free) gradient_job *j = job_new(c);
    const int ranks = c->dp * c->cp * c->tp;
    const ar_run o = {.parallel = {.tp = c->tp, .dp = c->dp, .cp = c->cp}};
    const size_t width = c->in / (size_t)c->tp;
    OWNED(free) float *w = plain_new(c->out * c->in), *b = plain_new(c->out);
    SCOPED(plain_linear_fini)
    plain_linear p = {.n = {c->samples, c->each, c->in, c->out}, .x = j->x, .w = w, .b = b, .dy = j->dy};
    plain_linear_exact(&p);
    cr_assert_ok(rank_run(&o, gradient_rank, j));
    for (int r = 0; r < ranks; r++) {
        for (size_t i = 0; i < c->out * width; i++) {
            const size_t row = i / width, col = i % width;
            const float actual = j->actual[r][c->transposed ? col * c->out + row : i];
            const float expected = p.dw[row * c->in + (size_t)(r % c->tp) * width + col];
            cr_assert_eq(first_different_bits(&actual, &expected, 1), 1, "dp=%d cp=%d tp=%d rank %d: dW[%zu, %zu]",
                         c->dp, c->cp, c->tp, r, row, col);
        }
    }
}

Test(context_grad, tokens_dealt_out_over_ranks_have_one_contractions_bits)
{
    static const gradient_case cases[] = {
        {.dp = 1, .cp = 2, .tp = 1, .samples = 1, .each = 2, .out = 1, .in = 1}, /* a rank without a row */
        {.dp = 1, .cp = 3, .tp = 1, .samples = 3, .each = 6, .out = 5, .in = 3},
        {.dp = 1, .cp = 4, .tp = 1, .samples = 2, .each = 12, .out = 7, .in = 4, .transposed = true},
        {.dp = 1, .cp = 5, .tp = 1, .samples = 2, .each = 20, .out = 3, .in = 6},
        {.dp = 2, .cp = 2, .tp = 2, .samples = 3, .each = 8, .out = 5, .in = 4},
        {.dp = 3, .cp = 2, .tp = 2, .samples = 2, .each = 4, .out = 3, .in = 4, .transposed = true},
        {.dp = 2, .cp = 6, .tp = 1, .samples = 5, .each = 6, .out = 4, .in = 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_the_definition(&cases[i]);
}

Test(context_grad, sums_too_long_for_one_int64_are_added_as_two)
{
    /* 8,199 tokens, an odd number and so one part, of which no rank has more than one int64 can hold. */
    const gradient_case c = {.dp = 1, .cp = 3, .tp = 1, .samples = 1, .each = 8199, .out = 2, .in = 2};
    gradient_case largest = c;
    largest.largest = true;
    expect_the_definition(&c);
    expect_the_definition(&largest);
}

Test(context_grad, a_nan_of_one_rank_is_in_everybodys_gradient)
{
    const gradient_case c = {.dp = 1, .cp = 3, .tp = 1, .samples = 2, .each = 6, .out = 4, .in = 3, .nan_at = 7};
    expect_the_definition(&c);
}
