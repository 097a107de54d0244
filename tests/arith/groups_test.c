/* SPDX-License-Identifier: Apache-2.0 */
/* Rows in groups, each with a matrix of its own: a product of them all together has the bits of one product a group, and
 * a gradient those of one contraction for each sample's rows of a group, however ranks share terms, rows and tokens;
 * native sums are within the bound of theirs. */
#include "anyrank/context.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/tensor_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

enum { MOST_RANKS = 6, GROUPS = 5, N = 6, K = 12 };

/* --- products ----------------------------------------------------------------------------------------------------- */

enum { ROWS = 11 };
static const size_t first[GROUPS + 1] = {0, 3, 3, 4, 11, 11}; /* two groups have no rows */

/* A [ROWS, K] and for each group B [N, K]. */
typedef struct product {
    bool cut_k; /* over the ranks: K, else B's rows */
    float a[ROWS * K], b[GROUPS * N * K];
    float y[MOST_RANKS][ROWS * N];
} product;

/* Magnitudes that differ from group to group and from column to column, so that exponents of another group show. */
static void fill_product(product *p)
{
    fill_values(p->a, ROWS * K, 1, 1.0);
    fill_values(p->b, GROUPS * N * K, 2, 1.0);
    for (size_t i = 0; i < ROWS * K; i++)
        p->a[i] = ldexpf(p->a[i], (int)(i % 7) - (int)(i / K % 5) * 3);
    for (size_t i = 0; i < GROUPS * N * K; i++)
        p->b[i] = i % 17 == 0 ? 0.0f : ldexpf(p->b[i], (int)(i / (size_t)(N * K)) * 5 - (int)(i % 11));
}

static ar_status group_operand(ar_ctx *ctx, const ar_operand **gives, const void *user, size_t group)
{
    (void)ctx;
    *gives = ((const ar_operand *const *)user)[group];
    return AR_OK;
}

static ar_status product_rank(ar_ctx *ctx, void *user)
{
    product *p = user;
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t a_shape[2] = {ROWS, K}, b_shape[2] = {N, K};
    const size_t sample[GROUPS * 2] = {0, 3, 0, 0, 0, 1, 0, 7, 0, 0};
    const ar_groups g = {.n = GROUPS, .samples = 1, .longest = ROWS, .first = first, .sample = sample};
    const ar_operand *b[GROUPS];
    ar_comm *tp = ar_ctx_tp(ctx);
    ar_tensor a, y;
    size_t start = 0, count = 0;
    ari_comm_slice(p->cut_k ? K : N, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    AR_TRY(rank_upload(ctx, &a, 2, a_shape, p->a));
    for (size_t i = 0; i < GROUPS; i++) {
        ar_tensor t;
        AR_TRY(rank_upload(ctx, &t, 2, b_shape, p->b + i * N * K));
        const ar_parts part = {.n = 1, .part = {ar_tensor_slice(&t, p->cut_k, start, count)}};
        AR_TRY(arith->operand_b(ctx, &b[i], &part, true, K, p->cut_k ? tp : NULL, p->cut_k ? NULL : tp, "b"));
    }
    const size_t y_shape[2] = {ROWS, p->cut_k ? N : count};
    const ar_tensor own = p->cut_k ? ar_tensor_slice(&a, 1, start, count) : a;
    AR_TRY(ar_ctx_tensor(ctx, &y, AR_F32, 2, y_shape));
    AR_TRY(arith->contract_groups(ctx, &y, &own, &(ar_group_operands){group_operand, b}, &g, p->cut_k ? tp : NULL,
                                  "groups"));
    return ar_ctx_download(ctx, p->y[rank_of(ctx)], &y);
}

static size_t group_of(size_t row)
{
    size_t i = 0;
    while (row >= first[i + 1])
        i++;
    return i;
}

/* The columns [start, start + count) of one rank. */
static void expect_product(const product *p, int rank, size_t start, size_t count, bool exact)
{
    for (size_t r = 0; r < ROWS; r++) {
        const float *a = p->a + r * K, *b = p->b + group_of(r) * N * K, *y = p->y[rank] + r * count;
        float expected[N];
        plain_contract(expected, 1, N, K, a, K, 1, b, K, 1);
        for (size_t c = 0; !exact && c < count; c++)
            expect_near("y", y[c], plain_dot(K, a, 1, b + (start + c) * K, 1), K);
        cr_assert(!exact || first_different_bits(y, expected + start, count) == count, "rank %d, row %zu", rank, r);
    }
}

Test(groups, a_product_of_all_is_one_of_each)
{
    static product p;
    fill_product(&p);
    for (int native = 0; native < 2; native++) {
        for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
            const ar_run o = {.parallel.tp = ranks, .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT};
            for (int k = 0; k < 2; k++) {
                p.cut_k = k == 1;
                cr_assert_ok(rank_run(&o, product_rank, &p));
                for (int r = 0; r < ranks; r++) {
                    size_t start = 0, count = N;
                    if (!p.cut_k)
                        ari_comm_slice(N, ranks, r, &start, &count);
                    expect_product(&p, r, start, count, !native);
                }
            }
        }
    }
}

static ar_status wrong_rank(ar_ctx *ctx, void *user)
{
    const ar_groups g = {.n = GROUPS, .samples = 1, .longest = ROWS, .first = first};
    const size_t shape[2] = {ROWS - 1, K};
    ar_tensor a;
    (void)user;
    AR_TRY(ar_ctx_tensor(ctx, &a, AR_F32, 2, shape));
    return ar_ctx_arith(ctx)->contract_groups(ctx, &a, &a, NULL, &g, NULL, "routed");
}

Test(groups, rows_of_no_group_are_refused)
{
    for (int native = 0; native < 2; native++) {
        const ar_run o = {.parallel.tp = 1, .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT};
        cr_expect_refused(rank_run(&o, wrong_rank, NULL), AR_ERR_SHAPE, "routed: 5 groups of 11 rows together");
    }
}

enum { SAMPLES = 4, EACH = 12, TOKENS = SAMPLES * EACH, OUT = 3, IN = 4, PARAMS = 2 };

/* Tokens go to groups: of some samples none to some of them, and none at all to the last. Of a sample the ranks of a
 * sequence have its tokens in runs. */
typedef struct gradient {
    int tp, cp; /* tp divides IN, cp EACH */
    float x[TOKENS * IN], dy[PARAMS][TOKENS * OUT];
    float actual[MOST_RANKS][GROUPS * PARAMS][OUT * IN];
} gradient;

static size_t goes_to(size_t token)
{
    const size_t sample = token / EACH;
    return sample == 1 ? 2 : (token * token + sample) % (GROUPS - 1);
}

/* The rank's tokens in order of group and then of token, and the groups of them. */
typedef struct own_rows {
    size_t n, token[TOKENS], first[GROUPS + 1], sample[GROUPS * (SAMPLES + 1)];
} own_rows;

static void list_rows(own_rows *o, int cp, int place)
{
    const size_t run = EACH / (size_t)cp;
    *o = (own_rows){.n = 0};
    for (size_t g = 0; g < GROUPS; g++) {
        for (size_t t = 0; t < TOKENS; t++) {
            size_t *of = o->sample + g * (SAMPLES + 1);
            if (goes_to(t) == g && t % EACH / run == (size_t)place)
                o->token[o->n++] = t;
            if (t % EACH == EACH - 1)
                of[t / EACH + 1] = o->n - o->first[g];
        }
        o->first[g + 1] = o->n;
    }
}

/* The columns [from, from + width) of the rank's rows. */
static ar_status upload_rows(ar_ctx *ctx, ar_tensor *t, const own_rows *o, const float *values, size_t features,
                             size_t from, size_t width)
{
    float rows[TOKENS * (IN + OUT)];
    for (size_t i = 0; i < o->n; i++)
        memcpy(rows + i * width, values + o->token[i] * features + from, width * sizeof *rows);
    return rank_upload(ctx, t, 2, (const size_t[2]){o->n, width}, rows);
}

static ar_status add_rows(gradient *j, ar_ctx *ctx, ar_param *const *to)
{
    const size_t width = IN / (size_t)j->tp;
    own_rows o;
    ar_tensor x, dy[PARAMS];
    list_rows(&o, j->cp, ar_comm_rank(ctx->sequence));
    const ar_groups g = {
        .n = GROUPS, .samples = SAMPLES, .longest = EACH, .first = o.first, .sample = o.sample, .comm = ctx->sequence};
    AR_TRY(upload_rows(ctx, &x, &o, j->x, IN, rank_of(ctx) * width, width));
    for (int k = 0; k < PARAMS; k++)
        AR_TRY(upload_rows(ctx, &dy[k], &o, j->dy[k], OUT, 0, OUT));
    return ar_ctx_arith(ctx)->grad_groups(ctx, to, dy, PARAMS, &x, &g, ar_ctx_tp(ctx), "groups");
}

static ar_status gradient_rank(ar_ctx *ctx, void *user)
{
    gradient *j = user;
    const size_t shape[2] = {OUT, IN / (size_t)j->tp};
    SCOPED(rank_params_end) rank_params p;
    ar_layout layout;
    rank_params_begin(&p);
    AR_TRY(ari_layout_replicate(&layout, 2, shape, (int)rank_of(ctx), j->tp));
    for (size_t i = 0; i < GROUPS * PARAMS; i++)
        AR_TRY(ar_param_init(p.all[i], ctx, "w", &layout, false));
    p.at[3].requires_grad = false;
    AR_TRY(add_rows(j, ctx, p.all));
    for (size_t i = 0; i < GROUPS * PARAMS; i++) {
        ar_tensor g;
        AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, 2, shape));
        if (!p.at[i].requires_grad)
            continue;
        AR_TRY(ctx->arith->grad_reduce(ctx, p.all[i], ctx->sequence, "w"));
        AR_TRY(ctx->arith->grad_value(ctx, &g, p.all[i]));
        AR_TRY(ar_ctx_download(ctx, j->actual[ar_comm_rank(ctx->world)][i], &g));
    }
    return AR_OK;
}

/* One contraction for each sample, of its rows that are in the group, and the plain accumulator over the samples. */
static void define_gradient(const gradient *j, size_t group, size_t param, float *expected)
{
    float each[SAMPLES * OUT * IN];
    own_rows all;
    list_rows(&all, 1, 0);
    for (size_t s = 0; s < SAMPLES; s++) {
        const size_t *of = all.sample + group * (SAMPLES + 1) + s, from = all.first[group] + of[0], n = of[1] - of[0];
        float x[EACH * IN], dy[EACH * OUT];
        for (size_t i = 0; i < n; i++) {
            memcpy(x + i * IN, j->x + all.token[from + i] * IN, IN * sizeof *x);
            memcpy(dy + i * OUT, j->dy[param] + all.token[from + i] * OUT, OUT * sizeof *dy);
        }
        plain_contract(each + s * OUT * IN, OUT, IN, n, dy, 1, OUT, x, 1, IN);
    }
    plain_accumulate(expected, each, SAMPLES, OUT * IN);
}

/* The same in binary64. */
static plain_sum plain_element(const gradient *j, size_t group, size_t param, size_t out, size_t in)
{
    plain_sum s = {0.0, 0.0};
    for (size_t t = 0; t < TOKENS; t++) {
        const double term = goes_to(t) == group ? (double)j->dy[param][t * OUT + out] * (double)j->x[t * IN + in] : 0.0;
        s.value += term;
        s.magnitude += fabs(term);
    }
    return s;
}

static void expect_gradient(const gradient *j, int rank, size_t i, bool exact)
{
    const size_t width = IN / (size_t)j->tp, from = (size_t)(rank % j->tp) * width;
    float expected[OUT * IN];
    define_gradient(j, i / PARAMS, i % PARAMS, expected);
    for (size_t o = 0; o < OUT; o++) {
        const float *actual = j->actual[rank][i] + o * width;
        cr_assert(!exact || first_different_bits(actual, expected + o * IN + from, width) == width,
                  "tp %d cp %d, rank %d, parameter %zu", j->tp, j->cp, rank, i);
        for (size_t c = 0; !exact && c < width; c++)
            expect_near("dW", actual[c], plain_element(j, i / PARAMS, i % PARAMS, o, from + c), TOKENS);
    }
}

static void expect_gradients(gradient *j, bool native)
{
    const ar_run o = {.parallel = {.tp = j->tp, .cp = j->cp},
                      .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT};
    cr_assert_ok(rank_run(&o, gradient_rank, j));
    for (int r = 0; r < j->tp * j->cp; r++) {
        for (size_t i = 0; i < GROUPS * PARAMS; i++) {
            if (i != 3) /* frozen */
                expect_gradient(j, r, i, !native);
        }
    }
}

Test(groups, a_gradient_is_one_contraction_for_each_samples_rows_of_a_group)
{
    static gradient j;
    fill_values(j.x, TOKENS * IN, 1, 1.0);
    for (int k = 0; k < PARAMS; k++)
        fill_values(j.dy[k], TOKENS * OUT, (unsigned)(2 + k), 1.0);
    for (size_t i = 0; i < TOKENS * OUT; i++) /* tokens and samples of very different magnitude */
        j.dy[1][i] = ldexpf(j.dy[1][i], (int)(i / OUT % EACH * 7 % 23) + (int)(i / (EACH * OUT) * 11) - 40);
    for (int native = 0; native < 2; native++) {
        for (j.tp = 1; j.tp <= 2; j.tp++) {
            for (j.cp = 1; j.cp <= 3; j.cp++)
                expect_gradients(&j, native);
        }
    }
}
