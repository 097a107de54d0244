/* SPDX-License-Identifier: Apache-2.0 */
/* The exact arithmetic alone: however K or the samples are cut up over parts and ranks, a contraction has the bits of
 * its plain definition, and a gradient those of the plain accumulator. */
#include "anyrank/context.h"
#include "ref/comm/comm_private.h"
#include "ref/core/tensor_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

enum { MOST_RANKS = 4, M = 5, N = 7, MOST_K = 8200 };

/* A [M, K] and B [N, K]; magnitudes differ from column to column, so that the equilibration counts. */
typedef struct contraction {
    size_t k;
    int parts; /* of each rank's share: 1 to 3 */
    float a[M * MOST_K], b[N * MOST_K];
    float expected[M * N];
    float y[MOST_RANKS][M * N];
} contraction;

static contraction *contraction_new(size_t k)
{
    contraction *c = calloc(1, sizeof *c);
    cr_assert_not_null(c);
    c->k = k;
    c->parts = 1;
    fill_values(c->a, M * k, 1, 1.0);
    fill_values(c->b, N * k, 2, 1.0);
    for (size_t i = 0; i < k; i++) {
        for (size_t r = 0; r < M; r++)
            c->a[r * k + i] = ldexpf(c->a[r * k + i], (int)(i % 13) - 6);
        for (size_t r = 0; r < N; r++)
            c->b[r * k + i] = i % 17 == 0 ? 0.0f : ldexpf(c->b[r * k + i], 6 - (int)(i % 11));
    }
    return c;
}

static void define(contraction *c)
{
    plain_contract(c->expected, M, N, c->k, c->a, c->k, 1, c->b, c->k, 1);
}

/* Cuts `t` along K into c->parts pieces. */
static ar_parts cut(const contraction *c, const ar_tensor *t)
{
    ar_parts p = {.n = c->parts, .along_k = true};
    for (int i = 0; i < c->parts; i++) {
        size_t start = 0, count = 0;
        ari_comm_slice(t->shape[1], c->parts, i, &start, &count);
        p.part[i] = ar_tensor_slice(t, 1, start, count);
    }
    return p;
}

/* The ranks share K. */
static ar_status contract_rank(ar_ctx *ctx, void *user)
{
    contraction *c = user;
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t a_shape[2] = {M, c->k}, b_shape[2] = {N, c->k}, y_shape[2] = {M, N};
    ar_tensor a, b, y;
    const ar_operand *oa = NULL, *ob = NULL;
    ar_sum *sum = NULL;
    size_t start = 0, count = 0;
    AR_TRY(rank_upload(ctx, &a, 2, a_shape, c->a));
    AR_TRY(rank_upload(ctx, &b, 2, b_shape, c->b));
    ari_comm_slice(c->k, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    a = ar_tensor_slice(&a, 1, start, count);
    b = ar_tensor_slice(&b, 1, start, count);
    const ar_parts pa = cut(c, &a), pb = cut(c, &b);
    AR_TRY(arith->operand_b(ctx, &ob, &pb, true, c->k, ar_ctx_tp(ctx), NULL, "b"));
    AR_TRY(arith->operand_a(ctx, &oa, &pa, ob, "a"));
    AR_TRY(arith->contract(ctx, &sum, oa, ob));
    AR_TRY(arith->fold(ctx, sum, ar_ctx_queue(ctx), ar_ctx_tp(ctx), AR_ALL, "fold"));
    AR_TRY(ar_ctx_tensor(ctx, &y, AR_F32, 2, y_shape));
    AR_TRY(arith->round(ctx, &y, sum, NULL));
    return ar_ctx_download(ctx, c->y[rank_of(ctx)], &y);
}

static void run_contraction(contraction *c, int ranks)
{
    const ar_run o = {.parallel.tp = ranks};
    cr_assert_ok(rank_run(&o, contract_rank, c));
}

static void expect_definition(const contraction *c, int ranks)
{
    for (int r = 0; r < ranks; r++)
        cr_assert_eq(first_different_bits(c->y[r], c->expected, M * N), M * N, "K %zu, rank %d of %d, %d parts", c->k,
                     r, ranks, c->parts);
}

/* 8191 is the longest K of one 64-bit sum; longer ones are kept in two. */
Test(exact_arith, k_cut_over_ranks_and_parts_has_the_definitions_bits)
{
    static const size_t ks[] = {1, 3, 64, 1000, 8191, 8192, 8200};
    for (size_t i = 0; i < sizeof ks / sizeof ks[0]; i++) {
        OWNED(free) contraction *c = contraction_new(ks[i]);
        define(c);
        for (int ranks = 1; ranks <= 4 && (size_t)ranks <= c->k; ranks++) {
            for (c->parts = 1; c->parts <= 3 && (size_t)(c->parts * ranks) <= c->k; c->parts++) {
                run_contraction(c, ranks);
                expect_definition(c, ranks);
            }
        }
    }
}

/* All terms as large as they can be: from K = 8193 on their sum does not fit 63 bits, however few of them a rank
 * holds. */
Test(exact_arith, the_largest_sums_of_a_long_k_do_not_overflow)
{
    static const size_t ks[] = {8190, 8191, 8192, 8200};
    for (size_t i = 0; i < sizeof ks / sizeof ks[0]; i++) {
        OWNED(free) contraction *c = contraction_new(ks[i]);
        for (size_t k = 0; k < M * c->k; k++)
            c->a[k] = 0x1.fffffep-1f;
        for (size_t k = 0; k < N * c->k; k++)
            c->b[k] = k / c->k == 2 ? -0x1.fffffep-1f : 0x1.fffffep-1f;
        define(c);
        cr_assert_float_eq(c->expected[0], (float)c->k, 0x1p-10f, "the definition itself overflows");
        for (int ranks = 1; ranks <= 4; ranks++) {
            run_contraction(c, ranks);
            expect_definition(c, ranks);
        }
    }
}

/* What one rank's share of K holds reaches every rank's result: the exponents are agreed before the sums. */
Test(exact_arith, a_nan_in_one_share_of_k_makes_the_row_nan_on_every_rank)
{
    OWNED(free) contraction *c = contraction_new(40);
    c->a[2 * 40 + 39] = NAN;      /* row 2, in the last rank's share */
    c->b[4 * 40 + 1] = -INFINITY; /* column 4, in the first one's */
    define(c);
    cr_assert(isnan(c->expected[2 * N]) && isnan(c->expected[4]) && isfinite(c->expected[0]));
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_contraction(c, ranks);
        expect_definition(c, ranks);
    }
}

enum { OUT = 3, IN = 4, EACH = 6, SAMPLES = 9, VOCAB = 5 };
typedef struct gradients {
    bool transposed;
    float x[SAMPLES * EACH * IN], dy[SAMPLES * EACH * OUT];
    float w[MOST_RANKS][OUT * IN], b[MOST_RANKS][OUT], rows[MOST_RANKS][VOCAB * OUT];
} gradients;

static ar_status make_param(ar_param *p, ar_ctx *ctx, const char *name, int ndim, size_t rows, size_t cols,
                            bool transposed)
{
    const size_t shape[2] = {rows, cols};
    ar_layout layout;
    AR_TRY(ari_layout_replicate(&layout, ndim, shape, (int)rank_of(ctx), (int)ranks_of(ctx)));
    return ar_param_init(p, ctx, name, &layout, transposed);
}

static ar_status gradient_of(ar_ctx *ctx, float *to, const ar_param *p)
{
    ar_tensor g;
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ar_ctx_arith(ctx)->grad_value(ctx, &g, p));
    return ar_ctx_download(ctx, to, &g);
}

/* Token t looks up row t mod 7 - 1: -1 belongs to nobody, 5 is not in this table. */
static int64_t row_of(size_t token)
{
    const int64_t row = (int64_t)(token % 7) - 1;
    return row < VOCAB ? row : -1;
}

static ar_status add_share(ar_ctx *ctx, const gradients *g, ar_param *w, ar_param *b, ar_param *rows)
{
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    size_t start = 0, count = 0;
    ari_comm_slice(SAMPLES, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    for (size_t s = start; s < start + count;) { /* one sample, then two at once, and so on: micro-batches */
        const size_t now = s + 2 < start + count ? 1 + (s - start) % 2 : 1, tokens = now * EACH;
        const size_t x_shape[2] = {tokens, IN}, dy_shape[2] = {tokens, OUT};
        int64_t ids[SAMPLES * EACH];
        ar_tensor x, dy, at;
        for (size_t t = 0; t < tokens; t++)
            ids[t] = row_of(s * EACH + t);
        AR_TRY(rank_upload(ctx, &x, 2, x_shape, g->x + s * EACH * IN));
        AR_TRY(rank_upload(ctx, &dy, 2, dy_shape, g->dy + s * EACH * OUT));
        AR_TRY(ar_ctx_tensor(ctx, &at, AR_I64, 1, &tokens));
        AR_TRY(ar_ctx_upload(ctx, &at, ids));
        AR_TRY(arith->grad_contract(ctx, &(ar_grad_terms){w, dy}, 1, &x, now, NULL));
        AR_TRY(arith->grad_rows(ctx, b, &dy, (ar_cbuf){NULL}));
        AR_TRY(arith->grad_rows(ctx, rows, &dy, ar_const(at.data)));
        s += now;
    }
    return AR_OK;
}

static ar_status gradient_rank(ar_ctx *ctx, void *user)
{
    gradients *g = user;
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t r = rank_of(ctx);
    ar_param w = {0}, b = {0}, rows = {0}, *all[3] = {&w, &b, &rows};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st,
              g->transposed ? make_param(&w, ctx, "w", 2, IN, OUT, true) : make_param(&w, ctx, "w", 2, OUT, IN, false));
    AR_TRY_TO(done, st, make_param(&b, ctx, "b", 1, OUT, 0, false));
    AR_TRY_TO(done, st, make_param(&rows, ctx, "rows", 2, VOCAB, OUT, false));
    AR_TRY_TO(done, st, add_share(ctx, g, &w, &b, &rows));
    for (int i = 0; i < 3; i++) /* a step that is thrown away leaves nothing */
        AR_TRY_TO(done, st, arith->grad_zero(ctx, all[i]));
    AR_TRY_TO(done, st, add_share(ctx, g, &w, &b, &rows));
    for (int i = 0; i < 3; i++)
        AR_TRY_TO(done, st, arith->grad_reduce(ctx, all[i], ar_ctx_tp(ctx), "gradients"));
    AR_TRY_TO(done, st, gradient_of(ctx, g->w[r], &w));
    AR_TRY_TO(done, st, gradient_of(ctx, g->b[r], &b));
    AR_TRY_TO(done, st, gradient_of(ctx, g->rows[r], &rows));
done:
    for (int i = 0; i < 3; i++)
        ar_param_fini(all[i]);
    return st;
}

/* The same from the definitions. rows: [VOCAB, OUT]. */
static void plain_gradients(const gradients *g, float *dw, float *db, float *rows)
{
    float w[OUT * IN] = {0}, b[OUT] = {0};
    SCOPED(plain_linear_fini) plain_linear p = {.n = {SAMPLES, EACH, IN, OUT}, .x = g->x, .w = w, .b = b, .dy = g->dy};
    plain_linear_exact(&p);
    memcpy(dw, p.dw, OUT * IN * sizeof *dw);
    memcpy(db, p.db, OUT * sizeof *db);
    for (int64_t v = 0; v < VOCAB; v++) {
        float terms[SAMPLES * EACH * OUT];
        size_t n = 0;
        for (size_t t = 0; t < SAMPLES * EACH; t++) {
            if (row_of(t) == v)
                memcpy(terms + OUT * n++, g->dy + t * OUT, OUT * sizeof(float));
        }
        plain_accumulate(rows + v * OUT, terms, n, OUT);
    }
}

/* Values of very different magnitude: the accumulators of two ranks stand at different slices when they meet. */
static void fill_gradients(gradients *g)
{
    fill_values(g->x, SAMPLES * EACH * IN, 1, 1.0);
    fill_values(g->dy, SAMPLES * EACH * OUT, 2, 1.0);
    for (size_t i = 0; i < SAMPLES * EACH * OUT; i++)
        g->dy[i] = ldexpf(g->dy[i], (int)(i / (EACH * OUT) * 11) - 50);
}

Test(exact_arith, gradients_cut_over_ranks_and_micro_batches_have_the_accumulators_bits)
{
    float dw[OUT * IN], db[OUT], rows[VOCAB * OUT];
    for (int ranks = 1; ranks <= 4; ranks++) {
        static gradients g;
        const ar_run o = {.parallel.tp = ranks};
        fill_gradients(&g);
        g.transposed = ranks % 2 == 0;
        plain_gradients(&g, dw, db, rows);
        cr_assert_ok(rank_run(&o, gradient_rank, &g));
        for (int r = 0; r < ranks; r++) {
            for (size_t i = 0; i < OUT * IN; i++) {
                const float actual = g.w[r][g.transposed ? i % IN * OUT + i / IN : i];
                cr_assert_eq(first_different_bits(&actual, &dw[i], 1), 1, "rank %d of %d: dW", r, ranks);
            }
            cr_assert_eq(first_different_bits(g.b[r], db, OUT), OUT, "rank %d of %d: db", r, ranks);
            cr_assert_eq(first_different_bits(g.rows[r], rows, VOCAB * OUT), VOCAB * OUT, "rank %d of %d", r, ranks);
        }
    }
}

/* --- what is refused ---------------------------------------------------------------------------------------------- */

enum { DEPTH = 5 };

static ar_status other_depth(ar_ctx *ctx, void *user)
{
    static const float zeros[64];
    const size_t a_shape[2] = {2, DEPTH + 1}, b_shape[2] = {2, DEPTH};
    const ar_operand *oa = NULL, *ob = NULL;
    ar_parts a = {.n = 1}, b = {.n = 1};
    (void)user;
    AR_TRY(rank_upload(ctx, &a.part[0], 2, a_shape, zeros));
    AR_TRY(rank_upload(ctx, &b.part[0], 2, b_shape, zeros));
    AR_TRY(ar_ctx_arith(ctx)->operand_b(ctx, &ob, &b, true, DEPTH, NULL, NULL, "b"));
    return ar_ctx_arith(ctx)->operand_a(ctx, &oa, &a, ob, "proj");
}

static ar_status other_type(ar_ctx *ctx, void *user)
{
    const size_t shape[2] = {2, DEPTH};
    const ar_operand *ob = NULL;
    ar_parts b = {.n = 1};
    (void)user;
    AR_TRY(ar_ctx_tensor(ctx, &b.part[0], AR_I32, 2, shape));
    return ar_ctx_arith(ctx)->operand_b(ctx, &ob, &b, true, DEPTH, NULL, NULL, "b");
}

/* Two parts: side by side along K they have the same rows, else the same K. */
typedef struct two_parts {
    bool along_k;
    size_t rows, k; /* of the second; the first has 2 and DEPTH */
} two_parts;

static ar_status parts_of_b(ar_ctx *ctx, void *user)
{
    static const float zeros[64];
    const two_parts *t = user;
    const size_t first[2] = {2, DEPTH}, second[2] = {t->rows, t->k};
    const ar_operand *ob = NULL;
    ar_parts b = {.n = 2, .along_k = t->along_k};
    AR_TRY(rank_upload(ctx, &b.part[0], 2, first, zeros));
    AR_TRY(rank_upload(ctx, &b.part[1], 2, second, zeros));
    return ar_ctx_arith(ctx)->operand_b(ctx, &ob, &b, true, t->along_k ? DEPTH + t->k : DEPTH, NULL, NULL, "b");
}

Test(exact_arith, parts_side_by_side_that_differ_in_rows_and_stacked_ones_that_differ_in_k_are_refused)
{
    two_parts wrong[] = {{true, 1, DEPTH}, {true, 3, DEPTH}, {false, 2, DEPTH - 1}, {false, 2, DEPTH + 1}};
    two_parts right[] = {{true, 2, DEPTH - 1}, {false, 3, DEPTH}};
    for (int numerics = AR_NUMERICS_EXACT; numerics <= AR_NUMERICS_NATIVE; numerics++) {
        const ar_run one = {.parallel.tp = 1, .numerics = (ar_numerics)numerics};
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
            char shapes[64];
            snprintf(shapes, sizeof shapes, "part 1 is [%zu, %zu] beside [2, %d]", wrong[i].rows, wrong[i].k, DEPTH);
            cr_expect_eq(rank_run(&one, parts_of_b, &wrong[i]), AR_ERR_SHAPE, "case %zu", i);
            cr_expect_says(shapes);
        }
        for (size_t i = 0; i < sizeof right / sizeof *right; i++)
            cr_expect_eq(rank_run(&one, parts_of_b, &right[i]), AR_OK, "case %zu: %s", i, ar_error_message());
    }
}

Test(exact_arith, operands_that_do_not_fit_are_refused_in_both_numerics)
{
    for (int numerics = AR_NUMERICS_EXACT; numerics <= AR_NUMERICS_NATIVE; numerics++) {
        const ar_run one = {.parallel.tp = 1, .numerics = (ar_numerics)numerics};
        cr_assert_refused(rank_run(&one, other_depth, NULL), AR_ERR_SHAPE, "proj");
        cr_assert_eq(rank_run(&one, other_type, NULL), AR_ERR_DTYPE, "%s", ar_error_message());
    }
}

static ar_status add_odd_samples(ar_ctx *ctx, void *user)
{
    enum { TOKENS = 3 };
    const size_t *samples = user;
    const size_t x_shape[2] = {TOKENS, IN}, dy_shape[2] = {TOKENS, OUT};
    const float zeros[TOKENS * (IN > OUT ? IN : OUT)] = {0};
    ar_param w = {0};
    ar_tensor x, dy;
    ar_status st = make_param(&w, ctx, "w", 2, OUT, IN, false);
    AR_TRY_TO(done, st, rank_upload(ctx, &x, 2, x_shape, zeros));
    AR_TRY_TO(done, st, rank_upload(ctx, &dy, 2, dy_shape, zeros));
    st = ar_ctx_arith(ctx)->grad_contract(ctx, &(ar_grad_terms){&w, dy}, 1, &x, *samples, NULL);
done:
    ar_param_fini(&w);
    return st;
}

Test(exact_arith, samples_that_do_not_divide_the_tokens_are_refused)
{
    static const ar_run one = {.parallel.tp = 1};
    size_t samples = 3;
    cr_assert_ok(rank_run(&one, add_odd_samples, &samples));
    samples = 2;
    cr_assert_refused(rank_run(&one, add_odd_samples, &samples), AR_ERR_SHAPE, "3 tokens in 2 samples");
    samples = 0;
    cr_assert_refused(rank_run(&one, add_odd_samples, &samples), AR_ERR_SHAPE, "3 tokens in 0 samples");
}
