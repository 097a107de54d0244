/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient norm, each element of the full tensors once, whoever holds it. */
#include "anyrank/train.h"
#include "ref/core/tensor_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

/* Three parameters on N ranks: a matrix cut by rows, a vector that all hold, and `heads` rows of which N/heads ranks
 * each hold a copy (all of them where there are fewer ranks). The last matrix requires no gradient. */
enum { ROWS = 12, HEADS = 2, COLS = 3, VECTOR = 5, PARAMS = 4, MOST_RANKS = 4, MATRIX = ROWS * COLS };

typedef struct job {
    float sharded[MATRIX], replicated[VECTOR], heads[HEADS * COLS]; /* gradients of the full tensors */
    bool none;                                                      /* no gradient was ever added */
    float norm[MOST_RANKS];
} job;

static ar_status make(ar_ctx *ctx, ar_param *p, const char *name, const ar_layout *layout, const job *j,
                      const float *gradient)
{
    AR_TRY(ar_param_init(p, ctx, name, layout, false));
    const size_t first = layout->ndim > 1 ? layout->box[0].global[0] * layout->shape[1] : 0;
    return j->none ? AR_OK : rank_add_gradient(ctx, p, gradient + first);
}

static ar_status make_all(ar_ctx *ctx, ar_param p[PARAMS], const job *j)
{
    static const float huge[VECTOR] = {1e30f, 1e30f, 1e30f, 1e30f, 1e30f};
    const size_t matrix[2] = {ROWS, COLS}, length = VECTOR, head[2] = {HEADS, COLS};
    const int r = (int)rank_of(ctx), n = (int)ranks_of(ctx), parts = n < HEADS ? n : HEADS, copies = n / parts;
    ar_layout layout;
    AR_TRY(ar_layout_shard(&layout, 2, matrix, 0, r, n));
    AR_TRY(make(ctx, &p[0], "sharded", &layout, j, j->sharded));
    AR_TRY(ari_layout_replicate(&layout, 1, &length, r, n));
    AR_TRY(make(ctx, &p[1], "replicated", &layout, j, j->replicated));
    AR_TRY(make(ctx, &p[3], "frozen", &layout, j, huge));
    p[3].requires_grad = false;
    AR_TRY(ar_layout_shard(&layout, 2, head, 0, r / copies, parts));
    layout.replica = r % copies;
    layout.replicas = copies;
    return make(ctx, &p[2], "heads", &layout, j, j->heads);
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    job *j = user;
    SCOPED(rank_params_end) rank_params p;
    rank_params_begin(&p);
    AR_TRY(make_all(ctx, p.at, j));
    return ar_gradient_norm(&j->norm[rank_of(ctx)], ctx, p.all, PARAMS);
}

static void run(job *j, int ranks, ar_numerics numerics)
{
    const ar_run o = {.parallel.tp = ranks, .numerics = numerics};
    cr_assert_ok(rank_run(&o, rank_main, j));
}

static void fill(float *x, size_t n, float value)
{
    for (size_t i = 0; i < n; i++)
        x[i] = value;
}

/* 36 + 5 + 6 elements of 1, of which one becomes -2 and another 0: squares that add up to 49. */
static job ones(void)
{
    job j = {0};
    fill(j.sharded, MATRIX, 1.0f);
    fill(j.replicated, VECTOR, 1.0f);
    fill(j.heads, HEADS * COLS, 1.0f);
    j.sharded[7] = -2.0f;
    j.heads[5] = 0.0f;
    return j;
}

Test(gradient_norm, each_element_counts_once_on_any_number_of_ranks)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        job j = ones();
        run(&j, ranks, AR_NUMERICS_EXACT);
        for (int r = 0; r < ranks; r++)
            cr_expect_eq(j.norm[r], 7.0f, "%d ranks, rank %d: %a", ranks, r, (double)j.norm[r]);
    }
}

Test(gradient_norm, native_gradients_are_summed_in_the_same_way)
{
    job j = ones();
    run(&j, 4, AR_NUMERICS_NATIVE);
    cr_expect_eq(j.norm[3], 7.0f);
}

static long double squares_of(const float *x, size_t n)
{
    long double sum = 0.0L;
    for (size_t i = 0; i < n; i++)
        sum += (long double)x[i] * (long double)x[i];
    return sum;
}

Test(gradient_norm, any_magnitude_gives_the_same_bits_and_the_nearest_value)
{
    static const double scales[] = {1e-44, 1e-39, 1e-20, 1.0, 1e20, 1e36};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        job one = {0};
        fill_values(one.sharded, MATRIX, 40 + (unsigned)i, scales[i]);
        fill_values(one.replicated, VECTOR, 41 + (unsigned)i, scales[i] * 100);
        fill_values(one.heads, HEADS * COLS, 42 + (unsigned)i, scales[i] * 1e-3);
        const long double sum =
            squares_of(one.sharded, MATRIX) + squares_of(one.replicated, VECTOR) + squares_of(one.heads, HEADS * COLS);
        run(&one, 1, AR_NUMERICS_EXACT);
        cr_expect_eq(one.norm[0], (float)sqrtl(sum), "scale %g: %a", scales[i], (double)one.norm[0]);
        for (int ranks = 2; ranks <= 4; ranks += 2) {
            job j = one;
            run(&j, ranks, AR_NUMERICS_EXACT);
            for (int r = 0; r < ranks; r++)
                cr_expect_eq(memcmp(&j.norm[r], &one.norm[0], sizeof(float)), 0, "scale %g, rank %d of %d", scales[i],
                             r, ranks);
        }
    }
}

Test(gradient_norm, gradients_of_zero_and_no_gradients_have_the_norm_plus_zero)
{
    for (int none = 0; none < 2; none++) {
        job j = {.none = none};
        run(&j, 2, AR_NUMERICS_EXACT);
        cr_expect(j.norm[1] == 0.0f && !signbit(j.norm[1]));
    }
}

Test(gradient_norm, one_element_that_is_not_finite_makes_every_ranks_norm_nan)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        job j = ones();
        j.sharded[MATRIX - 1] = bad[i]; /* the last rank's */
        run(&j, 4, AR_NUMERICS_EXACT);
        for (int r = 0; r < 4; r++)
            cr_expect(isnan(j.norm[r]), "%g, rank %d: %g", (double)bad[i], r, (double)j.norm[r]);
    }
}
